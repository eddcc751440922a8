"""Drafts by prompt lookup: what followed when a request's last tokens stood there before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from jattn.batch.bucket import Bucket
from jattn.serving.engine.proposer import Proposer
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from pallas_kernels.checks import require, require_int, require_positive


class NgramProposer(Proposer):
    """Drafts what followed the longest n-gram that a request's tokens end with, where it first stood.

    Source: vLLM V1 `NgramProposer`.
    """

    is_lookup = True

    def __init__(self, *, prompt_lookup_min: int = 3, prompt_lookup_max: int = 5) -> None:
        """Holds no state of requests.

        Args:
            prompt_lookup_min: Shortest n-gram that counts. Short ones match by chance, and a draft that is
                rejected costs time.
            prompt_lookup_max: Longest n-gram that is looked for.

        Raises:
            ValueError: They are no positive ints, or the shortest is longer than the longest.
        """
        sizes = {"prompt_lookup_min": prompt_lookup_min, "prompt_lookup_max": prompt_lookup_max}
        require_int(**sizes)
        require_positive(**sizes)
        rule = f"be at most prompt_lookup_max ({prompt_lookup_max})"
        require(prompt_lookup_min <= prompt_lookup_max, "prompt_lookup_min", rule, prompt_lookup_min)
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, token_ids: Int[np.ndarray, " tokens"], num_tokens: int) -> list[int]:
        """At most `num_tokens` drafts of what comes next; none where nothing matches.

        One comparison of all tokens with the last; only where that agrees is the token before looked at.

        Args:
            token_ids: Of the request, prompt and generated.
            num_tokens: Most drafts.
        """
        last = len(token_ids) - 1
        ends = (
            np.flatnonzero(token_ids[: max(last, 0)] == token_ids[-1]) if last > 0 else np.zeros(0, np.intp)
        )
        length, longest = 1, ends  # where n-grams end that agree so far; the longest that counts
        while longest.size and length < self.prompt_lookup_max:
            longest = longest[longest >= length]
            longest = longest[token_ids[longest - length] == token_ids[last - length]]
            if longest.size:
                ends, length = longest, length + 1
        if not ends.size or length < self.prompt_lookup_min:
            return []
        first = int(ends[0]) + 1
        return token_ids[first : first + num_tokens].tolist()

    def look(self, generation: Generation, num_tokens: int) -> int:
        """As `Proposer.look`; keeps the drafts in the generation."""
        drafting = generation.drafting
        drafting.drafts = self.propose(drafting.tokens.caught_up(generation.token_ids), num_tokens)
        return len(drafting.drafts)

    def prepare(
        self,
        step: Step,
        generations: Sequence[Generation],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> Int32[np.ndarray, " tokens"]:
        """As `Proposer.prepare`: the drafts themselves."""
        ids = np.zeros((bucket.max_decodes, bucket.decode_query_len), np.int32)
        for row, one in enumerate(generations):
            drafts = one.drafting.drafts[: one.drafting.num_drafted]
            ids[row, : 1 + len(drafts)] = [one.token_ids[-1], *drafts]
        return ids.reshape(-1)

    def start(self, prepared: Any) -> Any:
        """As `Proposer.start`."""
        return prepared
