"""The interface between a server and an engine in the same or in another process."""

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
    """Properties of an engine that do not change while it serves.

    Attributes:
        tokenizer: The model's tokenizer; None if it has none.
        default_sampling_params: Sampling parameters of the checkpoint's generation_config.json.
        vocab_size: Number of token ids that the model supports.
        max_model_len: Maximum length of a request in tokens, including generated tokens.
        capacity_tokens: Maximum number of tokens of a request that fit the KV cache.
        max_num_seqs: Maximum number of completions per step.
        block_size: Number of tokens per cache block.
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
        """Maximum length in tokens of a request, limited by the model and by the KV cache."""
        return min(self.max_model_len, self.capacity_tokens)

    @staticmethod
    def from_engine(engine: "Engine") -> "EngineInfo":
        """Return the properties of an engine."""
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
    """The engine methods that a server uses, implemented by `AsyncEngine` and by `RemoteEngine`.

    Source: vLLM `EngineClient`.
    """

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes, defaults and tokenizer."""

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Generate completions of a prompt; see `AsyncEngine.generate`."""

    async def precompile(self, *, progress: bool) -> None:
        """Compile the executables that a first step may need.

        The remaining ones compile in the background.
        """

    async def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes."""

    async def read_stats(self) -> EngineStats:
        """Return the engine's current statistics."""

    async def aclose(self) -> None:
        """Close the engine, and end its unfinished requests."""
