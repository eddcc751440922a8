"""Results of the engine: new tokens of each step, and finished completions."""

import dataclasses
from typing import NamedTuple

from jattn.serving.engine.logprobs import Logprob

type Logprobs = dict[int, Logprob]  # at one position: the chosen token, then the most likely


class RequestError(RuntimeError):
    """Raised if a request could not be finished for a reason outside the request; see `__cause__`."""


def describe_error(error: Exception) -> str:
    """Return the message of an error that a request's caller did not cause."""
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"


class StreamedToken(NamedTuple):
    """A newly generated token.

    Attributes:
        prompt_index: Index of the prompt in the call.
        token_id: The token's id.
        text: Text that this token completes. Empty while a character, or a possible stop string, is
            incomplete.
    """

    prompt_index: int
    token_id: int
    text: str


@dataclasses.dataclass(kw_only=True, slots=True)  # A frozen class takes four times as long to create.
class RequestOutput:
    """New tokens of one completion, as returned by `Engine.step`.

    Attributes:
        request_id: Identifier returned by `Engine.add_request`.
        index: Index of the completion among the request's n completions.
        new_token_ids: New token ids, including the stop token.
        new_text: Text of the new tokens; see StreamedToken.text.
        finish_reason: Reason why the completion ended, as in GenerationResult. None while it is unfinished.
        stop_reason: Stop string or token id that ended the completion, as in GenerationResult.
        logprobs: Log-probabilities of each new token, if requested.
        prompt_logprobs: Log-probabilities of each prompt token, if requested; sent with the first new token.
            The first entry is None.
        num_cached_tokens: Number of prompt tokens found in the prefix cache; sent with the first new token.
        error: The error, if finish_reason is "error".
    """

    request_id: int | str
    index: int
    new_token_ids: list[int]
    new_text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None

    def extend(self, later: "RequestOutput") -> None:
        """Append a later output of the same completion."""
        self.new_token_ids += later.new_token_ids
        self.new_text += later.new_text
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        if self.logprobs is not None:
            self.logprobs += later.logprobs or ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """Timing of a completion, in seconds since the request arrived.

    Attributes:
        time_to_first_token: Time until the first new token.
        time_total: Time until the last new token.
        num_tokens: Number of new tokens.
    """

    time_to_first_token: float
    time_total: float
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, including the time to the first token."""
        return self.num_tokens / self.time_total


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The result of a prompt. With n > 1 it is the first completion, and `outputs` holds all of them.

    Attributes:
        token_ids: New token ids, including the stop token.
        text: Text of the new tokens, without the stop token or stop string unless requested. Empty if the
            model has no tokenizer.
        finish_reason: "stop" for a stop token or string, "length" if max_tokens or the maximum context length
            is reached, "abort" after `AsyncEngine.abort`, or "error" (see RequestError).
        stop_reason: The stop string, or the token of stop_token_ids, that ended the completion; None
            otherwise.
        metrics: Timing of the completion.
        logprobs: Log-probabilities of each new token, if requested.
        prompt_logprobs: Log-probabilities of each prompt token, if requested. The first entry is None.
        outputs: All n completions in order; their own `outputs` are empty.
        prompt: Text of the prompt; None if token ids were given.
        prompt_token_ids: Token ids of the prompt.
        index: Index among the n completions.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: GenerationMetrics
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    outputs: tuple["GenerationResult", ...] = ()
    prompt: str | None = None
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    index: int = 0
