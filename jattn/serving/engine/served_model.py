"""What the engine wants of a model."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import CacheSpec, PagedCache
from jattn.models.kv_cache_groups import ByReach
from jattn.models.loading.pretrained import load
from jattn.planning import Plan
from pallas_kernels.checks import require

type Caches = tuple[PagedCache, ...]


@runtime_checkable
class ModelSizes(Protocol):
    """What the engine reads of a model's configuration.

    Attributes:
        vocab_size: Token ids are below it.
        max_position_embeddings: The longest context, in tokens.
        eos_token_ids: Tokens that end a text unless a request says otherwise.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102  (the class has its words)
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def eos_token_ids(self) -> Sequence[int]: ...  # noqa: D102


@runtime_checkable
class ServedModel(Protocol):
    """A causal language model that `Engine` can serve; `jattn.models.Decoder` is one.

    It must be an `nnx.Module`: the engine compiles its methods over its state, and runs the state that the
    module's Variables hold when a step begins. Its PagedAttention layers take the engine's `implementation`.

    One that has `near_layers`, as a Decoder, is given ByReach metadata and a num_blocks for each layer where
    only some of its layers have a window. Of others no layer gives up what another still sees.

    Attributes:
        tokenizer: `encode(text).ids` and `decode(ids)`, as of `tokenizers`; None = token ids in and out.
    """

    tokenizer: Any

    @property
    def config(self) -> ModelSizes:
        """Its sizes."""

    def cache_specs(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int,
        dtype: DTypeLike | None,
        quantization: str | None,
        skip_layers: Sequence[int],
    ) -> tuple[CacheSpec, ...]:
        """What caches of so many blocks would be, one a layer; dtype None = the model's own."""

    def create_caches(
        self,
        num_blocks: int | Sequence[int],
        *,
        block_size: int,
        dtype: DTypeLike | None,
        quantization: str | None,
        skip_layers: Sequence[int],
    ) -> Caches:
        """Those caches, empty: any pytree of PagedCache. Block 0 of each is the null block."""

    def plan(self, metadata: BatchMetadata | ByReach, caches: Any) -> Plan | ByReach:
        """What the layers share in a step. Traced, once a bucket; given back to `__call__`."""

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        caches: Any,
        metadata: BatchMetadata | ByReach,
        *,
        plan: Plan | ByReach | None,
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """A step's hidden states, and the caches with its keys and values in them. Traced."""

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab"]:
        """Next-token scores of some hidden states. Traced."""


MEMBERS = ("config", "tokenizer", "cache_specs", "create_caches", "plan", "logits")  # told by their names


def as_served(model: Any, mesh: Mesh | None = None) -> ServedModel:
    """The model, loaded where it is a folder, onto a mesh if one is given.

    Raises:
        ValueError: It is neither a folder nor a model that has what ServedModel names.
        FileNotFoundError: There is no such folder, or a file of it is missing.
    """
    if isinstance(model, str | os.PathLike):
        return load(os.fspath(model), mesh=mesh)
    missing = [name for name in MEMBERS if not hasattr(model, name)]
    rule = "be a jattn.models.Decoder or a Hugging Face folder"
    require(len(missing) < len(MEMBERS), "model", rule, repr(model))
    rule = f"have what jattn.serving.ServedModel names: it lacks {', '.join(missing)}"
    require(not missing, "model", rule, f"a {type(model).__name__}")
    require(isinstance(model, nnx.Module), "model", "be an nnx.Module", f"a {type(model).__name__}")
    return model
