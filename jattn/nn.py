"""The Flax module over `attend`: a paged layer for models."""

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


def _check_made_of(
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
    """Self-attention of one layer over its paged cache: project, rotate, write, attend, project.

    Attributes:
        ranks: Inside shard_map, where the cache is one rank's part: where keys lie. What the layer gives is
            then one of the parts whose sum over the ranks is the output. None = all keys are here.
        peers: There, this device's part of what ranks write log-sum-exps to; None = XLA exchanges them.
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
        """Makes the layer's parameters.

        Args:
            hidden_size: Width of the layer's input and output.
            spec: The layer's attention: heads, window, soft cap, ...
            rngs: For the initial parameters.
            rope: `(x [tokens, heads, head_dim], positions [tokens]) -> x`, applied to queries and keys. One
                with a true `needs_lengths` takes the lengths of the tokens' requests [tokens] behind them.
            q_norm: Of queries [tokens, q_heads, head_dim], before rope; behind it where it `follows_rope`.
            k_norm: Applied to keys likewise.
            use_bias: Query, key and value projections have a bias.
            use_out_bias: The output projection has one.
            has_sinks: A learned sink per query head (parameter `sinks`, f32).
            alibi_slopes: Slope per query head.
            clip_qkv: Queries, keys and values are cut off at this magnitude when projected.
            query_scale: `positions [tokens] -> factors [tokens]` of the queries, behind norm and rope.
            shares_kv: The layer reads the keys and values that another layer wrote (give it that layer's
                cache); it has no key and value projections and writes nothing.
            fuses_qkv: One parameter `qkv_proj` [hidden, kv_heads, group + 2, head_dim] instead of q_proj,
                k_proj and v_proj: of each kv head, its query heads, key and value. One matrix product.
            dtype: Of the computation; None = as parameters and input promote.
            param_dtype: Of the parameters.
            precision: Of the projections' products; None = jax's default, which on a GPU rounds f32 to TF32.
            implementation: As in `attend`.

        Raises:
            ValueError: An argument is of another kind, or a layer without a key projection is to fuse it.
        """
        require(not (fuses_qkv and shares_kv), "fuses_qkv", "be False with shares_kv", fuses_qkv)
        _check_made_of(hidden_size, spec, alibi_slopes, clip_qkv, rngs)
        self.hidden_size, self.spec = hidden_size, spec
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.alibi_slopes = None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes)
        self.clip_qkv, self.query_scale, self.shares_kv = clip_qkv, query_scale, shares_kv
        self.implementation, self.ranks, self.peers = as_static_arg(implementation), None, None
        how = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        self._make_projections(fuses_qkv, use_bias, use_out_bias, how)
        self.sinks = nnx.Param(jnp.zeros(spec.num_q_heads, jnp.float32)) if has_sinks else None

    def _make_projections(
        self, fuses_qkv: bool, use_bias: bool, use_out_bias: bool, how: dict[str, Any]
    ) -> None:
        spec, hidden_size = self.spec, self.hidden_size
        linear = lambda heads: nnx.Linear(hidden_size, heads * spec.head_dim, use_bias=use_bias, **how)
        if fuses_qkv:
            widths = (spec.num_kv_heads, spec.q_heads_per_kv_head + 2, spec.head_dim)
            self.qkv_proj = nnx.LinearGeneral(hidden_size, widths, use_bias=use_bias, **how)
        else:
            self.q_proj = linear(spec.num_q_heads)
            if not self.shares_kv:
                self.k_proj, self.v_proj = linear(spec.num_kv_heads), linear(spec.num_kv_heads)
        q_width = spec.num_q_heads * spec.head_dim
        self.o_proj = nnx.Linear(q_width, hidden_size, use_bias=use_out_bias, **how)

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
            cache: The layer's cache; None = every row's keys are this step's own (training, encoders), and
                no row has context: inside jit nobody can see one that has.
            metadata: The step's metadata.
            positions: For rope; `metadata.positions` unless the model counts otherwise.
            plan: The step's plan, if one was made.

        Returns:
            Output [tokens, hidden], and the cache with this step's keys and values in it.

        Raises:
            ValueError: An argument is of another kind, x or positions are not the metadata's tokens, or
                there is no cache and the layer shares keys and values, or a row has context.
        """
        self._check(x, cache, metadata, positions, plan)
        query, kv = self._query_and_kv(x, cache, metadata, positions)
        how: dict[str, Any] = self._layer_arguments()
        if self.ranks is not None and isinstance(kv, PagedCache):
            out = attend_on_rank(query, kv, metadata, self.spec, self.ranks, plan, peers=self.peers, **how)
        else:
            out = attend(query, kv, metadata, self.spec, plan, **how)
            if self.ranks is not None:  # each has all keys of the step: one gives what they bring
                out = jnp.where(self.ranks.rank == 0, out, jnp.zeros_like(out))
        return self.o_proj(jax.lax.collapse(out, 1)), kv if isinstance(kv, PagedCache) else None

    def _layer_arguments(self) -> dict[str, Any]:
        """What `attend` is told of the layer beside its spec."""
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32)
        sinks = None if self.sinks is None else self.sinks[...]
        return {"sinks": sinks, "alibi_slopes": slopes, "implementation": self.implementation}

    def _slots(self, metadata: BatchMetadata) -> Array:
        """Where keys and values are written; < 0: not here."""
        return metadata.slot_mapping if self.ranks is None else slot_mapping_on_rank(metadata, self.ranks)

    def _query_and_kv(
        self, x: Array, cache: PagedCache | None, metadata: BatchMetadata, positions: Array
    ) -> tuple[Array, PackedKV | PagedCache]:
        """Queries as attention wants them, and what they attend: the step's keys and values are in it."""
        if hasattr(self, "qkv_proj"):
            qkv = self._clipped(self.qkv_proj(x))
            how = None if cache is None else self._qk_norm_rope(cache, qkv.dtype, metadata, positions)
            if cache is not None and how is not None:
                return write_qkv(cache, qkv, self._slots(metadata), how)
            query, key, value = self._apart(qkv)
        else:
            query, key, value = self.project(x)
        query = self._turned(query, self.q_norm, positions, metadata)
        if self.query_scale is not None:
            factors = self.query_scale(positions)[:, None, None]
            query = (query.astype(factors.dtype) * factors).astype(query.dtype)
        if key is None or value is None:
            assert cache is not None
            return query, cache
        key = self._turned(key, self.k_norm, positions, metadata)
        if cache is None:
            return query, PackedKV(k=key, v=value, kv_start_loc=metadata.row_starts, is_in_order=True)
        return query, write_kv(cache, key, value, self._slots(metadata))

    def _qk_norm_rope(
        self, cache: PagedCache, dtype: np.dtype, metadata: BatchMetadata, positions: Array
    ) -> QKNormRope | None:
        """What `write_qkv` does in the place of norms, rope and write; None where it cannot."""
        if self.query_scale is not None or "mosaic_gpu" not in requested_implementations(self.implementation):
            return None
        if why_not_write_qkv(cache, dtype, self.rope, (self.q_norm, self.k_norm)) is not None:
            return None
        return qk_norm_rope(self.rope, (self.q_norm, self.k_norm), positions, self._lengths(metadata), dtype)

    def project(self, x: Float[Array, "tokens hidden"]) -> tuple[Array, Array | None, Array | None]:
        """Queries, keys and values [tokens, heads, head_dim], neither normalised nor turned.

        Keys and values are None where the layer shares another's.
        """
        if hasattr(self, "qkv_proj"):
            return self._apart(self._clipped(self.qkv_proj(x)))
        dim = self.spec.head_dim
        heads = lambda y: self._clipped(y).reshape(len(y), math.prod(y.shape[1:]) // dim, dim)
        if self.shares_kv:
            return heads(self.q_proj(x)), None, None
        return heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))

    def _apart(self, qkv: Array) -> tuple[Array, Array | None, Array | None]:
        """The fused projection as `project` returns it."""
        return jax.lax.collapse(qkv[:, :, :-2], 1, 3), qkv[:, :, -2], qkv[:, :, -1]

    def _check(self, x: Array, cache: Any, metadata: Any, positions: Array, plan: Any) -> None:
        kinds = (
            ("metadata", metadata, BatchMetadata, "a BatchMetadata (jattn.build_batch_metadata)"),
            ("cache", cache, PagedCache | None, "a PagedCache or None"),
            ("plan", plan, Plan | None, "a Plan (jattn.plan) or None"),
        )
        for name, value, kind, rule in kinds:
            require(isinstance(value, kind), name, f"be {rule}", type(value).__name__)
        tokens, width = metadata.bucket.max_tokens, self.hidden_size
        meaning = "the metadata's tokens, hidden_size; a batch of texts lies in one axis of tokens"
        require_shape("x", jnp.shape(x), (tokens, width), meaning)
        require_shape("positions", jnp.shape(positions), (tokens,), "the metadata's tokens")
        require(cache is not None or not self.shares_kv, "cache", "be given to a layer with shares_kv", None)
        if cache is None:
            require_no_context(metadata)

    def _clipped(self, x: Array) -> Array:
        return x if self.clip_qkv is None else jnp.clip(x, -self.clip_qkv, self.clip_qkv)

    def _turned(
        self, x: Array, norm: Callable[[Array], Array] | None, positions: Array, metadata: BatchMetadata
    ) -> Array:
        is_last = getattr(norm, "follows_rope", False)
        x = x if norm is None or is_last else norm(x)
        if self.rope is not None:
            lengths = self._lengths(metadata)
            x = self.rope(x, positions) if lengths is None else self.rope(x, positions, lengths)
        return norm(x) if norm is not None and is_last else x

    def _lengths(self, metadata: BatchMetadata) -> Array | None:
        """Each token's request's, where the rope asks for them."""
        needs = getattr(self.rope, "needs_lengths", False)
        return metadata.seq_lens[metadata.token_rows] if needs else None
