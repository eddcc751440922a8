"""The state of one completion while it is generated."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jattn.serving.engine.block_manager import BlockHashes
from jattn.serving.engine.detokenizer import IncrementalDetokenizer, StopFilter
from jattn.serving.engine.outputs import GenerationMetrics, GenerationResult, Logprobs, RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.structured_outputs import TokenMask

# Maximum pause of drafting, in tokens. An unsuccessful attempt (wait for the last step, draft, restart
# without drafts) took 14 ms or three steps of an 8B model on an H200 (rows `drafts`): 5 attempts in 512
# tokens cost 3 %, and the 12 attempts of MAX_PAUSE = 64 cost 7 %.
MAX_PAUSE = 256
MIN_EXPECTED = 1.0  # expected number of accepted drafts when drafting resumes


class TokenBuffer:
    """A request's token ids as a growing int32 array, which is faster to process than a list."""

    def __init__(self) -> None:
        """Start empty."""
        self._ids, self._count = np.zeros(256, np.int32), 0

    def sync(self, token_ids: Sequence[int]) -> Int[np.ndarray, " tokens"]:
        """Return all of `token_ids` as an array. They must start with the tokens of the previous call."""
        count = len(token_ids)
        if count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(max(count, len(self._ids)), np.int32)])
        self._ids[self._count : count] = token_ids[self._count :]
        self._count = count
        return self._ids[:count]


