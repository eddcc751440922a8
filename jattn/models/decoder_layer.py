"""One layer of a decoder."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PagedCache
from jattn.implementations.selection import requested_implementations
from jattn.models.collectives import sum_add_and_norm, summed
from jattn.models.config import DecoderConfig
from jattn.models.experts import Experts
from jattn.models.layers import (
    MLP,
    BareRMSNorm,
    LayerNorm,
    NormedRope,
    PlainMLP,
    RMSNorm,
    add_and_norm,
    make_norm,
    make_qk_norm,
    matmul_precision,
)
from jattn.models.rope import Rope
from jattn.models.specs import NORM_PLACEMENTS, ExpertsSpec, LayerSpec, MLPSpec
from jattn.nn import PagedAttention
from jattn.parallel import Axes
from jattn.planning import Plan

if TYPE_CHECKING:
    from pallas_kernels.collectives import PeerMemory


class DecoderLayer(nnx.Module):
    """Attention and MLP, one behind the other or side by side, with norms where the config has them.

    Attributes:
        axis_name: Inside shard_map, where attention and MLP are one device's parts: the axes that these lie
            along, and that what they give is summed over. None = they are whole.
        peers: Inside shard_map, this device's part of what sums of a few rows need; None = XLA sums.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        implementation: str | Sequence[str] | None,
    ) -> None:
        """Makes layer number `layer`."""
        spec = config.layers[layer]
        norm: Callable[[str], Any] = lambda name: (
            make_norm(config.norm, config.hidden_size, dtype=dtype)
            if name in NORM_PLACEMENTS[config.norm_placement]
            else None
        )
        self.input_layernorm = norm("input_layernorm")
        self.attention_layernorm, self.mlp_layernorm = norm("attention_layernorm"), norm("mlp_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.self_attn = _attention(config, spec, rngs=rngs, dtype=dtype, implementation=implementation)
        how: Any = {"rngs": rngs, "dtype": dtype, "implementation": implementation}
        self.mlp = _mlp(config.hidden_size, spec.mlp, **how)
        self.axis_name: Axes | None = None
        self.peers: PeerMemory | None = None
        self.may_take_kernel = "mosaic_gpu" in requested_implementations(implementation)
        self.adds_to_normed, self.residual_scale = config.adds_to_normed, config.residual_scale
        self.is_parallel = config.norm_placement.startswith("parallel")

    @jax.jit  # traced and lowered once for all layers of a kind, whatever weights they hold
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        delta: Float[Array, "tokens hidden"],
        cache: PagedCache | None,
        metadata: BatchMetadata,
        positions: Int32[Array, " tokens"],
        plan: Plan | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"], PagedCache | None]:
        """Runs the layer.

        Args:
            x: The residual stream but for delta: before the first layer zeros.
            delta: What the layer before gave, or the embeddings: added and normalised at once. Where it
                takes parts (`takes_parts`), this device's part of it, and so is what it gives.
            cache: The layer's.
            metadata: The step's.
            positions: For rope.
            plan: The step's.

        Returns:
            The stream and this layer's delta, and its cache with the step's keys and values in it.
        """
        should_use_kernel = self.may_take_kernel and cache is not None
        sums: Any = {"axis_name": self.axis_name, "peers": None if cache is None else self.peers}
        added = functools.partial(add_and_norm, may_take_kernel=should_use_kernel)
        given_added = functools.partial(sum_add_and_norm, **sums, may_take_kernel=should_use_kernel)
        given_added = given_added if self.takes_parts else added
        given = lambda part: part if self.takes_parts else self._scaled(summed(part, **sums))
        x, normed = given_added(x, delta, self.input_layernorm)
        attended, cache = self.self_attn(
            _normed(self.attention_layernorm, normed), cache, metadata, positions, plan
        )
        if self.is_parallel:
            return x, given(attended + self.mlp(_normed(self.mlp_layernorm, normed))), cache
        if self.post_feedforward_layernorm is not None:
            attended = self._scaled(_normed(self.post_attention_layernorm, summed(attended, **sums)))
            x, normed = added(x, attended, self.pre_feedforward_layernorm)
            out = summed(self.mlp(normed), **sums)
            return x, self._scaled(self.post_feedforward_layernorm(out)), cache
        x = normed if self.adds_to_normed else x
        x, normed = given_added(x, given(attended), self.post_attention_layernorm)
        return normed if self.adds_to_normed else x, given(self.mlp(normed)), cache

    @property
    def takes_parts(self) -> bool:
        """Whether delta is one device's part of a sum, which who adds it makes: nothing lies in between."""
        is_added = self.post_feedforward_layernorm is None and self.residual_scale is None
        return self.axis_name is not None and is_added

    def _scaled(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Times the scale itself: rounded to x.dtype it would be off the same way in all layers."""
        if self.residual_scale is None:
            return x
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return (wide * self.residual_scale).astype(x.dtype)


def _normed(
    norm: RMSNorm | BareRMSNorm | LayerNorm | None, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    return x if norm is None else norm(x)


def _attention(
    config: DecoderConfig,
    spec: LayerSpec,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike,
    implementation: str | Sequence[str] | None,
) -> PagedAttention:
    norm: Callable[[int], nnx.Module | None] = lambda heads: (
        None
        if spec.qk_norm is None or not spec.qk_norm.has_weight
        else make_qk_norm(spec.qk_norm, heads, config.head_dim, dtype=dtype)
    )
    return PagedAttention(
        config.hidden_size,
        spec.attention,
        rngs=rngs,
        rope=_rope(spec),
        q_norm=norm(spec.attention.num_q_heads),
        k_norm=norm(spec.attention.num_kv_heads),
        use_bias=spec.qkv_bias,
        use_out_bias=spec.out_bias,
        has_sinks=spec.has_sinks,
        alibi_slopes=spec.alibi_slopes,
        clip_qkv=spec.clip_qkv,
        query_scale=spec.temperature,
        fuses_qkv=True,
        param_dtype=dtype,
        precision=matmul_precision(dtype),
        implementation=implementation,
    )


def _rope(spec: LayerSpec) -> Rope | NormedRope | None:
    """What is done to queries and keys by their positions; None = nothing."""
    if spec.rope is None or spec.qk_norm is None or spec.qk_norm.has_weight:
        return spec.rope
    return NormedRope(spec.rope, spec.qk_norm.norm.eps)


def _mlp(
    hidden_size: int,
    spec: MLPSpec | ExpertsSpec,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike,
    implementation: str | Sequence[str] | None,
) -> MLP | PlainMLP | Experts:
    if isinstance(spec, MLPSpec):
        kind = PlainMLP if spec.kind == "plain" else MLP
        return kind(hidden_size, spec, dtype=dtype, rngs=rngs)
    how: Any = {"rngs": rngs, "dtype": dtype, "implementation": implementation}
    shared = None if spec.shared is None else _mlp(hidden_size, spec.shared, **how)
    return Experts(
        hidden_size,
        spec.intermediate_size,
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        routing=spec.routing,
        activation=spec.activation,
        use_bias=spec.has_bias,
        shared_expert=shared,
        gates_shared_expert=spec.gates_shared,
        **how,
    )
