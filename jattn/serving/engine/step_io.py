"""Inputs and outputs of a step on the host."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.batch.requests import request_token_starts
from jattn.serving.engine.logits_processors import (
    LogitsAdjustments,
    RequestAdjustments,
    build_logits_adjustments,
    without,
)
from jattn.serving.engine.logprobs import TokenLogprobs, fetch_logprobs
from jattn.serving.engine.outputs import Logprobs
from jattn.serving.engine.rejection_sampler import VerifiedTokens
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.step import StepTokens
from jattn.serving.engine.step_sampler import SampledTokens


def build_step_tokens(
    step: Step,
    sequences: Sequence[SequenceState],
    bucket: Bucket,
    previous_rows: Mapping[int, int],
    last_tokens: jax.Array,
    num_sampler_rows: int,
) -> StepTokens:
    """Arrange the tokens of a step in its bucket, as numpy arrays except for `last_tokens`.

    Args:
        step: Scheduled requests and tokens of the step.
        sequences: Sequence of each row.
        bucket: Bucket of the step.
        previous_rows: Sampler row of each request whose last token the host has not read.
        last_tokens: New tokens of the previous step, on the device.
        num_sampler_rows: Number of sampler rows.
    """
    lens = np.asarray(step.query_lens)
    starts = request_token_starts(lens, bucket)
    ids, sources = [], []  # of the last token of each row
    for sequence, request_id, end in zip(sequences, step.request_ids, step.seq_lens, strict=True):
        is_known = len(sequence.token_ids) >= end
        ids.append(sequence.token_ids[end - 1] if is_known else 0)
        sources.append(-1 if is_known else previous_rows[request_id])  # Only the device has the token.
    token_ids: Any = np.zeros(bucket.max_tokens, np.int32)
    token_rows: Any = np.full(bucket.max_tokens, -1, np.int32)
    last_indices = starts + lens - 1
    token_ids[last_indices], token_rows[last_indices] = ids, sources
    for row in np.flatnonzero(lens > 1).tolist():
        end = step.seq_lens[row] - 1
        previous_tokens = sequences[row].token_ids[end + 1 - step.query_lens[row] : end]
        token_ids[starts[row] : last_indices[row]] = previous_tokens
    request_ends: Any = np.zeros(num_sampler_rows, np.int32)
    request_ends[: len(lens)] = last_indices
    return StepTokens(token_ids, token_rows, last_tokens, request_ends)


def build_step_adjustments(
    step: Step,
    sequences: Sequence[SequenceState],
    previous_rows: Mapping[int, int],
    last_tokens: jax.Array,
    *,
    num_sampler_rows: int,
    vocab_size: int,
) -> LogitsAdjustments | None:
    """Return the logits adjustments of a step's rows; None if no row has any.

    Args:
        step: Scheduled requests and tokens of the step.
        sequences: Sequence of each row.
        previous_rows: Sampler row of each request whose last token the host has not read.
        last_tokens: New tokens of the previous step, on the device.
        num_sampler_rows: Number of sampler rows.
        vocab_size: Size of the vocabulary.
    """
    if not any([sequence.needs_logits_adjustment for sequence in sequences]):
        return None
    requests = [
        _request_adjustments(sequence, previous_rows[request_id] if sequence.num_pending else -1)
        for request_id, sequence in zip(step.request_ids, sequences, strict=True)
    ]
    return build_logits_adjustments(requests, last_tokens, num_rows=num_sampler_rows, vocab_size=vocab_size)


def _request_adjustments(sequence: SequenceState, pending_row: int) -> RequestAdjustments:
    """Return a sequence's adjustments. If its mask allows only stop tokens, min_tokens is ignored."""
    allowed, end_ids = None if sequence.mask is None else sequence.mask.allowed_bitmask(), sequence.end_ids
    if allowed is not None and end_ids and not without(allowed, end_ids).any():
        end_ids = ()
    return RequestAdjustments(
        sequence.sampling_params,
        *sequence.penalized_ids(),
        end_ids=end_ids,
        num_generated=sequence.num_generated,
        pending_row=pending_row,
        allowed=allowed,
    )


