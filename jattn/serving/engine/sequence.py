"""One completion under way, and what it becomes."""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jattn.serving.engine.detokenizer import StopFilter, TextStream
from jattn.serving.engine.outputs import GenerationMetrics, GenerationResult, Logprobs, RequestOutput
from jattn.serving.engine.prefix_cache import BlockHashes
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.structured_outputs import TokenMask

# Tokens. To wait for the last step, draft, and begin anew without the drafts took an 8B-wide model on an H200
# 14 ms, three steps (rows `drafts`): 5 times in 512 tokens cost 3 %, 12 times, as with 64 here, cost 7.
MAX_SLEEP = 256


LEAST_HOPE = 1.0  # drafts accepted that a request is credited with when it tries again


class TokenBuffer:
    """Token ids, int32: looked at and taken into a step's table at once, where a list would be copied."""

    def __init__(self) -> None:
        """Starts empty."""
        self._ids, self._count = np.zeros(256, np.int32), 0

    def caught_up(self, token_ids: Sequence[int]) -> Int[np.ndarray, " tokens"]:
        """All of `token_ids`, which begin with those of the last time."""
        count = len(token_ids)
        if count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(max(count, len(self._ids)), np.int32)])
        self._ids[self._count : count] = token_ids[self._count :]
        self._count = count
        return self._ids[:count]


