"""Flax modules over `attend`: a paged layer for models, and an attention_fn for nnx.MultiHeadAttention."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from jattn.attending import attend
from jattn.cache import PackedKV, PagedCache, write_kv
from jattn.implementations import reference
from jattn.metadata.batch import BatchMetadata
from jattn.planning import Plan
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_shape, unsupported

Rope = Callable[[Array, Array], Array]


class PagedAttention(nnx.Module):
    """Self-attention of one layer over its paged cache: project, rotate, write, attend, project."""

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        rngs: nnx.Rngs,
        rope: Rope | None = None,
        q_norm: Callable[[Array], Array] | None = None,
        k_norm: Callable[[Array], Array] | None = None,
        use_bias: bool = False,
        use_out_bias: bool = False,
        has_sinks: bool = False,
        alibi_slopes: Sequence[float] | None = None,
        shares_kv: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: str | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        """Makes the layer's parameters.

        Args:
            hidden_size: Width of the layer's input and output.
            spec: The layer's attention: heads, window, soft cap, ...
            rngs: For the initial parameters.
            rope: `(x [tokens, heads, head_dim], positions [tokens]) -> x`, applied to queries and keys.
            q_norm: Applied to queries [tokens, q_heads, head_dim] before rope.
            k_norm: Applied to keys before rope.
            use_bias: Query, key and value projections have a bias.
            use_out_bias: The output projection has one.
            has_sinks: A learned sink per query head (parameter `sinks`, f32).
            alibi_slopes: Slope per query head.
            shares_kv: The layer reads the keys and values that another layer wrote (give it that layer's
                cache); it has no key and value projections and writes nothing.
            dtype: Of the computation; None = as parameters and input promote.
            param_dtype: Of the parameters.
            precision: Of the projections' products; None = jax's default, which on a GPU rounds f32 to TF32.
            implementation: As in `attend`.

        Raises:
            ValueError: alibi_slopes is not one per query head.
        """
        if alibi_slopes is not None:
            require_shape("alibi_slopes", (len(alibi_slopes),), (spec.num_q_heads,), "q_heads")
        self.spec = spec
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.alibi_slopes = None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes)
        self.shares_kv = shares_kv
        self.implementation = (
            implementation
            if implementation is None or isinstance(implementation, str)
            else tuple(implementation)
        )
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        linear = lambda inputs, outputs, bias: nnx.Linear(
            inputs,
            outputs,
            use_bias=bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        self.q_proj = linear(hidden_size, q_width, use_bias)
        if not shares_kv:
            self.k_proj = linear(hidden_size, kv_width, use_bias)
            self.v_proj = linear(hidden_size, kv_width, use_bias)
        self.o_proj = linear(q_width, hidden_size, use_out_bias)
        self.sinks = nnx.Param(jnp.zeros(spec.num_q_heads, jnp.float32)) if has_sinks else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        cache: PagedCache | None,
        metadata: BatchMetadata,
        positions: Int32[Array, " tokens"],
        plan: Plan | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], PagedCache | None]:
        """Attends a step's tokens.

        Args:
            x: The step's tokens, laid out as the metadata says.
            cache: The layer's cache; None = every row's keys are this step's own (training, encoders).
            metadata: The step's metadata.
            positions: For rope; `metadata.positions` unless the model counts otherwise.
            plan: The step's plan, if one was made.

        Returns:
            Output [tokens, hidden], and the cache with this step's keys and values in it.

        Raises:
            ValueError: A layer that shares keys and values got no cache.
        """
        require(cache is not None or not self.shares_kv, "cache", "be given to a layer with shares_kv", None)
        query = self._heads(self.q_proj(x), self.spec.num_q_heads, self.q_norm, positions)
        kv: PagedCache | PackedKV
        if self.shares_kv:
            assert cache is not None
            kv = cache
        else:
            key = self._heads(self.k_proj(x), self.spec.num_kv_heads, self.k_norm, positions)
            value = self.v_proj(x).reshape(x.shape[0], self.spec.num_kv_heads, self.spec.head_dim)
            if cache is None:
                kv = PackedKV(k=key, v=value, kv_start_loc=metadata.row_starts)
            else:
                kv = cache = write_kv(cache, key, value, metadata.slot_mapping)
        out = attend(
            query,
            kv,
            metadata,
            self.spec,
            plan,
            sinks=None if self.sinks is None else self.sinks[...],
            alibi_slopes=None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32),
            implementation=self.implementation,
        )
        return self.o_proj(out.reshape(x.shape[0], -1)), cache

    def _heads(
        self, projected: Array, num_heads: int, norm: Callable[[Array], Array] | None, positions: Array
    ) -> Array:
        x = projected.reshape(projected.shape[0], num_heads, self.spec.head_dim)
        x = x if norm is None else norm(x)
        return x if self.rope is None else self.rope(x, positions)


def attention_fn(
    query: Float[Array, "*batch q_tokens q_heads head_dim"],
    key: Float[Array, "*batch kv_tokens kv_heads head_dim"],
    value: Float[Array, "*batch kv_tokens kv_heads head_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    spec: AttentionSpec | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    **unused: Any,
) -> Float[Array, "*batch q_tokens q_heads head_dim"]:
    """Dense attention with all that a spec can say, for `nnx.MultiHeadAttention(attention_fn=...)`.

    Differentiable; memory grows with q_tokens x kv_tokens. Give the spec with functools.partial.

    Args:
        query: Queries; the last of them stands at the last key (bottom-right aligned).
        key: Keys.
        value: Values.
        bias: Added to the scores, broadcastable to [*batch, q_heads, q_tokens, kv_tokens].
        mask: True where a query may see a key, beyond what the spec says; shape as bias.
        spec: The attention; None = every key is seen, scale head_dim ** -0.5.
        sinks: As in `attend`.
        alibi_slopes: As in `attend`.
        dropout_rate: Must be 0 unless deterministic.
        deterministic: No dropout.
        unused: What flax also passes: dropout_rng, broadcast_dropout, dtype, precision, module.

    Raises:
        NotImplementedError: Dropout was asked for.
        ValueError: Shapes disagree.
    """
    if dropout_rate > 0 and not deterministic:
        raise unsupported(f"dropout_rate={dropout_rate}", "attention_fn has no dropout", "Set it to 0")
    (q_tokens, q_heads, head_dim), kv_heads = query.shape[-3:], key.shape[-2]
    if spec is None:
        spec = AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, causal=False)
    got = (q_heads, kv_heads, head_dim)
    require_shape(
        "q_heads, kv_heads, head_dim", got, (spec.num_q_heads, spec.num_kv_heads, spec.head_dim), "as spec"
    )
    dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    k, v = (jnp.repeat(x, spec.q_heads_per_kv_head, axis=-2).astype(dtype) for x in (key, value))
    k_positions = jnp.arange(key.shape[-3], dtype=jnp.int32)
    q_positions = jnp.arange(q_tokens, dtype=jnp.int32) + (key.shape[-3] - q_tokens)
    s = jnp.einsum("...qhd,...khd->...hqk", query.astype(dtype), k, precision="highest") * spec.softmax_scale
    if spec.soft_cap is not None:
        s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
    all_prefill = jnp.ones(q_tokens, bool)
    sees = reference.visible(spec, spec.sparsity, jnp.int32(0), q_positions, k_positions, all_prefill)
    sees = jnp.broadcast_to(sees.reshape((1,) * (s.ndim - 3) + sees.shape), s.shape)
    sees = sees if mask is None else sees & mask
    if alibi_slopes is not None:
        slopes = reference.alibi_bias(spec, alibi_slopes.astype(dtype), q_positions, k_positions)
        s = s + slopes.reshape((1,) * (s.ndim - 3) + slopes.shape)
    s = s if bias is None else s + bias.astype(dtype)
    v = jnp.moveaxis(v, -2, -3)
    average = lambda s, v: reference.softmax_average(s, v, sinks)[0]
    for _ in range(s.ndim - 3):
        average = jax.vmap(average)
    return jnp.moveaxis(average(jnp.where(sees, s, -jnp.inf), v), -3, -2).astype(query.dtype)
