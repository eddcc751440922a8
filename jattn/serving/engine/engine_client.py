"""What a server wants of an engine, in its own process or in another."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats

if TYPE_CHECKING:
    from jattn.serving.engine.engine import Engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine serves.

    Attributes:
        tokenizer: The model's; None = it has none.
        default_sampling_params: The checkpoint's.
        vocab_size: Ids that the model knows.
        max_model_len: Tokens of the longest request, its new ones among them.
        capacity_tokens: Tokens of a request that the cache holds.
        max_num_seqs: Completions that a step holds.
        block_size: Tokens of a cache block.
    """

    tokenizer: Any | None
    default_sampling_params: SamplingParams
    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    max_num_seqs: int
    block_size: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request that is served, whether the model or the cache sets an end to it."""
        return min(self.max_model_len, self.capacity_tokens)

    @staticmethod
    def of(engine: "Engine") -> "EngineInfo":
        """An engine's."""
        return EngineInfo(
            tokenizer=engine.tokenizer,
            default_sampling_params=engine.default_sampling_params,
            vocab_size=engine.model.config.vocab_size,
            max_model_len=engine.max_model_len,
            capacity_tokens=engine.scheduler.capacity_tokens,
            max_num_seqs=engine.scheduler.max_num_seqs,
            block_size=engine.block_size,
        )


@runtime_checkable
class EngineClient(Protocol):
    """`AsyncEngine` is one, and `RemoteEngine`, whose engine is in another process.

    Source: vLLM `EngineClient`.
    """

    @property
    def info(self) -> EngineInfo:
        """Sizes, names and the tokenizer."""

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """As `AsyncEngine.generate`."""

    async def precompile(self, *, progress: bool) -> None:
        """Compiles what a first step may need; the rest goes on behind."""

    async def reset_prefix_cache(self) -> None:
        """Has later requests find nothing of earlier ones."""

    async def read_stats(self) -> EngineStats:
        """Counts as they are now."""

    async def aclose(self) -> None:
        """Ends what is open."""
