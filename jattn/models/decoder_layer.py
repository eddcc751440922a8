"""A decoder layer: attention, MLP or experts, norms and residual connections."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PagedCache
from jattn.implementations.selection import requested_implementations
from jattn.models.collectives import all_reduce_add_and_norm, all_reduce_sum
from jattn.models.config import DecoderConfig
from jattn.models.experts import Experts
from jattn.models.layers import (
    MLP,
    LayerNorm,
    NormedRope,
    PlainMLP,
    RMSNorm,
    RMSNormNoWeight,
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
    """A decoder layer: attention and MLP, in sequence or in parallel, with norms where the config has them.

    Attributes:
        axis_name: Inside shard_map: mesh axes that attention and MLP are sharded over and their outputs are
            summed over. None = this device has the full layer.
        peers: Inside shard_map: this device's peer memory for all-reduces of few rows; None = XLA sums.
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
        """Initialize layer number `layer`."""
        spec = config.layers[layer]

        def norm(name: str) -> Any:
            if name not in NORM_PLACEMENTS[config.norm_placement]:
                return None
            return make_norm(config.norm, config.hidden_size, dtype=dtype)

        self.input_layernorm = norm("input_layernorm")
        self.attention_layernorm, self.mlp_layernorm = norm("attention_layernorm"), norm("mlp_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.self_attn = _attention(config, spec, rngs=rngs, dtype=dtype, implementation=implementation)
        self.mlp = _mlp(config.hidden_size, spec.mlp, rngs=rngs, dtype=dtype, implementation=implementation)
        self.axis_name: Axes | None = None
        self.peers: PeerMemory | None = None
        self.allow_kernel = "mosaic_gpu" in requested_implementations(implementation)
        self.residual_after_norm, self.residual_scale = config.residual_after_norm, config.residual_scale
        self.is_parallel = config.norm_placement.startswith("parallel")

    @jax.jit  # traced and lowered once for all layers with the same specification
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        sublayer_out: Float[Array, "tokens hidden"],
        cache: PagedCache | None,
        metadata: BatchMetadata,
        positions: Int32[Array, " tokens"],
        plan: Plan | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"], PagedCache | None]:
        """Run the layer.

        Args:
            x: The residual stream before sublayer_out is added; zeros before the first layer.
            sublayer_out: Output of the previous layer's last sublayer (MLP or attention), or the embeddings.
                This layer adds it to x and normalizes the sum, in one kernel where supported. If
                `sublayer_out_is_partial`, it is this device's summand.
            cache: KV cache of the layer.
            metadata: Metadata of the step.
            positions: Position of each token, for the rotary embedding.
            plan: Plan of the step.

        Returns:
            The residual stream, the output of the layer's last sublayer, and the cache with the step's keys
            and values written.
        """
        axis_name, peers = self.axis_name, None if cache is None else self.peers
        add_norm = functools.partial(add_and_norm, allow_kernel=self.allow_kernel and cache is not None)
        add_sublayer_norm = add_norm
        if self.sublayer_out_is_partial:
            add_sublayer_norm = functools.partial(
                all_reduce_add_and_norm,
                axis_name=axis_name,
                peers=peers,
                allow_kernel=self.allow_kernel and cache is not None,
            )

        def finish_sublayer(partial: Array) -> Array:
            """Return the sublayer output to add, given this device's summand of it."""
            if self.sublayer_out_is_partial:
                return partial
            return self._scale_residual(all_reduce_sum(partial, axis_name, peers))

        x, normed = add_sublayer_norm(x, sublayer_out, self.input_layernorm)
        attended, cache = self.self_attn(
            _apply_norm(self.attention_layernorm, normed), cache, metadata, positions, plan
        )
        if self.is_parallel:
            return x, finish_sublayer(attended + self.mlp(_apply_norm(self.mlp_layernorm, normed))), cache
        if self.post_feedforward_layernorm is not None:
            attended = all_reduce_sum(attended, axis_name, peers)
            attended = self._scale_residual(_apply_norm(self.post_attention_layernorm, attended))
            x, normed = add_norm(x, attended, self.pre_feedforward_layernorm)
            out = all_reduce_sum(self.mlp(normed), axis_name, peers)
            return x, self._scale_residual(self.post_feedforward_layernorm(out)), cache
        x = normed if self.residual_after_norm else x
        x, normed = add_sublayer_norm(x, finish_sublayer(attended), self.post_attention_layernorm)
        return normed if self.residual_after_norm else x, finish_sublayer(self.mlp(normed)), cache

    @property
    def sublayer_out_is_partial(self) -> bool:
        """Whether a sublayer output is this device's summand, which the next layer all-reduces and adds."""
        is_added_directly = self.post_feedforward_layernorm is None and self.residual_scale is None
        return self.axis_name is not None and is_added_directly

    def _scale_residual(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Multiply by the residual scale in f32, because a rounded scale would bias all layers alike."""
        if self.residual_scale is None:
            return x
        x_f32 = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return (x_f32 * self.residual_scale).astype(x.dtype)


def _apply_norm(
    norm: RMSNorm | RMSNormNoWeight | LayerNorm | None, x: Float[Array, "tokens hidden"]
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
    def norm(num_heads: int) -> nnx.Module | None:
        if spec.qk_norm is None or not spec.qk_norm.has_weight:
            return None
        return make_qk_norm(spec.qk_norm, num_heads, config.head_dim, dtype=dtype)

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
    """Return the rotary embedding of queries and keys, with the norm that follows it if it has no weights."""
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
        module = PlainMLP if spec.kind == "plain" else MLP
        return module(hidden_size, spec, dtype=dtype, rngs=rngs)
    shared = None
    if spec.shared is not None:
        shared = _mlp(hidden_size, spec.shared, rngs=rngs, dtype=dtype, implementation=implementation)
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
        rngs=rngs,
        dtype=dtype,
        implementation=implementation,
    )
