"""What the engine hands out: each step's new tokens, and what a prompt became."""

import dataclasses
from typing import NamedTuple

from jattn.serving.engine.logprobs import Logprob

type Logprobs = dict[int, Logprob]  # of one place: the token that stands there, and the likeliest ones


class RequestError(RuntimeError):
    """A request could not be finished, through no fault of its caller; `__cause__` is what went wrong."""


def in_words(error: Exception) -> str:
    """What a request's caller is told of an error that is not theirs."""
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"


class StreamedToken(NamedTuple):
    """One new token.

    Attributes:
        prompt_index: Which prompt of the call.
        token_id: The token.
        text: The text that it completes; empty where a character, or what may become a stop string, is
            still incomplete.
    """

    prompt_index: int
    token_id: int
    text: str


@dataclasses.dataclass(kw_only=True, slots=True)  # frozen, it would take four times as long to make
class RequestOutput:
    """What a step brought a request: `Engine.step` returns one for each completion that has something new.

    Attributes:
        request_id: As `Engine.add_request` returned it.
        index: Which of the request's n completions.
        new_token_ids: New tokens, the stop token included.
        new_text: Their text; see StreamedToken.text.
        finish_reason: As GenerationResult has it; None = more is to come.
        stop_reason: As GenerationResult has it.
        logprobs: Of each new token, where asked for.
        prompt_logprobs: Of each token of the prompt, where asked for, with the first new token; None for the
            first of them.
        error: What went wrong, where finish_reason is "error".
    """

    request_id: int | str
    index: int
    new_token_ids: list[int]
    new_text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    error: Exception | None = None

    def extend(self, later: "RequestOutput") -> None:
        """Takes what a later step brought the same completion, as if one had brought both."""
        self.new_token_ids += later.new_token_ids
        self.new_text += later.new_text
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        if self.logprobs is not None:
            self.logprobs += later.logprobs or ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """How long a prompt took, in seconds from the call.

    Attributes:
        time_to_first_token: Until the first new token.
        time_total: Until the last one.
        num_tokens: New tokens.
    """

    time_to_first_token: float
    time_total: float
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, the wait for the first one included."""
        return self.num_tokens / self.time_total


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What a prompt became; of n completions the first, `outputs` has all.

    Attributes:
        token_ids: The new tokens, the stop token included.
        text: Their text, without the stop token or string unless it was to be kept; empty if the model has no
            tokenizer.
        finish_reason: "stop": a stop token or string came; "length": max_tokens or the model's context is
            reached; "abort": `AsyncEngine.abort`; "error": see RequestError.
        stop_reason: The stop string, or the token of stop_token_ids, that ended it; None = none of these.
        metrics: Times.
        logprobs: Of each new token, where asked for.
        prompt_logprobs: Of each token of the prompt, where asked for; None for the first.
        outputs: One a completion, in their order, without outputs of their own.
        prompt: Its text; None = tokens were given.
        prompt_token_ids: Its tokens.
        index: Which of the n completions.
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
