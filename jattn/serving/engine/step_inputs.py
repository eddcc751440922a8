"""What a step is given besides its metadata: tokens, sampling parameters, counts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.requests import token_starts
from jattn.serving.engine.adjustments import Adjusted, Adjustments, build_adjustments
from jattn.serving.engine.generation import Generation
from jattn.serving.engine.sampler import SamplingMetadata, build_sampling_metadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.step import StepTokens
from jattn.serving.engine.token_filter import without


def step_tokens(
    step: Step,
    generations: Sequence[Generation],
    bucket: Bucket,
    row_before: Mapping[int, int],
    last_tokens: jax.Array,
    num_rows: int,
) -> StepTokens:
    """The tokens of a step, laid out in the bucket; numpy's arrays, but for the last tokens.

    Args:
        step: The step.
        generations: Of its requests.
        bucket: Its bucket.
        row_before: The sampler's row of each request in the step before, where the host has not read it.
        last_tokens: Those tokens, on the device.
        num_rows: Of the sampler.
    """
    lens = np.asarray(step.query_lens)
    starts = token_starts(lens, bucket)
    ids, sources = [], []  # of each row's last token
    for generation, request_id, end in zip(generations, step.request_ids, step.seq_lens, strict=True):
        is_known = len(generation.token_ids) >= end
        ids.append(generation.token_ids[end - 1] if is_known else 0)
        sources.append(-1 if is_known else row_before[request_id])  # only the device knows it
    token_ids: Any = np.zeros(bucket.max_tokens, np.int32)
    token_rows: Any = np.full(bucket.max_tokens, -1, np.int32)
    lasts = starts + lens - 1
    token_ids[lasts], token_rows[lasts] = ids, sources
    for row in np.flatnonzero(lens > 1).tolist():
        end = step.seq_lens[row] - 1
        before = generations[row].token_ids[end + 1 - step.query_lens[row] : end]
        token_ids[starts[row] : lasts[row]] = before
    request_ends: Any = np.zeros(num_rows, np.int32)
    request_ends[: len(lens)] = lasts
    return StepTokens(token_ids, token_rows, last_tokens, request_ends)


class StepSampling:
    """The sampling parameters of a step, one row a request: made anew where the requests changed.

    Attributes:
        place: Where they lie; None = on one device, or known to each process alone.
    """

    def __init__(self, place: jax.sharding.Sharding | None = None) -> None:
        """Begins with none."""
        self.place = place
        self._last: tuple[tuple[Any, ...], SamplingMetadata] | None = None

    def of(
        self, step: Step, generations: Sequence[Generation], num_rows: int
    ) -> tuple[SamplingMetadata, Any]:
        """Sampling parameters, and how many tokens each row's request has been given or promised."""
        num_generated = np.zeros(num_rows, np.int32)
        num_generated[: len(generations)] = [generation.num_asked_for for generation in generations]
        key = (step.request_ids, num_rows)
        if self._last is None or self._last[0] != key:
            params = [generation.sampling_params for generation in generations]
            made = build_sampling_metadata(params, num_rows)
            self._last = (key, made if self.place is None else jax.device_put(made, self.place))
        return self._last[1], num_generated


def step_adjustments(
    step: Step,
    generations: Sequence[Generation],
    row_before: Mapping[int, int],
    last_tokens: jax.Array,
    **sizes: int,
) -> Adjustments | None:
    """What the requests ask of the logits, arguments as step_tokens; None where they ask for nothing.

    `sizes` are build_adjustments' num_rows and vocab_size.
    """
    if not any([generation.is_adjusted for generation in generations]):
        return None
    requests = [
        _adjusted(one, row_before[request_id] if one.num_pending else -1)
        for request_id, one in zip(step.request_ids, generations, strict=True)
    ]
    return build_adjustments(requests, last_tokens, **sizes)


def _adjusted(one: Generation, pending_row: int) -> Adjusted:
    """What a generation asks for. Where its mask allows nothing but ends, they may come before min_tokens."""
    allowed, end_ids = None if one.mask is None else one.mask.allowed(), one.end_ids
    if allowed is not None and end_ids and not without(allowed, end_ids).any():
        end_ids = ()
    return Adjusted(
        one.sampling_params,
        *one.penalised_ids(),
        end_ids=end_ids,
        num_generated=one.num_generated,
        pending_row=pending_row,
        allowed=allowed,
    )


class PromptPart(NamedTuple):
    """Tokens of a prompt whose log-probabilities a step brings, `num` likeliest ones each.

    They stand from position `start` on; the first is what comes behind the step's token number `place`.
    """

    request_id: int
    start: int
    token_ids: list[int]
    place: int
    num: int


def prompt_parts(step: Step, generations: Sequence[Generation], bucket: Bucket) -> list[PromptPart]:
    """Where a step makes what is likely behind a prompt's tokens, for those who want to know."""
    if all(one.sampling_params.prompt_logprobs is None for one in generations):
        return []
    starts = token_starts(np.asarray(step.query_lens), bucket).tolist()
    rows = zip(step.request_ids, generations, step.query_lens, step.seq_lens, starts, strict=True)
    return [
        PromptPart(request_id, end - count + 1, token_ids, place, one.sampling_params.prompt_logprobs)
        for request_id, one, count, end, place in rows
        if one.sampling_params.prompt_logprobs is not None
        and (token_ids := one.token_ids[end - count + 1 : min(end + 1, one.num_prompt_tokens)])
    ]
