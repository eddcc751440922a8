"""A step as the devices are given it: a value, which other processes can be sent."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.serving.engine.adjustments import Adjustments
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.step import StepTokens
from jattn.serving.engine.step_inputs import PromptPart


class PromptCall(NamedTuple):
    """What log-probabilities of prompts a step brings: of the token behind each, and of so many likeliest."""

    next_ids: np.ndarray
    num: int

    @classmethod
    def of(cls, parts: Sequence[PromptPart], bucket: Bucket) -> "PromptCall | None":
        """Those of these parts; None where there are none."""
        num = most_wanted([part.num for part in parts])
        if num is None:
            return None
        next_ids: Any = np.zeros(bucket.max_tokens, np.int32)
        for part in parts:
            next_ids[part.place : part.place + len(part.token_ids)] = part.token_ids
        return cls(next_ids, num)


class StepCall(NamedTuple):
    """A step.

    Attributes:
        block_copies: As in `Step`; made first.
        near_copies: As block_copies.
        metadata: Says which bucket's executable runs.
        prefix_len: Tokens of a prefix that is attended to once; 0 = none.
        tokens: Their `last` is whatever the device has.
        drafts: What the proposer makes the tokens of, and how many of them a row has; None = no drafts.
        drawn_by: Sampling parameters, and what requests ask of the logits.
        num_logprobs: Of each new token; None = nobody asked.
        prompt: Log-probabilities of prompts; None = nobody asked.
    """

    block_copies: Sequence[tuple[int, int]]
    near_copies: Sequence[tuple[int, int]]
    metadata: BatchMetadata
    prefix_len: int
    tokens: StepTokens
    drafts: tuple[Any, Any] | None
    drawn_by: tuple[SamplingMetadata, Adjustments | None]
    num_logprobs: int | None
    prompt: PromptCall | None

    def on_host(self) -> "StepCall":
        """The same without what only the device knows, in numpy's arrays."""
        host: StepCall = jax.device_get(self.after(np.zeros(0, np.int32)))
        return host

    def after(self, last: Any) -> "StepCall":
        """The same behind a step whose tokens are these."""
        sampling, adjustments = self.drawn_by
        adjustments = None if adjustments is None else adjustments._replace(last=last)
        tokens = self.tokens._replace(last=last)
        return self._replace(tokens=tokens, drawn_by=(sampling, adjustments))


def most_wanted(wanted: Sequence[int | None]) -> int | None:
    """The largest number that anybody wants, as a power of two or 0: few programs for many wishes."""
    asked = [num for num in wanted if num is not None]
    if not asked:
        return None
    return 1 << (max(asked) - 1).bit_length() if max(asked) else 0
