"""Attention of one query tile over the chunks of keys visible to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.cache.quantization import quantize_token_head
from jattn.implementations.xla.kv_chunks import Chunk, chunk_size, load_chunk, static_scales
from jattn.implementations.xla.online_softmax import Softmax, add_chunk, add_sink, initial_softmax, precision
from jattn.implementations.xla.scores import alibi_bias, is_visible, key_range, num_first_keys, pairs_of
from jattn.masks import Mask
from jattn.spec import QUERY_DTYPES, AttentionSpec


class AttentionArgs(NamedTuple):
    """Arguments of `attend` other than the queries, shared by all tiles."""

    kv: PagedCache | PackedKV
    metadata: BatchMetadata
    spec: AttentionSpec
    mask: Mask | None
    sinks: Float[Array, " q_heads"] | None
    alibi_slopes: Float[Array, " q_heads"] | None


class TileQueries(NamedTuple):
    """Queries of a tile.

    Attributes:
        q: Queries in the dtype of the matrix products.
        scale: Scale of quantized queries; None is 1.
        row: Row of the tile's request.
        positions: Position of each query in its request.
        is_valid: Whether each query is valid (not padding).
        seq_len: Number of keys of the request; 0 if no query is valid.
        is_prefill: Whether the queries are in the prefill region (static).
    """

    q: Float[Array, "kv_heads group tile_q head_dim"]
    scale: Float[Array, "kv_heads group tile_q"] | None
    row: Int[Array, ""]
    positions: Int[Array, " tile_q"]
    is_valid: Bool[Array, " tile_q"]
    seq_len: Int[Array, ""]
    is_prefill: bool


def attend_tile(
    q: Float[Array, "tile_q q_heads head_dim"],
    row: Int[Array, ""],
    first_position: Int[Array, ""],
    num_queries: Int[Array, ""],
    *,
    args: AttentionArgs,
    is_prefill: bool,
) -> tuple[Float[Array, "tile_q q_heads head_dim"], Float[Array, "tile_q q_heads"]]:
    """Attend from a tile of one request, whose `num_queries` valid queries begin at `first_position`."""
    kv, spec, sinks = args.kv, args.spec, args.sinks
    tile_q, heads = q.shape[0], (spec.num_kv_heads, spec.q_heads_per_kv_head)
    queries, acc_dtype = make_tile_queries(
        q, row, first_position, num_queries, args=args, is_prefill=is_prefill
    )
    static_k, static_v = static_scales(kv, acc_dtype)
    size, matmul_dtype = chunk_size(kv), queries.q.dtype

    def step(c: Array, state: Softmax) -> Softmax:
        chunk = load_chunk(kv, args.metadata.block_table, row, c)
        key_positions = c * size + jnp.arange(size, dtype=jnp.int32)
        s, visible = capped_scores(queries, chunk, key_positions, static_k, args)
        s = jnp.where(visible, add_alibi_bias(s, queries, key_positions, args), -jnp.inf)
        return add_chunk(state, s, chunk, visible.any(axis=(1, 2)), matmul_dtype)

    state = match_varying_axes(q, initial_softmax((*heads, tile_q), spec.head_dim, acc_dtype))
    state = jax.lax.fori_loop(*chunk_range(queries, args, size), step, state)
    if sinks is not None:
        has_sink = (queries.seq_len > 0) & queries.is_valid
        state = add_sink(state, jnp.where(has_sink, sinks.astype(acc_dtype).reshape(*heads, 1), -jnp.inf))
    out = state.acc * static_v / jnp.where(state.row_sum == 0, 1.0, state.row_sum)[..., None]
    lse = jnp.where(state.row_sum == 0, -jnp.inf, state.row_max + jnp.log(state.row_sum))
    out, lse = jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(tile_q, spec.num_q_heads)


def make_tile_queries(
    q: Float[Array, "tile_q q_heads head_dim"],
    row: Int[Array, ""],
    first_position: Int[Array, ""],
    num_queries: Int[Array, ""],
    *,
    args: AttentionArgs,
    is_prefill: bool,
) -> tuple[TileQueries, np.dtype]:
    """Return a tile's queries and the accumulation dtype; see attend_tile for the arguments."""
    tile_q = q.shape[0]
    matmul_dtype, acc_dtype = _dtypes(q, args.kv)
    grouped, scale = _group_queries(q, args.spec, matmul_dtype, acc_dtype)
    index = jnp.arange(tile_q, dtype=jnp.int32)
    queries = TileQueries(
        q=grouped,
        scale=scale,
        row=row,
        positions=first_position + index,
        is_valid=index < num_queries,
        seq_len=jnp.where(num_queries > 0, args.metadata.seq_lens[row], 0),
        is_prefill=is_prefill,
    )
    return queries, acc_dtype


