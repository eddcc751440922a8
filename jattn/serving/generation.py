"""One prompt under way, and what it becomes."""

import collections
import dataclasses
import time
from typing import NamedTuple

from jattn.serving.sampler import SamplingParams
from jattn.serving.text import TextStream


class StreamedToken(NamedTuple):
    """One new token.

    Attributes:
        prompt_index: Which prompt of the call.
        token_id: The token.
        text: The text that it completes; empty where a character is still incomplete.
    """

    prompt_index: int
    token_id: int
    text: str


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
    """What a prompt became.

    Attributes:
        token_ids: The new tokens, the stop token included.
        text: Their text, without the stop token; empty if the model has no tokenizer.
        finish_reason: "stop": a stop token came; "length": max_tokens or the model's context is reached.
        metrics: Times.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    metrics: GenerationMetrics


@dataclasses.dataclass(eq=False, kw_only=True)
class Generation:
    """A prompt under way. The engine's: `token_ids` is the prompt and what is generated and read so far.

    `num_pending` counts the tokens that the device makes and the host has not read.
    """

    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling_params: SamplingParams
    stop_ids: frozenset[int]
    text: TextStream
    finish_reason: str | None = None
    num_pending: int = 0
    unread: collections.deque[StreamedToken] = dataclasses.field(default_factory=collections.deque)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """New tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_asked_for(self) -> int:
        """New tokens so far, and those that are on their way."""
        return self.num_generated + self.num_pending

    def append(self, token_id: int) -> None:
        """Takes the next token, and finishes where it is the last one."""
        self.times.append(time.perf_counter() - self.started)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason, piece = "stop", self.text.flush()
        else:
            piece = self.text.append(token_id)
            if self.num_generated == self.max_tokens:
                self.finish_reason = "length"
                piece += self.text.flush()
        self.unread.append(StreamedToken(self.index, token_id, piece))

    def result(self) -> GenerationResult:
        """What it became, once finished."""
        assert self.finish_reason is not None
        return GenerationResult(
            token_ids=self.token_ids[self.num_prompt_tokens :],
            text=self.text.text,
            finish_reason=self.finish_reason,
            metrics=GenerationMetrics(
                time_to_first_token=self.times[0], time_total=self.times[-1], num_tokens=self.num_generated
            ),
        )
