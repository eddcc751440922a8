"""What a step is given besides its metadata: tokens, sampling parameters, counts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.bucket import Bucket
from jattn.requests import pack_tokens, token_starts
from jattn.serving.adjustments import Adjusted, Adjustments, build_adjustments
from jattn.serving.generation import Generation
from jattn.serving.sampler import SamplingMetadata, build_sampling_metadata
from jattn.serving.scheduler import Step
from jattn.serving.step import StepTokens


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
    ids, sources = [], []
    ends = zip(generations, step.request_ids, step.query_lens, step.seq_lens, strict=True)
    for generation, request_id, count, end in ends:
        known = generation.token_ids[end - count : end]
        last = [] if len(known) == count else [row_before[request_id]]  # only the device knows it
        ids.append(known + [0] * len(last))
        sources.append([-1] * len(known) + last)
    token_ids: Any = pack_tokens(ids, bucket)
    token_rows: Any = pack_tokens(sources, bucket, pad=-1)
    counts = np.asarray(step.query_lens)
    request_ends: Any = np.zeros(num_rows, np.int32)
    request_ends[: len(counts)] = token_starts(counts, bucket) + counts - 1
    return StepTokens(token_ids, token_rows, last_tokens, request_ends)


class StepSampling:
    """The sampling parameters of a step, one row a request: made anew where the requests changed.

    Numpy's arrays, which the compiled functions send sooner than device_put.
    """

    def __init__(self) -> None:
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
            self._last = (key, build_sampling_metadata(params, num_rows))
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
    if not any(one.sampling_params.is_adjusted or one.mask is not None for one in generations):
        return None
    requests = [
        Adjusted(
            params=one.sampling_params,
            prompt_ids=one.token_ids[: one.num_prompt_tokens],
            output_ids=one.token_ids[one.num_prompt_tokens :],
            end_ids=tuple(one.stop_ids),
            pending_row=row_before[request_id] if one.num_pending else -1,
            allowed=None if one.mask is None else one.mask.allowed(),
        )
        for request_id, one in zip(step.request_ids, generations, strict=True)
    ]
    return build_adjustments(requests, last_tokens, **sizes)


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
