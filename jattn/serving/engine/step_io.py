"""What a step is given besides its metadata: tokens, sampling parameters, counts."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.batch.requests import request_token_starts
from jattn.serving.engine.logits_processors import Adjusted, Adjustments, build_adjustments, without
from jattn.serving.engine.logprobs import TokenLogprobs, fetched
from jattn.serving.engine.outputs import Logprobs
from jattn.serving.engine.rejection_sampler import Verified
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.step import StepTokens
from jattn.serving.engine.step_sampler import Sampled


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
    starts = request_token_starts(lens, bucket)
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
    starts = request_token_starts(np.asarray(step.query_lens), bucket).tolist()
    rows = zip(step.request_ids, generations, step.query_lens, step.seq_lens, starts, strict=True)
    return [
        PromptPart(request_id, end - count + 1, token_ids, place, one.sampling_params.prompt_logprobs)
        for request_id, one, count, end, place in rows
        if one.sampling_params.prompt_logprobs is not None
        and (token_ids := one.token_ids[end - count + 1 : min(end + 1, one.num_prompt_tokens)])
    ]


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


class NewTokens(NamedTuple):
    """What a step brought one of its requests.

    Attributes:
        request_id: Whose.
        token_ids: Its next tokens: none where the row made none, several where drafts of it stay.
        logprobs: Of each of them, None where not asked for; None = nobody asked.
        prompt_logprobs: Of the tokens of the prompt from position prompt_start on, where asked for.
        prompt_start: Position of the first of them.
        is_verified: The step had drafts.
    """

    request_id: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs | None] | None = None
    prompt_logprobs: Sequence[Logprobs] = ()
    prompt_start: int = 0
    is_verified: bool = False


class ImplementationArg(NamedTuple):
    """What a step's requests want to know."""

    step: Step
    num_logprobs: list[int | None]  # of each
    prompt: list[PromptPart]


class InFlight(NamedTuple):
    """A step whose tokens the host has not read."""

    step: Step
    sampled: Sampled | Verified
    num_logprobs: list[int | None]  # that each request asked for
    prompt: list[PromptPart]
    prompt_logprobs: TokenLogprobs | None


def new_tokens(flying: InFlight, has_read: Callable[[], object]) -> Iterator[NewTokens]:
    """What a step brought; waits for it.

    Args:
        flying: The step.
        has_read: Called when its arrays are on the host.
    """
    step, sampled, wanted, parts, of_prompts = flying
    token_ids, query_len = _read_tokens(sampled, len(step.request_ids))
    logprobs = None if sampled.logprobs is None else fetched(sampled.logprobs)
    places = None if of_prompts is None else fetched(of_prompts)
    has_read()
    if logprobs is None and places is None and isinstance(sampled, Sampled):
        yield from map(NewTokens, itertools.compress(step.request_ids, step.samples),
                       itertools.compress(token_ids, step.samples))  # fmt: skip
        return
    by_request = {part.request_id: part for part in parts}
    each = zip(step.request_ids, token_ids, step.samples, wanted, strict=True)
    for row, (request_id, ids, samples, num) in enumerate(each):
        part = by_request.get(request_id)
        new = ids if samples else []
        yield NewTokens(
            request_id,
            new,
            [
                logprobs.at(row * query_len + i, token, num) if logprobs and num is not None else None
                for i, token in enumerate(new)
            ],
            [
                places.at(part.place + i, token, part.num)
                for i, token in enumerate(part.token_ids)
            ] if places and part else [],
            part.start if part else 0,
            isinstance(sampled, Verified),
        )  # fmt: skip


def wait_for(in_flight: Iterable[InFlight]) -> None:
    """Until what they bring is on the host, or has failed.

    As a process ends that has read none of it: a thread of JAX's that brings it after Python has gone aborts
    the process.
    """
    for flying in in_flight:
        with contextlib.suppress(Exception):
            jax.device_get((flying.sampled, flying.prompt_logprobs))


def _read_tokens(sampled: Sampled | Verified, num_rows: int) -> tuple[list[list[int]], int]:
    """New tokens of each row, and how many places a row has; waits for them."""
    if isinstance(sampled, Sampled):
        return jax.device_get(sampled.tokens)[:num_rows, None].tolist(), 1
    tokens, num_accepted = jax.device_get((sampled.tokens, sampled.num_accepted))
    return [tokens[row, : 1 + num_accepted[row]].tolist() for row in range(num_rows)], tokens.shape[1]
