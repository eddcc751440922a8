"""One layer of a decoder."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jattn.cache import PagedCache
from jattn.implementations.choice import asked_for
from jattn.metadata.batch import BatchMetadata
from jattn.models.config import DecoderConfig
from jattn.models.experts import Experts
from jattn.models.layer_spec import ExpertsSpec, LayerSpec
from jattn.models.layers import MLP, NormedRope, PlainMLP, make_norm, matmul_precision
from jattn.models.residual import add_and_norm
from jattn.models.rope import Rope
from jattn.models.specs import MLPSpec
from jattn.models.sums import sum_add_and_norm, summed
from jattn.module import PagedAttention
from jattn.planning import Plan
from pallas_kernels.all_reduce import PeerMemory


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm or between two, beside the residual stream.

    Attributes:
        axis_name: Inside shard_map, where attention and MLP are one device's parts: the axis that these lie
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
        norm = lambda: make_norm(config.norm, config.hidden_size, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = _attention(config, spec, rngs=rngs, dtype=dtype, implementation=implementation)
        how: Any = {"rngs": rngs, "dtype": dtype, "implementation": implementation}
        self.mlp = _mlp(config.hidden_size, spec.mlp, **how)
        self.axis_name: str | None = None
        self.peers: PeerMemory | None = None
        self.may_take_kernel = "mosaic_gpu" in asked_for(implementation)
        self.adds_to_normed = config.adds_to_normed
        self.has_norms_around = config.norm_placement == "around"
        if self.has_norms_around:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

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
        takes_kernel = self.may_take_kernel and cache is not None
        peers = self.peers if takes_kernel else None
        added = functools.partial(add_and_norm, may_take_kernel=takes_kernel)
        part_added = functools.partial(
            sum_add_and_norm, axis_name=self.axis_name, peers=peers, may_take_kernel=takes_kernel
        )
        x, normed = (part_added if self.takes_parts else added)(x, delta, self.input_layernorm)
        attended, cache = self.self_attn(normed, cache, metadata, positions, plan)
        if self.has_norms_around:
            attended = self.post_attention_layernorm(summed(attended, self.axis_name, peers))
            x, normed = added(x, attended, self.pre_feedforward_layernorm)
            delta = self.post_feedforward_layernorm(summed(self.mlp(normed), self.axis_name, peers))
            return x, delta, cache
        x = normed if self.adds_to_normed else x
        x, normed = part_added(x, attended, self.post_attention_layernorm)
        return normed if self.adds_to_normed else x, self.mlp(normed), cache

    @property
    def takes_parts(self) -> bool:
        """Whether delta is one device's part of a sum, which who adds it makes: nothing lies in between."""
        return self.axis_name is not None and not self.has_norms_around


def _attention(
    config: DecoderConfig,
    spec: LayerSpec,
    *,
    rngs: nnx.Rngs,
    dtype: DTypeLike,
    implementation: str | Sequence[str] | None,
) -> PagedAttention:
    norm: Callable[[], nnx.Module | None] = lambda: (
        None
        if spec.qk_norm is None or spec.qk_norm.comes_after_rope
        else make_norm(spec.qk_norm.norm, config.head_dim, dtype=dtype)
    )
    return PagedAttention(
        config.hidden_size,
        spec.attention,
        rngs=rngs,
        rope=_rope(spec),
        q_norm=norm(),
        k_norm=norm(),
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
    if spec.rope is None or spec.qk_norm is None or not spec.qk_norm.comes_after_rope:
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
