"""What a step is given besides its metadata: tokens, sampling parameters, counts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.bucket import Bucket
from jattn.requests import pack_tokens
from jattn.serving.generation import Generation
from jattn.serving.sampler import SamplingMetadata, build_sampling_metadata
from jattn.serving.scheduler import Step
from jattn.serving.step import StepTokens


class StepInFlight(NamedTuple):
    """A step whose tokens the host has not read: its requests' rows, and the device's array of tokens."""

    step: Step
    rows: np.ndarray
    tokens: jax.Array


def step_tokens(
    step: Step,
    generations: Sequence[Generation],
    bucket: Bucket,
    in_flight: Iterable[StepInFlight],
    last_tokens: jax.Array,
) -> StepTokens:
    """The tokens of a step, laid out in the bucket; numpy's arrays, but for the last tokens.

    Args:
        step: The step.
        generations: Of its requests.
        bucket: Its bucket.
        in_flight: The steps before whose tokens the host has not read.
        last_tokens: Those of the last one, on the device.
    """
    row_before = {
        request_id: row
        for before in in_flight
        for request_id, row in zip(before.step.request_ids, before.rows.tolist(), strict=True)
    }
    ids, sources = [], []
    ends = zip(generations, step.request_ids, step.query_lens, step.seq_lens, strict=True)
    for generation, request_id, count, end in ends:
        known = generation.token_ids[end - count : end]
        last = [] if len(known) == count else [row_before[request_id]]  # only the device knows it
        ids.append(known + [0] * len(last))
        sources.append([-1] * len(known) + last)
    token_ids: Any = pack_tokens(ids, bucket)
    token_rows: Any = pack_tokens(sources, bucket, pad=-1)
    return StepTokens(token_ids, token_rows, last_tokens)


class StepSampling:
    """The sampling parameters of a step, laid out in its rows: made anew where requests or rows changed.

    Numpy's arrays, which the compiled functions send sooner than device_put.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], SamplingMetadata] | None = None

    def of(
        self, step: Step, generations: Sequence[Generation], bucket: Bucket, rows: np.ndarray
    ) -> tuple[SamplingMetadata, Any]:
        """Sampling parameters, and how many tokens each row's request has been given or promised."""
        num_generated = np.zeros(bucket.max_reqs, np.int32)
        num_generated[rows] = [generation.num_asked_for for generation in generations]
        key = (step.request_ids, bucket, rows.tobytes())
        if self._last is None or self._last[0] != key:
            params = [generation.sampling_params for generation in generations]
            self._last = (key, build_sampling_metadata(params, num_rows=bucket.max_reqs, rows=rows))
        return self._last[1], num_generated