@dataclasses.dataclass(eq=False)
class Drafting:
    """Of one generation.

    Attributes:
        num_drafted: Drafts that it has now and can use; what pads its row does not count.
        drafts: These, where the host knows them; of one that sleeps, what it would have had.
        hope: How many of its drafts are accepted of late; None = it has had none.
        num_misses: How often none was, since one was.
        sleeps_until: It is not drafted for before it has so many tokens.
        watched_from: Tokens known when `drafts` were looked up for one that sleeps.
        tokens: Its tokens, for who looks at them all.
        num_read: Its tokens that a draft model has keys and values of.
    """

    num_drafted: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    hope: float | None = None
    num_misses: int = 0
    sleeps_until: int = 0
    watched_from: int = 0
    tokens: TokenBuffer = dataclasses.field(default_factory=TokenBuffer)
    num_read: int = 0

    def expected(self, num_drafts: int) -> float:
        """How many of so many drafts will be accepted, half of them where nothing is known."""
        hope = num_drafts / 2 if self.hope is None else max(self.hope, LEAST_HOPE)
        return float(min(hope, num_drafts))

    def note(self, num_accepted: int, num_tokens: int) -> None:
        """Takes in how many drafts were accepted, the request having so many tokens now.

        One whose drafts are all rejected sleeps for 4 tokens, then 16, 64, ... up to MAX_SLEEP.
        """
        self.hope = float(num_accepted) if self.hope is None else (self.hope + num_accepted) / 2
        self.num_misses = 0 if num_accepted else self.num_misses + 1
        if self.num_misses:
            self.sleeps_until = num_tokens + min(4**self.num_misses, MAX_SLEEP)
            self.drafts = []  # what is watched begins anew

    def watched(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of the watched drafts came, and whether that is known of all that matter."""
        end = self.watched_from + len(self.drafts)
        came = token_ids[self.watched_from : end]
        hits = next((i for i, token in enumerate(came) if token != self.drafts[i]), len(came))
        return hits, hits < len(came) or len(came) == len(self.drafts)

    def wake(self, num_hits: int) -> None:
        """Has the request drafted for again: so many drafts would have been accepted."""
        self.hope, self.num_misses, self.sleeps_until = float(num_hits), 0, 0


class NewToken(NamedTuple):
    """A token that nobody has been given yet: as StreamedToken, with its log-probabilities."""

    token_id: int
    text: str
    logprobs: Logprobs | None


@dataclasses.dataclass(eq=False, kw_only=True)
class Generation:
    """A completion under way. The engine's: `token_ids` is the prompt and what is generated and read so far.

    `num_pending` counts the tokens that the device makes and the host has not read. `eos_ids` end it without
    being named as the reason, those of `sampling_params.stop_token_ids` are.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: SamplingParams
    eos_ids: frozenset[int]
    text: TextStream
    hashes: BlockHashes | None = None
    mask: TokenMask | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_pending: int = 0
    drafting: Drafting = dataclasses.field(default_factory=Drafting)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = dataclasses.field(default_factory=lambda: [None])
    unread: collections.deque[NewToken] = dataclasses.field(default_factory=collections.deque)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    queue_time: float | None = None  # seconds from there until a step first had it
    times: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.sampling_params
        self._has_text = self.text.has_tokenizer
        self._filter = StopFilter(params.stop or (), keeps_it=params.include_stop_str_in_output)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids or ())
        self.end_ids = tuple(self.stop_ids) if params.min_tokens else ()
        self.is_adjusted = params.is_adjusted or self.mask is not None
        self._ids = TokenBuffer() if params.has_penalties else None
        self._is_told = False  # that it has failed

    @property
    def num_generated(self) -> int:
        """New tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_last_token(self) -> bool:
        """Whether the next token cannot be asked for: what it may be depends on one that is on its way."""
        return self.num_pending > 0 and self.mask is not None and not self.mask.is_fixed

    @property
    def num_asked_for(self) -> int:
        """New tokens so far, and those that are on their way."""
        return len(self.token_ids) - self.num_prompt_tokens + self.num_pending

    def penalised_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the prompt, and those generated and read, where penalties want them; else none."""
        ids = np.zeros(0, np.int32) if self._ids is None else self._ids.caught_up(self.token_ids)
        return ids[: self.num_prompt_tokens], ids[self.num_prompt_tokens :]

    @property
    def has_news(self) -> bool:
        """Whether there is something that `output` has not told."""
        return bool(self.unread) or (self.error is not None and not self._is_told)

    def fail(self, error: Exception) -> None:
        """Ends it where it is."""
        self.finish_reason, self.error, self._is_told = "error", error, False

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Takes the next token, and finishes where it is the last one."""
        self.times.append(time.perf_counter() - self.started)
        self.token_ids.append(token_id)
        if self.hashes is not None and len(self.token_ids) % self.hashes.block_size == 0:
            self.hashes.extend(self.token_ids[self.hashes.num_tokens :])
        if logprobs is not None:
            self.logprobs.append(logprobs)
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        if self.mask is not None:
            self.mask.accept(token_id)
        may_stop = num_generated >= self.sampling_params.min_tokens
        if may_stop and token_id in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in (self.sampling_params.stop_token_ids or ()) else None
            shown = self.text.append(token_id) if self.sampling_params.include_stop_str_in_output else ""
            piece = self._ended(shown + self.text.flush())
        else:
            piece = self.text.append(token_id) if self._has_text else ""
            if piece:
                piece = self._passed(piece, may_stop=may_stop)
            is_whole = self.mask is not None and self.mask.is_done
            if self.finish_reason is None and (is_whole or num_generated == self.max_tokens):
                self.finish_reason = "stop" if is_whole else "length"
                piece += self._ended(self.text.flush())
        self.unread.append(NewToken(token_id, piece, logprobs))

    def _passed(self, piece: str, *, may_stop: bool) -> str:
        """What of a piece of text may be shown; finishes at a stop string."""
        shown, stop = self._filter.feed(piece, may_stop=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return shown

    def _ended(self, piece: str) -> str:
        """The last piece, and what was held back."""
        reason = self.finish_reason, self.stop_reason
        shown = self._passed(piece, may_stop=self.num_generated >= self.sampling_params.min_tokens)
        if reason[0] == "stop":
            self.finish_reason, self.stop_reason = reason
        return shown + self._filter.flush()

    def output(self, request_id: int | str, index: int) -> RequestOutput:
        """What nobody has been given yet, as completion number `index` of a request."""
        new, self.unread = self.unread, collections.deque()
        self._is_told = self.error is not None
        params, is_first = self.sampling_params, self.num_generated == len(new)
        return RequestOutput(
            request_id=request_id,
            index=index,
            new_token_ids=[token.token_id for token in new],
            new_text="".join([token.text for token in new]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None
            if params.logprobs is None
            else [token.logprobs for token in new if token.logprobs is not None],
            prompt_logprobs=None
            if params.prompt_logprobs is None or not is_first
            else list(self.prompt_logprobs),
            error=self.error,
        )

    def result(self, index: int = 0, prompt: str | None = None) -> GenerationResult:
        """What it became, once finished, as completion number `index` of a prompt."""
        assert self.finish_reason is not None
        return GenerationResult(
            token_ids=self.token_ids[self.num_prompt_tokens :],
            text=self._filter.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=GenerationMetrics(
                time_to_first_token=self.times[0], time_total=self.times[-1], num_tokens=self.num_generated
            ),
            logprobs=None if self.sampling_params.logprobs is None else self.logprobs,
            prompt_logprobs=None if self.sampling_params.prompt_logprobs is None else self.prompt_logprobs,
            prompt=prompt,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            index=index,
        )