class PromptLogprobsRange(NamedTuple):
    """A range of prompt tokens whose log-probabilities a step computes.

    Attributes:
        request_id: Identifier of the request.
        start: Position of the first token in the prompt.
        token_ids: Token ids.
        token_index: Index of the step's token before the first of them.
        num: Number of most likely tokens to report for each.
    """

    request_id: int
    start: int
    token_ids: list[int]
    token_index: int
    num: int


def prompt_logprobs_ranges(
    step: Step, sequences: Sequence[SequenceState], bucket: Bucket
) -> list[PromptLogprobsRange]:
    """Return the ranges of prompt tokens whose log-probabilities are requested and computed in this step."""
    if all(sequence.sampling_params.prompt_logprobs is None for sequence in sequences):
        return []
    starts = request_token_starts(np.asarray(step.query_lens), bucket).tolist()
    rows = zip(step.request_ids, sequences, step.query_lens, step.seq_lens, starts, strict=True)
    return [
        PromptLogprobsRange(
            request_id, end - count + 1, token_ids, token_index, sequence.sampling_params.prompt_logprobs
        )
        for request_id, sequence, count, end, token_index in rows
        if sequence.sampling_params.prompt_logprobs is not None
        and (token_ids := sequence.token_ids[end - count + 1 : min(end + 1, sequence.num_prompt_tokens)])
    ]


class PromptLogprobsCall(NamedTuple):
    """The prompt log-probabilities of a step: the next token id of each token, and how many to report."""

    next_ids: np.ndarray
    num: int

    @classmethod
    def from_ranges(
        cls, ranges: Sequence[PromptLogprobsRange], bucket: Bucket
    ) -> "PromptLogprobsCall | None":
        """Combine ranges of a step into one call; None if there are none."""
        num = max_num_logprobs([prompt_range.num for prompt_range in ranges])
        if num is None:
            return None
        next_ids: Any = np.zeros(bucket.max_tokens, np.int32)
        for prompt_range in ranges:
            next_ids[prompt_range.token_index : prompt_range.token_index + len(prompt_range.token_ids)] = (
                prompt_range.token_ids
            )
        return cls(next_ids, num)


class StepCall(NamedTuple):
    """The inputs of one step, which can be sent to other processes.

    Attributes:
        block_copies: Block copies to make before the step; see `Step`.
        sliding_window_copies: Block copies in the sliding-window layers; see `Step`.
        metadata: Metadata of the batch. Its bucket selects the executable.
        prefix_len: Number of tokens of a shared prefix that is read once; 0 without one.
        tokens: The step's tokens; the device replaces `last_tokens`.
        drafts: Input of the proposer, and the number of drafts of each row; None without drafts.
        sampling_inputs: Sampling parameters, and adjustments of the logits.
        num_logprobs: Number of log-probabilities per new token; None if not requested.
        prompt: Prompt log-probabilities to compute; None if not requested.
    """

    block_copies: Sequence[tuple[int, int]]
    sliding_window_copies: Sequence[tuple[int, int]]
    metadata: BatchMetadata
    prefix_len: int
    tokens: StepTokens
    drafts: tuple[Any, Any] | None
    sampling_inputs: tuple[SamplingMetadata, LogitsAdjustments | None]
    num_logprobs: int | None
    prompt: PromptLogprobsCall | None

    def to_host(self) -> "StepCall":
        """Return a copy in numpy arrays, without the values that only the device has."""
        host: StepCall = jax.device_get(self.with_last_tokens(np.zeros(0, np.int32)))
        return host

    def with_last_tokens(self, last: Any) -> "StepCall":
        """Return a copy with the new tokens of the previous step."""
        sampling, adjustments = self.sampling_inputs
        adjustments = None if adjustments is None else adjustments._replace(last=last)
        tokens = self.tokens._replace(last_tokens=last)
        return self._replace(tokens=tokens, sampling_inputs=(sampling, adjustments))


