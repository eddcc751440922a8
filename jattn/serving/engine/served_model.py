"""The interface of a model that the engine can serve."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import CacheSpec, PagedCache
from jattn.models.kv_cache_groups import PerKVCacheGroup
from jattn.models.loading.pretrained import load
from jattn.nn import PagedAttention
from jattn.planning import Plan
from pallas_kernels.checks import require

type Caches = tuple[PagedCache, ...]


@runtime_checkable
class ModelSizes(Protocol):
    """The configuration values of a model that the engine and `jattn.calibrate` read.

    Attributes:
        vocab_size: Size of the vocabulary.
        max_position_embeddings: Maximum context length in tokens.
        eos_token_ids: Tokens that end a completion unless a request overrides them.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102  (the class has its words)
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def eos_token_ids(self) -> Sequence[int]: ...  # noqa: D102


@runtime_checkable
class ServedModel(Protocol):
    """A causal language model that `Engine` can serve, such as `jattn.models.Decoder`.

    It must be an `nnx.Module`: the engine compiles its methods over its state, and runs the values that its
    Variables hold when a step starts. Its PagedAttention layers use the engine's `implementation`.

    If only some layers have a sliding window and the model has `sliding_window_layers`, like Decoder, it
    receives metadata and num_blocks per layer group. Otherwise all layers keep the blocks that any of them
    still attends to.

    Attributes:
        tokenizer: Object with `encode(text).ids` and `decode(ids)`, as in `tokenizers`. None: token ids only.
    """

    tokenizer: Any

    @property
    def config(self) -> ModelSizes:
        """An object with `vocab_size`, `max_position_embeddings` and `eos_token_ids`."""

    def cache_specs(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int,
        dtype: DTypeLike | None,
        quantization: str | None,
        skip_layers: Sequence[int],
    ) -> tuple[CacheSpec, ...]:
        """Return the specs of KV caches with this many blocks, one per layer.

        dtype None: the model's dtype.
        """

    def create_caches(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int,
        dtype: DTypeLike | None,
        quantization: str | None,
        skip_layers: Sequence[int],
    ) -> Caches:
        """Create empty KV caches: any pytree of PagedCache. Block 0 of each is the null block."""

    def plan(self, metadata: BatchMetadata | PerKVCacheGroup, caches: Any) -> Plan | PerKVCacheGroup:
        """Return the plan that the layers share in a step.

        It is traced once per bucket; an argument of `__call__`.
        """

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        caches: Any,
        metadata: BatchMetadata | PerKVCacheGroup,
        *,
        plan: Plan | PerKVCacheGroup | None,
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """Return a step's hidden states, and the caches with its keys and values. Works inside jit."""

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab"]:
        """Return the next-token logits of hidden states. Works inside jit."""


MEMBERS = ("config", "tokenizer", "cache_specs", "create_caches", "plan", "logits")  # checked by name


def resolve_model(model: Any, mesh: Mesh | None = None) -> ServedModel:
    """Return the model, loaded onto the mesh (if given) if it is a folder.

    Raises:
        ValueError: If it is neither a folder nor a model with the members of ServedModel.
        FileNotFoundError: If the folder or one of its files does not exist.
    """
    if isinstance(model, str | os.PathLike):
        return load(os.fspath(model), mesh=mesh)
    missing = [name for name in MEMBERS if not hasattr(model, name)]
    rule = "be a jattn.models.Decoder or a Hugging Face folder"
    require(len(missing) < len(MEMBERS), "model", rule, repr(model))
    rule = f"have all members of jattn.serving.ServedModel (missing: {', '.join(missing)})"
    require(not missing, "model", rule, f"a {type(model).__name__}")
    require(isinstance(model, nnx.Module), "model", "be an nnx.Module", f"a {type(model).__name__}")
    return model


def attention_layers(model: Any) -> list[PagedAttention]:
    """Return the PagedAttention layers of a model."""
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