def chunk_range(queries: TileQueries, args: AttentionArgs, size: int) -> tuple[Array, Array]:
    """Return the first chunk of `size` keys that may be visible to a tile, and one past the last."""
    bound = num_first_keys(args.mask)
    seq_len = queries.seq_len if bound is None else jnp.minimum(queries.seq_len, bound)
    low, high = key_range(args.spec, queries.positions[0], queries.positions[-1], seq_len)
    return low // size, (high + size - 1) // size


def _dtypes(q: Array, kv: PagedCache | PackedKV) -> tuple[np.dtype, np.dtype]:
    """Return the dtype of matrix products (8-bit inputs are dequantized) and of accumulation."""
    has_matmul_dtype = all(jnp.dtype(x.dtype).itemsize == 1 or x.dtype == q.dtype for x in (kv.k, kv.v))
    matmul_dtype = jnp.dtype(q.dtype if has_matmul_dtype else jnp.float32)
    acc_dtype = jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    return (acc_dtype, acc_dtype) if acc_dtype.itemsize == 8 else (matmul_dtype, acc_dtype)


def _group_queries(
    q: Float[Array, "tile_q q_heads head_dim"],
    spec: AttentionSpec,
    matmul_dtype: np.dtype,
    acc_dtype: np.dtype,
) -> tuple[Float[Array, "kv_heads group tile_q head_dim"], Float[Array, "kv_heads group tile_q"] | None]:
    """Return queries grouped by KV head, quantized if the spec says so, and their scales."""
    shape = q.shape[0], spec.num_kv_heads, spec.q_heads_per_kv_head
    dtype, scale = QUERY_DTYPES[spec.query_quantization], None
    grouped: Array = q
    if dtype is not None:  # dequantized again below: the products are exact in any 16-bit dtype
        grouped, scale = quantize_token_head(q, dtype)
        scale = jnp.moveaxis(scale.reshape(shape), 0, 2).astype(acc_dtype)
    return jnp.moveaxis(grouped.reshape(*shape, spec.head_dim).astype(matmul_dtype), 0, 2), scale


def capped_scores(
    queries: TileQueries,
    chunk: Chunk,
    key_positions: Int[Array, " keys"],
    static_k: Array,
    args: AttentionArgs,
) -> tuple[Float[Array, "kv_heads group tile_q keys"], Bool[Array, "_ _ tile_q keys"]]:
    """Return the soft-capped scores of a chunk of keys, and which of them are visible."""
    spec, matmul_dtype, acc_dtype = args.spec, queries.q.dtype, static_k.dtype
    s = jnp.einsum(
        "hgqd,khd->hgqk",
        queries.q,
        chunk.k.astype(matmul_dtype),
        preferred_element_type=acc_dtype,
        precision=precision(matmul_dtype),
    )
    s = s * (static_k * spec.softmax_scale)
    if queries.scale is not None:
        s = s * queries.scale[..., None]
    if chunk.k_scale is not None:
        s = s * chunk.k_scale[:, None, None, :].astype(acc_dtype)
    if spec.soft_cap is not None:
        s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
    is_valid = (key_positions < queries.seq_len)[None, :] & queries.is_valid[:, None]
    visible = is_visible(spec, queries.positions, key_positions) & is_valid[None, None]
    if args.mask is not None:
        pairs = pairs_of(spec, queries.row, queries.positions, key_positions, is_prefill=queries.is_prefill)
        visible &= args.mask.visible(pairs)
    return s, visible


def add_alibi_bias(
    s: Array, queries: TileQueries, key_positions: Int[Array, " keys"], args: AttentionArgs
) -> Array:
    """Add the ALiBi bias to soft-capped scores."""
    if args.alibi_slopes is None:
        return s
    slopes = args.alibi_slopes.astype(s.dtype).reshape(args.spec.num_kv_heads, -1)
    return s + alibi_bias(args.spec, slopes, queries.positions, key_positions)


def match_varying_axes[Tree](like: Float[Array, "..."], tree: Tree) -> Tree:
    """Make each float array of `tree` vary over every device axis that `like` varies over.

    Adds the sum of an empty slice of `like`, which is 0 and which XLA removes. No gradient flows to `like`.
    """
    zero = jax.lax.stop_gradient(like).reshape(-1)[:0].sum()
    return jax.tree.map(lambda array: array + zero.astype(array.dtype), tree)
