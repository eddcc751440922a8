"""A Flax module for self-attention over a paged KV cache."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jattn.attending import attend
from jattn.batch.check import require_no_context
from jattn.batch.context_parallel import ContextParallelAxis, slot_mapping_on_rank
from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, write_kv
from jattn.cache.fused_qkv import QKNormRope, qk_norm_rope, why_not_write_qkv, write_qkv
from jattn.implementations.selection import as_static_arg, requested_implementations
from jattn.parallel.context_parallel import attend_on_rank
from jattn.planning import Plan
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_int, require_positive, require_shape, require_type

if TYPE_CHECKING:
    from pallas_kernels.collectives import PeerMemory

Rope = Callable[..., Array]
QueryScale = Callable[[Array], Array]


def _check_config(
    hidden_size: Any, spec: Any, alibi_slopes: Sequence[float] | None, clip_qkv: float | None, rngs: Any
) -> None:
    require_type("rngs", rngs, nnx.Rngs, "nnx.Rngs(0)")
    require(isinstance(spec, AttentionSpec), "spec", "be a jattn.AttentionSpec", type(spec).__name__)
    require_int(hidden_size=hidden_size)
    require_positive(hidden_size=hidden_size)
    if clip_qkv is not None:
        require_positive(clip_qkv=clip_qkv)
    if alibi_slopes is not None:
        require_shape("alibi_slopes", np.shape(alibi_slopes), (spec.num_q_heads,), "q_heads")


class PagedAttention(nnx.Module):
    """Self-attention layer with a paged cache: projections, RoPE, cache write and attention.

    The parameters are `q_proj.kernel` [hidden, q_heads * head_dim], `k_proj.kernel` and `v_proj.kernel`
    [hidden, kv_heads * head_dim] and `o_proj.kernel` [q_heads * head_dim, hidden], with all dimensions of
    head 0 first, then those of head 1, and so on. A kernel of nnx.MultiHeadAttention, [hidden, heads,
    head_dim] or [heads, head_dim, hidden], becomes one of these by a reshape.

    Attributes:
        ranks: Context-parallel mesh axis over which the cached keys are distributed, for use inside
            shard_map. The layer then returns a partial output; the sum over the ranks is the layer's output.
            None = this device stores all keys.
        peers: This device's shard of the memory through which the ranks exchange log-sum-exps. None = use
            an XLA all-gather. Only read if `ranks` is set.
    """

    ranks: ContextParallelAxis | None
    peers: "PeerMemory | None"

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
        clip_qkv: float | None = None,
        query_scale: QueryScale | None = None,
        shares_kv: bool = False,
        fuses_qkv: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: str | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        """Initialize the layer's parameters.

        Args:
            hidden_size: Width of the layer's input and output.
            spec: The layer's attention: heads, window, soft cap, ...
            rngs: Random number generators for the initial parameters.
            rope: `(x [tokens, heads, head_dim], positions [tokens]) -> x`, applied to queries and keys. If it
                has a true attribute `needs_lengths`, it receives the length of each token's request [tokens]
                as a third argument.
            q_norm: Normalization of the queries [tokens, q_heads, head_dim]. Applied before `rope`, or after
                it if the function has a true attribute `follows_rope`.
            k_norm: Normalization of the keys [tokens, kv_heads, head_dim], applied like `q_norm`.
            use_bias: Add a bias to the query, key and value projections.
            use_out_bias: Add a bias to the output projection.
            has_sinks: Learn an attention sink per query head (parameter `sinks`, f32).
            alibi_slopes: ALiBi slope per query head.
            clip_qkv: Magnitude to which projected queries, keys and values are clipped. None = no clipping.
            query_scale: `positions [tokens] -> factors [tokens]`; multiplies the queries after norm and RoPE.
            shares_kv: The layer attends to the keys and values that another layer wrote: pass that layer's
                cache. It has no key and value projections and writes nothing.
            fuses_qkv: Use one parameter `qkv_proj` [hidden, kv_heads, group + 2, head_dim], which holds the
                query heads, the key and the value of each kv head, instead of q_proj, k_proj and v_proj. The
                projections are then one matrix product.
            dtype: Dtype of the computation. None = promote the dtypes of the parameters and the input.
            param_dtype: Dtype of the parameters.
            precision: Precision of the projections' matrix products. None = JAX's default, which rounds f32
                to TF32 on a GPU.
            implementation: Kernel implementation, or several in order of preference; see `attend`.

        Raises:
            ValueError: If an argument has an invalid type or value, or both `fuses_qkv` and `shares_kv` are
                set.
        """
        require(not (fuses_qkv and shares_kv), "fuses_qkv", "be False with shares_kv", fuses_qkv)
        _check_config(hidden_size, spec, alibi_slopes, clip_qkv, rngs)
        self.hidden_size, self.spec = hidden_size, spec
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.alibi_slopes = None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes)
        self.clip_qkv, self.query_scale, self.shares_kv = clip_qkv, query_scale, shares_kv
        self.implementation, self.ranks, self.peers = as_static_arg(implementation), None, None
        self._make_projections(fuses_qkv, use_bias, use_out_bias, dtype, param_dtype, precision, rngs)
        self.sinks = nnx.Param(jnp.zeros(spec.num_q_heads, jnp.float32)) if has_sinks else None

    def _make_projections(
        self,
        fuses_qkv: bool,
        use_bias: bool,
        use_out_bias: bool,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        precision: str | None,
        rngs: nnx.Rngs,
    ) -> None:
        spec, hidden_size = self.spec, self.hidden_size
        linear = functools.partial(
            nnx.Linear, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if fuses_qkv:
            self.qkv_proj = nnx.LinearGeneral(
                hidden_size,
                (spec.num_kv_heads, spec.q_heads_per_kv_head + 2, spec.head_dim),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                rngs=rngs,
            )
        else:
            self.q_proj = linear(hidden_size, q_width, use_bias=use_bias)
            if not self.shares_kv:
                self.k_proj = linear(hidden_size, kv_width, use_bias=use_bias)
                self.v_proj = linear(hidden_size, kv_width, use_bias=use_bias)
        self.o_proj = linear(q_width, hidden_size, use_bias=use_out_bias)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        cache: PagedCache | None,
        metadata: BatchMetadata,
        positions: Int32[Array, " tokens"],
        plan: Plan | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], PagedCache | None]:
        """Write a step's keys and values into the cache and attend to all keys of each request.

        Args:
            x: Hidden states of the step's tokens, in the order of the metadata.
            cache: The layer's cache. None = each request attends only to the keys of this step (training,
                encoders). No request may then have context; inside jit this cannot be checked.
            metadata: The step's metadata.
            positions: Positions for `rope` and `query_scale`, usually `metadata.positions`.
            plan: The step's plan from `jattn.plan`. None = plan inside this call.

        Returns:
            Output [tokens, hidden], and the cache with this step's keys and values, or None.

        Raises:
            ValueError: If an argument has an invalid type or a shape that does not match the metadata, or if
                `cache` is None and the layer has `shares_kv` or a request has context.
        """
        self._check(x, cache, metadata, positions, plan)
        query, kv = self._query_and_kv(x, cache, metadata, positions)
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32)
        sinks = None if self.sinks is None else self.sinks[...]
        if self.ranks is not None and isinstance(kv, PagedCache):
            out = attend_on_rank(
                query,
                kv,
                metadata,
                self.spec,
                self.ranks,
                plan,
                sinks=sinks,
                alibi_slopes=slopes,
                implementation=self.implementation,
                peers=self.peers,
            )
        else:
            out = attend(
                query,
                kv,
                metadata,
                self.spec,
                plan,
                sinks=sinks,
                alibi_slopes=slopes,
                implementation=self.implementation,
            )
            if self.ranks is not None:
                # Without a cache every rank has all keys, so only rank 0 contributes to the sum.
                out = jnp.where(self.ranks.rank == 0, out, jnp.zeros_like(out))
        return self.o_proj(jax.lax.collapse(out, 1)), kv if isinstance(kv, PagedCache) else None

    def _slot_mapping(self, metadata: BatchMetadata) -> Array:
        """Return the cache slot of each token on this device; a negative slot is not written."""
        return metadata.slot_mapping if self.ranks is None else slot_mapping_on_rank(metadata, self.ranks)

    def _query_and_kv(
        self, x: Array, cache: PagedCache | None, metadata: BatchMetadata, positions: Array
    ) -> tuple[Array, PackedKV | PagedCache]:
        """Return queries after norm and RoPE, and the keys and values to attend to, this step's included."""
        if hasattr(self, "qkv_proj"):
            qkv = self._clip(self.qkv_proj(x))
            norm_rope = None if cache is None else self._qk_norm_rope(cache, qkv.dtype, metadata, positions)
            if cache is not None and norm_rope is not None:
                return write_qkv(cache, qkv, self._slot_mapping(metadata), norm_rope)
            query, key, value = self._split_qkv(qkv)
        else:
            query, key, value = self.project(x)
        query = self._norm_rope(query, self.q_norm, positions, metadata)
        if self.query_scale is not None:
            factors = self.query_scale(positions)[:, None, None]
            query = (query.astype(factors.dtype) * factors).astype(query.dtype)
        if key is None or value is None:
            assert cache is not None
            return query, cache
        key = self._norm_rope(key, self.k_norm, positions, metadata)
        if cache is None:
            return query, PackedKV(k=key, v=value, kv_start_loc=metadata.row_starts, is_in_order=True)
        return query, write_kv(cache, key, value, self._slot_mapping(metadata))

    def _qk_norm_rope(
        self, cache: PagedCache, dtype: np.dtype, metadata: BatchMetadata, positions: Array
    ) -> QKNormRope | None:
        """Return the norm and RoPE parameters for `write_qkv`, or None if it does not support this layer."""
        if self.query_scale is not None or "mosaic_gpu" not in requested_implementations(self.implementation):
            return None
        if why_not_write_qkv(cache, dtype, self.rope, (self.q_norm, self.k_norm)) is not None:
            return None
        return qk_norm_rope(self.rope, (self.q_norm, self.k_norm), positions, self._seq_lens(metadata), dtype)

    def project(self, x: Float[Array, "tokens hidden"]) -> tuple[Array, Array | None, Array | None]:
        """Return queries, keys and values [tokens, heads, head_dim] before norm and RoPE.

        Keys and values are None if the layer has `shares_kv`.
        """
        if hasattr(self, "qkv_proj"):
            return self._split_qkv(self._clip(self.qkv_proj(x)))
        query = self._clip_and_split_heads(self.q_proj(x))
        if self.shares_kv:
            return query, None, None
        return query, self._clip_and_split_heads(self.k_proj(x)), self._clip_and_split_heads(self.v_proj(x))

    def _clip_and_split_heads(self, x: Array) -> Array:
        head_dim = self.spec.head_dim
        return self._clip(x).reshape(len(x), math.prod(x.shape[1:]) // head_dim, head_dim)

    def _split_qkv(self, qkv: Array) -> tuple[Array, Array | None, Array | None]:
        """Split the output of the fused projection into queries, keys and values."""
        return jax.lax.collapse(qkv[:, :, :-2], 1, 3), qkv[:, :, -2], qkv[:, :, -1]

    def _check(self, x: Array, cache: Any, metadata: Any, positions: Array, plan: Any) -> None:
        expected_types = (
            ("metadata", metadata, BatchMetadata, "a BatchMetadata (jattn.build_batch_metadata)"),
            ("cache", cache, PagedCache | None, "a PagedCache or None"),
            ("plan", plan, Plan | None, "a Plan (jattn.plan) or None"),
        )
        for name, value, expected_type, description in expected_types:
            require(isinstance(value, expected_type), name, f"be {description}", type(value).__name__)
        tokens, width = metadata.bucket.max_tokens, self.hidden_size
        meaning = "the bucket's tokens (see jattn.pack_tokens), hidden_size; requests share the tokens axis"
        require_shape("x", jnp.shape(x), (tokens, width), meaning)
        require_shape("positions", jnp.shape(positions), (tokens,), "max_tokens of the metadata's bucket")
        if cache is None:
            if self.shares_kv:
                raise ValueError(
                    "cache is None, but a layer with shares_kv=True reads another layer's keys and values. "
                    "Pass that layer's cache."
                )
            require_no_context(metadata)

    def _clip(self, x: Array) -> Array:
        return x if self.clip_qkv is None else jnp.clip(x, -self.clip_qkv, self.clip_qkv)

    def _norm_rope(
        self, x: Array, norm: Callable[[Array], Array] | None, positions: Array, metadata: BatchMetadata
    ) -> Array:
        """Normalize and rotate queries or keys, in the order that the norm requires."""
        follows_rope = getattr(norm, "follows_rope", False)
        x = x if norm is None or follows_rope else norm(x)
        if self.rope is not None:
            seq_lens = self._seq_lens(metadata)
            x = self.rope(x, positions) if seq_lens is None else self.rope(x, positions, seq_lens)
        return norm(x) if norm is not None and follows_rope else x

    def _seq_lens(self, metadata: BatchMetadata) -> Array | None:
        """Return the length of each token's request, or None if the RoPE does not need it."""
        needs_lengths = getattr(self.rope, "needs_lengths", False)
        return metadata.seq_lens[metadata.token_rows] if needs_lengths else None