def max_num_logprobs(requested: Sequence[int | None]) -> int | None:
    """Return the largest requested number as a power of two or 0, so that few programs are compiled."""
    numbers = [num for num in requested if num is not None]
    if not numbers:
        return None
    return 1 << (max(numbers) - 1).bit_length() if max(numbers) else 0


class NewTokens(NamedTuple):
    """The new tokens of one request in a step.

    Attributes:
        request_id: Identifier of the request.
        token_ids: New tokens: none if the row does not sample, several if drafts are accepted.
        logprobs: Log-probabilities of each new token, None where not requested; None if no request wants
            them.
        prompt_logprobs: Log-probabilities of the prompt tokens from prompt_start on, if requested.
        prompt_start: Position of the first of these prompt tokens.
        is_verified: Whether the step had drafts.
    """

    request_id: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs | None] | None = None
    prompt_logprobs: Sequence[Logprobs] = ()
    prompt_start: int = 0
    is_verified: bool = False


class PendingOutputs(NamedTuple):
    """The outputs that the requests of a step need."""

    step: Step
    num_logprobs: list[int | None]  # per request
    prompt: list[PromptLogprobsRange]


class InFlightStep(NamedTuple):
    """A started step whose tokens the host has not read."""

    step: Step
    sampled: SampledTokens | VerifiedTokens
    num_logprobs: list[int | None]  # per request
    prompt: list[PromptLogprobsRange]
    prompt_logprobs: TokenLogprobs | None


def read_new_tokens(in_flight_step: InFlightStep, has_read: Callable[[], object]) -> Iterator[NewTokens]:
    """Yield the new tokens of a step's requests. Waits for the step.

    Args:
        in_flight_step: Step whose tokens are not read from the device yet.
        has_read: Function called once the step's arrays are on the host.
    """
    step, sampled, requested, ranges, prompt_logprobs_on_device = in_flight_step
    token_ids, query_len = _read_tokens(sampled, len(step.request_ids))
    logprobs = None if sampled.logprobs is None else fetch_logprobs(sampled.logprobs)
    prompt_logprobs = None if prompt_logprobs_on_device is None else fetch_logprobs(prompt_logprobs_on_device)
    has_read()
    if logprobs is None and prompt_logprobs is None and isinstance(sampled, SampledTokens):
        yield from map(NewTokens, itertools.compress(step.request_ids, step.samples),
                       itertools.compress(token_ids, step.samples))  # fmt: skip
        return
    by_request = {prompt_range.request_id: prompt_range for prompt_range in ranges}
    rows = zip(step.request_ids, token_ids, step.samples, requested, strict=True)
    for row, (request_id, ids, samples, num) in enumerate(rows):
        prompt_range = by_request.get(request_id)
        new = ids if samples else []
        yield NewTokens(
            request_id,
            new,
            [
                logprobs.at(row * query_len + i, token, num) if logprobs and num is not None else None
                for i, token in enumerate(new)
            ],
            [
                prompt_logprobs.at(prompt_range.token_index + i, token, prompt_range.num)
                for i, token in enumerate(prompt_range.token_ids)
            ] if prompt_logprobs and prompt_range else [],
            prompt_range.start if prompt_range else 0,
            isinstance(sampled, VerifiedTokens),
        )  # fmt: skip


def wait_for_steps(in_flight: Iterable[InFlightStep]) -> None:
    """Wait until the outputs of steps are on the host or have failed.

    Called when the process ends: JAX's transfer threads would abort the process if they finished after
    Python.
    """
    for in_flight_step in in_flight:
        with contextlib.suppress(Exception):
            jax.device_get((in_flight_step.sampled, in_flight_step.prompt_logprobs))


def _read_tokens(sampled: SampledTokens | VerifiedTokens, num_rows: int) -> tuple[list[list[int]], int]:
    """Return the new tokens of each row and the number of positions per row. Waits for them."""
    if isinstance(sampled, SampledTokens):
        return jax.device_get(sampled.tokens)[:num_rows, None].tolist(), 1
    tokens, num_accepted = jax.device_get((sampled.tokens, sampled.num_accepted))
    return [tokens[row, : 1 + num_accepted[row]].tolist() for row in range(num_rows)], tokens.shape[1]