@dataclasses.dataclass(eq=False)
class DraftState:
    """A sequence's state for speculative decoding, which decides whether drafting pays off.

    Attributes:
        num_drafted: Number of usable draft tokens in the next step, without padding.
        drafts: Draft tokens, if the host knows them. While drafting is paused: tokens that would have been
            drafted.
        recent_accepted: Moving average of the number of accepted drafts; None before the first drafts.
        num_rejections: Number of consecutive times that all drafts were rejected.
        paused_until: Number of tokens before which the sequence is not drafted for.
        paused_drafts_start: Number of known tokens when `drafts` were proposed while drafting was paused.
        tokens: The sequence's tokens as an array, for lookups.
        num_read: Number of tokens in the draft model's KV cache.
    """

    num_drafted: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    recent_accepted: float | None = None
    num_rejections: int = 0
    paused_until: int = 0
    paused_drafts_start: int = 0
    tokens: TokenBuffer = dataclasses.field(default_factory=TokenBuffer)
    num_read: int = 0

    def expected_accepted(self, num_drafts: int) -> float:
        """Return the expected number of accepted drafts; half of `num_drafts` before the first result."""
        recent_accepted = (
            num_drafts / 2 if self.recent_accepted is None else max(self.recent_accepted, MIN_EXPECTED)
        )
        return float(min(recent_accepted, num_drafts))

    def record(self, num_accepted: int, num_tokens: int) -> None:
        """Record how many drafts were accepted when the sequence had `num_tokens` tokens.

        After drafts that are all rejected, drafting pauses for 4 tokens, then 16, 64, ... up to MAX_PAUSE.
        """
        self.recent_accepted = (
            float(num_accepted) if self.recent_accepted is None else (self.recent_accepted + num_accepted) / 2
        )
        self.num_rejections = 0 if num_accepted else self.num_rejections + 1
        if self.num_rejections:
            self.paused_until = num_tokens + min(4**self.num_rejections, MAX_PAUSE)
            self.drafts = []  # Start a new comparison.

    def count_matching_drafts(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Compare the drafts made while drafting is paused with the tokens generated since.

        Returns:
            Number of right drafts before the first wrong one, and whether later tokens cannot change it.
        """
        end = self.paused_drafts_start + len(self.drafts)
        generated_ids = token_ids[self.paused_drafts_start : end]
        num_matching = next(
            (i for i, token in enumerate(generated_ids) if token != self.drafts[i]), len(generated_ids)
        )
        return num_matching, num_matching < len(generated_ids) or len(generated_ids) == len(self.drafts)

    def resume(self, num_matching: int) -> None:
        """Resume drafting, because `num_matching` drafts made during the pause were right."""
        self.recent_accepted, self.num_rejections, self.paused_until = float(num_matching), 0, 0


@dataclasses.dataclass(eq=False, kw_only=True)
class SequenceState:
    """A completion that the engine generates.

    Attributes:
        token_ids: Prompt tokens and generated tokens that the host has read.
        num_prompt_tokens: Number of prompt tokens.
        max_tokens: Maximum number of new tokens.
        sampling_params: Sampling parameters of this completion.
        eos_ids: The model's EOS tokens, which end the completion without a stop_reason.
        text: Detokenizer of the new tokens.
        hashes: Hashes of the full blocks; None without prefix caching.
        mask: Allowed next tokens; None if all are allowed.
        finish_reason: Reason why the completion ended; None while it is unfinished.
        stop_reason: Stop string or token id that ended the completion.
        error: Error that ended the completion.
        num_pending: Number of tokens that the device generates and the host has not read.
        row: Row of the latest step that generated a token, among its sampled tokens.
        draft_state: State of speculative decoding.
        logprobs: Log-probabilities of the new tokens, if requested.
        prompt_logprobs: Log-probabilities of the prompt tokens, if requested.
        texts: Text of each new token.
        num_returned: Number of new tokens that have been returned to the caller.
        arrival_time: Arrival time (`time.perf_counter`).
        queue_time: Seconds from arrival to the first step; None before it.
        num_cached_tokens: Number of prompt tokens that were in the cache before the first step.
        times: Seconds from arrival to each new token.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: SamplingParams
    eos_ids: frozenset[int]
    text: IncrementalDetokenizer
    hashes: BlockHashes | None = None
    mask: TokenMask | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_pending: int = 0
    row: int = -1
    draft_state: DraftState = dataclasses.field(default_factory=DraftState)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = dataclasses.field(default_factory=lambda: [None])
    texts: list[str] = dataclasses.field(default_factory=list)
    num_returned: int = 0
    arrival_time: float = dataclasses.field(default_factory=time.perf_counter)
    queue_time: float | None = None
    num_cached_tokens: int = 0
    times: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.sampling_params
        self._has_text = self.text.has_tokenizer
        self._filter = StopFilter(params.stop or (), include_stop=params.include_stop_str_in_output)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids or ())
        self.end_ids = tuple(self.stop_ids) if params.min_tokens else ()
        self.needs_logits_adjustment = params.needs_logits_adjustment or self.mask is not None
        self._ids = TokenBuffer() if params.has_penalties else None
        self._is_error_reported = False  # whether `output` has returned the error

    @property
    def num_generated(self) -> int:
        """Number of generated tokens that the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_last_token(self) -> bool:
        """True if the next step must wait for a token in flight, because the mask depends on it."""
        return self.num_pending > 0 and self.mask is not None and not self.mask.is_fixed

    @property
    def num_sampled(self) -> int:
        """Number of generated tokens, including those that the host has not read."""
        return len(self.token_ids) - self.num_prompt_tokens + self.num_pending

    def penalized_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt tokens and the read generated tokens; empty arrays without penalties."""
        ids = np.zeros(0, np.int32) if self._ids is None else self._ids.sync(self.token_ids)
        return ids[: self.num_prompt_tokens], ids[self.num_prompt_tokens :]

    @property
    def has_output(self) -> bool:
        """True if there are tokens or an error that `output` has not returned."""
        return self.num_returned < len(self.texts) or (self.error is not None and not self._is_error_reported)

    def fail(self, error: Exception) -> None:
        """End the completion with an error."""
        self.finish_reason, self.error, self._is_error_reported = "error", error, False

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Append a new token, and finish the completion if it is the last one."""
        self.times.append(time.perf_counter() - self.arrival_time)
        self.token_ids.append(token_id)
        if self.hashes is not None and len(self.token_ids) % self.hashes.block_size == 0:
            self.hashes.extend(self.token_ids[self.hashes.num_tokens :])
        if logprobs is not None:
            self.logprobs.append(logprobs)
        num_generated = self.num_generated
        if self.mask is not None:
            self.mask.accept(token_id)
        may_stop = num_generated >= self.sampling_params.min_tokens
        if may_stop and token_id in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in (self.sampling_params.stop_token_ids or ()) else None
            visible_text = (
                self.text.append(token_id) if self.sampling_params.include_stop_str_in_output else ""
            )
            piece = self._finish_text(visible_text + self.text.flush())
        else:
            piece = self.text.append(token_id) if self._has_text else ""
            if piece:
                piece = self._filter_stop(piece, may_stop=may_stop)
            is_complete = self.mask is not None and self.mask.is_done
            if self.finish_reason is None and (is_complete or num_generated == self.max_tokens):
                self.finish_reason = "stop" if is_complete else "length"
                piece += self._finish_text(self.text.flush())
        self.texts.append(piece)

    def _filter_stop(self, piece: str, *, may_stop: bool) -> str:
        """Return the part of a text piece that can be shown, and finish the completion at a stop string."""
        visible_text, stop = self._filter.feed(piece, may_stop=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return visible_text

    def _finish_text(self, piece: str) -> str:
        """Return the last text piece together with all held-back text."""
        reason = self.finish_reason, self.stop_reason
        visible_text = self._filter_stop(
            piece, may_stop=self.num_generated >= self.sampling_params.min_tokens
        )
        if reason[0] == "stop":
            self.finish_reason, self.stop_reason = reason
        return visible_text + self._filter.flush()

    def next_token(self) -> tuple[int, str] | None:
        """Return the next token that has not been returned, with its text; None if there is none."""
        index = self.num_returned
        if index == len(self.texts):
            return None
        self.num_returned += 1
        return self.token_ids[self.num_prompt_tokens + index], self.texts[index]

    def output(self, request_id: int | str, index: int) -> RequestOutput:
        """Return the new tokens since the last call."""
        first, end = self.num_returned, len(self.texts)
        self.num_returned, self._is_error_reported = end, self.error is not None
        params, num_prompt_tokens = self.sampling_params, self.num_prompt_tokens
        return RequestOutput(
            request_id=request_id,
            index=index,
            new_token_ids=self.token_ids[num_prompt_tokens + first : num_prompt_tokens + end],
            new_text="".join(self.texts[first:]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if params.logprobs is None else self.logprobs[first:end],
            prompt_logprobs=None if params.prompt_logprobs is None or first else list(self.prompt_logprobs),
            num_cached_tokens=0 if first else self.num_cached_tokens,
            error=self.error,
        )

    def result(self, index: int = 0, prompt: str | None = None) -> GenerationResult:
        """Return the result of a finished completion, or raise RequestError if it failed."""
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
