"""What a step brought its requests, once the host has read it."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax

from jattn.serving.engine.logprobs import TokenLogprobs, fetched
from jattn.serving.engine.outputs import Logprobs
from jattn.serving.engine.rejection_sampler import Verified
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.step import Sampled
from jattn.serving.engine.step_inputs import PromptPart


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


class Asked(NamedTuple):
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
