"""Attention in plain XLA: an online softmax over chunks of keys.

Queries are split into tiles of one request each; a tile loops over the chunks of keys visible to it, or over
the keys that a mask lists one by one. Only a few tiles are processed at a time, so memory does not grow with
the number of requests or their length.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, has_token_axis
from jattn.cache.quantization import quantize_token_head
from jattn.cache.types import take_blocks, take_tokens
from jattn.implementations.region_inputs import RegionInputs
from jattn.masks import And, ListedBlocks, Mask, Or, Pairs, Sinks
from jattn.masks.base import factors
from jattn.pytree import pytree, static
from jattn.spec import QUERY_DTYPES, AttentionSpec

TILE_Q = 64  # queries per tile
CHUNK = 128  # minimum number of keys per chunk
# Decode rows per batch of tiles, and queries per batch of prefill tiles (at least one tile).
TILES_AT_ONCE = 64
PREFILL_QUERIES_AT_ONCE = 512
# Precision of matrix products by itemsize: full f32 for f32 inputs, for which a GPU would use TF32.
PRECISION = {2: None, 4: "highest", 8: "highest"}


@pytree
class QueryTiles:
    """Query tiles of the prefill region, in token order; unused tiles have length 0.

    Attributes:
        rows: Row of the metadata that each tile belongs to.
        starts: Index of each tile's first token, counted from the start of the prefill region.
        lens: Number of valid tokens per tile.
        tile_q: Tokens per tile (static).
    """

    rows: Int32[Array, " tiles"]
    starts: Int32[Array, " tiles"]
    lens: Int32[Array, " tiles"]
    tile_q: int = static()

    def token_index(self, past_end: int) -> Int[Array, "tiles tile_q"]:
        """Return the token indices of each tile, `past_end` for unused entries."""
        offsets = jnp.arange(self.tile_q, dtype=jnp.int32)[None, :]
        return jnp.where(offsets < self.lens[:, None], self.starts[:, None] + offsets, past_end)

    def first_positions(self, metadata: BatchMetadata) -> Int32[Array, " tiles"]:
        """Return the position of each tile's first token in its request."""
        first_token = self.starts + metadata.bucket.max_decode_tokens
        return metadata.num_computed_tokens[self.rows] + first_token - metadata.row_starts[self.rows]


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


class Chunk(NamedTuple):
    """Chunk of one request's keys and values, with the scales to multiply them by."""

    k: Shaped[Array, "keys kv_heads head_dim"]
    v: Shaped[Array, "keys kv_heads head_dim"]
    k_scale: Float[Array, "kv_heads keys"] | None
    v_scale: Float[Array, "kv_heads keys"] | None


class Softmax(NamedTuple):
    """State of an online softmax: row maximum, row sum and accumulated values; all f32 or f64."""

    row_max: Float[Array, "kv_heads group tile_q"]
    row_sum: Float[Array, "kv_heads group tile_q"]
    acc: Float[Array, "kv_heads group tile_q head_dim"]


def attend(
    inputs: RegionInputs, tiles: QueryTiles | None = None
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Return output and log-sum-exp of every token, as `jattn.attend` defines them.

    Args:
        inputs: Inputs of a region, or of a whole step.
        tiles: Query tiles of the prefill region; None computes them here.
    """
    query, metadata, spec = inputs.query, inputs.metadata, inputs.spec
    bucket, num_decodes = metadata.bucket, metadata.bucket.max_decodes
    if bucket.max_tokens == 0 or has_no_keys(inputs.kv, metadata):
        return jnp.zeros_like(query), jnp.full((spec.num_q_heads, query.shape[0]), -jnp.inf, jnp.float32)
    outs, lses = [], []  # [tokens, q_heads, head_dim] and [tokens, q_heads]
    if num_decodes:  # One tile per row.
        q = query[: bucket.max_decode_tokens]
        q_tiles = q.reshape(num_decodes, bucket.decode_query_len, *q.shape[1:])
        rows = jnp.arange(num_decodes, dtype=jnp.int32)
        firsts, lens = metadata.num_computed_tokens[:num_decodes], metadata.query_lens[:num_decodes]
        at_once = 1 if spec.batch_invariant else TILES_AT_ONCE
        out, lse = _map_tiles(inputs, (q_tiles, rows, firsts, lens), at_once, is_prefill=False)
        outs.append(out.reshape(q.shape))
        lses.append(lse.reshape(q.shape[:2]))
    if bucket.max_prefill_tokens:
        q = query[bucket.max_decode_tokens :]
        if spec.batch_invariant:  # Tiles of one size whatever the bucket, one at a time.
            tiles, at_once = prefill_tiles(metadata, TILE_Q), 1
        else:
            tiles = prefill_tiles(metadata) if tiles is None else tiles
            at_once = max(PREFILL_QUERIES_AT_ONCE // tiles.tile_q, 1)
        index = tiles.token_index(past_end=bucket.max_prefill_tokens)  # [tiles, tile_q]
        q_tiles = jnp.take(q, index, axis=0, mode="clip")
        tile_args = q_tiles, tiles.rows, tiles.first_positions(metadata), tiles.lens
        out, lse = _map_tiles(inputs, tile_args, at_once, is_prefill=True)
        outs.append(jnp.zeros_like(q).at[index].set(out, mode="drop"))
        lses.append(jnp.full(q.shape[:2], -jnp.inf, lse.dtype).at[index].set(lse, mode="drop"))
    return jnp.concatenate(outs), jnp.concatenate(lses).T


def _map_tiles(
    inputs: RegionInputs, tile_args: tuple[Array, ...], at_once: int, *, is_prefill: bool
) -> tuple[Array, Array]:
    """Map attend_tile over tiles, at most `at_once` at a time.

    Tiles are split into equal groups, the last padded with empty tiles: a smaller remainder, as `jax.lax.map`
    handles it, would compile the loop a second time.
    """
    tile = functools.partial(attend_tile, inputs=inputs, is_prefill=is_prefill)
    if at_once == 1:
        return jax.lax.map(lambda xs: tile(*xs), tile_args)
    num = tile_args[0].shape[0]
    groups = -(-num // at_once)
    if groups == 1:
        return jax.vmap(tile)(*tile_args)
    size = -(-num // groups)
    outputs = jax.lax.map(lambda xs: jax.vmap(tile)(*xs), tuple(group_tiles(x, size) for x in tile_args))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], outputs)


def attend_tile(
    q: Float[Array, "tile_q q_heads head_dim"],
    row: Int[Array, ""],
    first_position: Int[Array, ""],
    num_queries: Int[Array, ""],
    *,
    inputs: RegionInputs,
    is_prefill: bool,
) -> tuple[Float[Array, "tile_q q_heads head_dim"], Float[Array, "tile_q q_heads"]]:
    """Attend from a tile of one request, whose `num_queries` valid queries begin at `first_position`."""
    kv, spec, sinks = inputs.kv, inputs.spec, inputs.sinks
    rows_shape = spec.num_kv_heads, spec.q_heads_per_kv_head, q.shape[0]
    queries, acc_dtype = make_tile_queries(
        q, row, first_position, num_queries, inputs=inputs, is_prefill=is_prefill
    )
    static_k, static_v = static_scales(kv, acc_dtype)
    size = chunk_size(kv)
    chunks = chunk_range(queries, inputs, size)
    listed = None if is_prefill else listed_tokens(inputs.mask)
    if listed is not None:
        ids, count = jnp.asarray(listed.ids)[row, 0], jnp.asarray(listed.counts)[row, 0]
        chunks = jnp.int32(0), (count + size - 1) // size

    def step(c: Array, state: Softmax) -> Softmax:
        index = c * size + jnp.arange(size, dtype=jnp.int32)
        if listed is None:
            key_positions, chunk = index, load_chunk(kv, inputs.metadata.block_table, row, c)
        else:
            key_positions = jnp.where(index < count, jnp.take(ids, index, mode="clip"), queries.seq_len)
            chunk = load_tokens(kv, inputs.metadata.block_table, row, key_positions)
        s, visible = capped_scores(queries, chunk, key_positions, static_k, inputs)
        if inputs.alibi_slopes is not None:
            s = s + tile_alibi_bias(queries, key_positions, inputs, s.dtype)
        if inputs.score_mod is not None:
            pairs = pairs_of(
                spec, queries.row, queries.positions, key_positions, is_prefill=queries.is_prefill
            )
            s = inputs.score_mod(s, pairs.row, pairs.head, pairs.query, pairs.key)
        s = jnp.where(visible, s, -jnp.inf)
        return add_chunk(state, s, chunk, visible.any(axis=(1, 2)), queries.q.dtype)

    state = Softmax(
        row_max=jnp.full(rows_shape, -jnp.inf, acc_dtype),
        row_sum=jnp.zeros(rows_shape, acc_dtype),
        acc=jnp.zeros((*rows_shape, spec.head_dim), acc_dtype),
    )
    state = match_varying_axes(q, state)
    row_max, row_sum, acc = jax.lax.fori_loop(*chunks, step, state)
    if sinks is not None:  # One more score per head that has no value.
        has_sink = (queries.seq_len > 0) & queries.is_valid
        sink = jnp.where(has_sink, sinks.astype(acc_dtype).reshape(*rows_shape[:2], 1), -jnp.inf)
        new_max = jnp.maximum(row_max, sink)
        finite_max = jnp.where(jnp.isneginf(new_max), 0.0, new_max)
        alpha = jnp.exp(row_max - finite_max)
        row_max, row_sum = new_max, row_sum * alpha + jnp.exp(sink - finite_max)
        acc = acc * alpha[..., None]
    out = acc * static_v / jnp.where(row_sum == 0, 1.0, row_sum)[..., None]
    lse = jnp.where(row_sum == 0, -jnp.inf, row_max + jnp.log(row_sum))
    out, lse = jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])


def make_tile_queries(
    q: Float[Array, "tile_q q_heads head_dim"],
    row: Int[Array, ""],
    first_position: Int[Array, ""],
    num_queries: Int[Array, ""],
    *,
    inputs: RegionInputs,
    is_prefill: bool,
) -> tuple[TileQueries, np.dtype]:
    """Return a tile's queries and the accumulation dtype; see attend_tile for the arguments."""
    kv, spec = inputs.kv, inputs.spec
    # 8-bit keys and values are dequantized.
    is_like_query = [x.dtype == q.dtype or jnp.dtype(x.dtype).itemsize == 1 for x in (kv.k, kv.v)]
    acc_dtype = jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    matmul_dtype = jnp.dtype(q.dtype if is_like_query == [True, True] else acc_dtype)
    shape = q.shape[0], spec.num_kv_heads, spec.q_heads_per_kv_head
    dtype, scale = QUERY_DTYPES[spec.query_quantization], None
    if dtype is not None:  # Dequantized again here: the products are exact in any 16-bit dtype.
        q, scale = quantize_token_head(q, dtype)
        scale = jnp.moveaxis(scale.reshape(shape), 0, 2).astype(acc_dtype)
    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    queries = TileQueries(
        q=jnp.moveaxis(q.reshape(*shape, spec.head_dim).astype(matmul_dtype), 0, 2),
        scale=scale,
        row=row,
        positions=first_position + index,
        is_valid=index < num_queries,
        seq_len=jnp.where(num_queries > 0, inputs.metadata.seq_lens[row], 0),
        is_prefill=is_prefill,
    )
    return queries, acc_dtype


def chunk_range(queries: TileQueries, inputs: RegionInputs, size: int) -> tuple[Array, Array]:
    """Return the first chunk of `size` keys that may be visible to a tile, and one past the last."""
    spec, first, last = inputs.spec, queries.positions[0], queries.positions[-1]
    bound = None if inputs.mask is None else num_first_keys(inputs.mask)
    high = queries.seq_len if bound is None else jnp.minimum(queries.seq_len, bound)
    low = jnp.zeros_like(high)
    left, right = spec.window or (None, None)
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if right is not None:
        high = jnp.minimum(high, last + 1 + right)
    if left is not None:
        low = jnp.maximum(low, first - left)
    if spec.chunk_size is not None:
        low = jnp.maximum(low, first // spec.chunk_size * spec.chunk_size)
        high = jnp.minimum(high, (last // spec.chunk_size + 1) * spec.chunk_size)
    return low // size, (jnp.maximum(high, low) + size - 1) // size


def num_first_keys(mask: Mask | None) -> int | None:
    """Return the number of leading keys that a mask limits attention to; None if it sets no limit."""
    if isinstance(mask, Sinks):
        return mask.num
    if not isinstance(mask, And | Or):
        return None
    bounds = [num_first_keys(operand) for operand in mask.masks]
    known_bounds = [bound for bound in bounds if bound is not None]
    if isinstance(mask, Or):
        return max(known_bounds) if len(known_bounds) == len(bounds) else None
    return min(known_bounds, default=None)


def listed_tokens(mask: Mask | None) -> ListedBlocks | None:
    """Return the factor of a mask that lists single keys for all heads of a request; None if none does."""
    for factor in () if mask is None else factors(mask):
        if isinstance(factor, ListedBlocks) and factor.block_kv == 1 and factor.counts.shape[1] == 1:
            return factor
    return None


def capped_scores(
    queries: TileQueries,
    chunk: Chunk,
    key_positions: Int[Array, " keys"],
    static_k: Array,
    inputs: RegionInputs,
) -> tuple[Float[Array, "kv_heads group tile_q keys"], Bool[Array, "_ _ tile_q keys"]]:
    """Return the soft-capped scores of a chunk of keys, and which of them are visible."""
    spec, matmul_dtype, acc_dtype = inputs.spec, queries.q.dtype, static_k.dtype
    s = jnp.einsum(
        "hgqd,khd->hgqk",
        queries.q,
        chunk.k.astype(matmul_dtype),
        preferred_element_type=acc_dtype,
        precision=PRECISION[matmul_dtype.itemsize],
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
    if inputs.mask is not None:
        pairs = pairs_of(spec, queries.row, queries.positions, key_positions, is_prefill=queries.is_prefill)
        visible &= inputs.mask.visible(pairs)
    return s, visible


def is_visible(
    spec: AttentionSpec, query_positions: Int[Array, " tile_q"], key_positions: Int[Array, " keys"]
) -> Bool[Array, "1 1 tile_q keys"]:
    """Return which keys are visible to each query by the spec's window, chunk size and causality."""
    ahead = key_positions[None, :] - query_positions[:, None]  # distance of the key from the query
    left, right = spec.window or (None, None)
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    visible = jnp.ones(ahead.shape, bool)
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    if spec.chunk_size is not None:
        key_chunks, query_chunks = key_positions // spec.chunk_size, query_positions // spec.chunk_size
        visible &= key_chunks[None, :] == query_chunks[:, None]
    return visible[None, None]


def pairs_of(
    spec: AttentionSpec,
    row: Int[Array, ""],
    query_positions: Int[Array, " tile_q"],
    key_positions: Int[Array, " keys"],
    *,
    is_prefill: bool,
) -> Pairs:
    """Return all pairs of a tile and a chunk: [kv_heads, group, tile_q, keys]."""
    heads = jnp.arange(spec.num_q_heads, dtype=jnp.int32)
    return Pairs(
        head=heads.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head, 1, 1),
        row=row.reshape(1, 1, 1, 1),
        query=query_positions[None, None, :, None],
        key=key_positions[None, None, None, :],
        num_heads=(spec.num_q_heads, spec.num_kv_heads),
        is_prefill=is_prefill,
    )


def tile_alibi_bias(
    queries: TileQueries, key_positions: Int[Array, " keys"], inputs: RegionInputs, dtype: np.dtype
) -> Float[Array, "kv_heads group tile_q keys"]:
    """Return the ALiBi bias of a layer with slopes, which is added to soft-capped scores."""
    assert inputs.alibi_slopes is not None
    slopes = inputs.alibi_slopes.astype(dtype).reshape(inputs.spec.num_kv_heads, -1)
    return alibi_bias(inputs.spec, slopes, queries.positions, key_positions)


def alibi_bias(
    spec: AttentionSpec, slopes: Float[Array, "kv_heads group"], query_positions: Array, key_positions: Array
) -> Float[Array, "kv_heads group tile_q keys"]:
    """Return the ALiBi bias `slope * (key - query)`, or `-slope * sqrt(query - key)`, 0 for later keys."""
    distance = (query_positions[:, None] - key_positions[None, :]).astype(slopes.dtype)
    distance = jnp.sqrt(jnp.maximum(distance, 0.0)) if spec.sqrt_alibi else distance
    return -slopes[..., None, None] * distance[None, None]


def add_chunk(
    state: Softmax,
    s: Float[Array, "kv_heads group tile_q keys"],
    chunk: Chunk,
    is_visible_key: Bool[Array, "heads keys"],
    matmul_dtype: np.dtype,
) -> Softmax:
    """Update the state with a chunk; values of keys that no query attends to may be NaN and count as 0."""
    row_max = jnp.maximum(state.row_max, s.max(axis=-1))
    finite_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    p = jnp.exp(s - finite_max[..., None])
    alpha = jnp.exp(state.row_max - finite_max)
    row_sum = state.row_sum * alpha + p.sum(axis=-1)
    if chunk.v_scale is not None:
        v_scale = jnp.where(is_visible_key, chunk.v_scale.astype(p.dtype), 0.0)
        p = p * v_scale[:, None, None, :]
        # A small probability times a small scale underflows in float16.
        matmul_dtype = p.dtype if matmul_dtype == jnp.float16 else matmul_dtype
    v = jnp.where(is_visible_key.T[..., None], chunk.v.astype(matmul_dtype), jnp.zeros((), matmul_dtype))
    values = jnp.einsum(
        "hgqk,khd->hgqd",
        p.astype(matmul_dtype),
        v,
        preferred_element_type=p.dtype,
        precision=PRECISION[matmul_dtype.itemsize],
    )
    return Softmax(row_max, row_sum, state.acc * alpha[..., None] + values)


def has_no_keys(kv: PagedCache | PackedKV, metadata: BatchMetadata) -> bool:
    """Return whether the shapes allow no key at all, so that no chunk can be read."""
    return 0 in kv.k.shape or (isinstance(kv, PagedCache) and metadata.block_table.shape[1] == 0)


def chunk_size(kv: PagedCache | PackedKV) -> int:
    """Return the number of keys per chunk: full blocks that hold at least CHUNK keys."""
    return CHUNK if isinstance(kv, PackedKV) else -(-CHUNK // kv.block_size) * kv.block_size


def load_chunk(
    kv: PagedCache | PackedKV, block_table: Int32[Array, "reqs max_blocks"], row: Array, c: Array
) -> Chunk:
    """Load keys and values of a row's chunk c; undefined past the row's end."""
    if isinstance(kv, PackedKV):
        return load_tokens(kv, block_table, row, c * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32))
    blocks = chunk_size(kv) // kv.block_size
    columns = jnp.minimum(c * blocks + jnp.arange(blocks, dtype=jnp.int32), block_table.shape[1] - 1)
    ids = block_table[row, columns]
    k, v = take_blocks(kv, ids)
    scales: list[Array | None] = []
    for scale in (kv.stored_k_scale, kv.stored_v_scale):
        if scale is not None and has_token_axis(scale):
            by_head = jnp.swapaxes(jnp.take(scale, ids, axis=0, mode="clip"), 0, 1)
            scales.append(by_head.reshape(kv.num_kv_heads, -1))
        else:
            scales.append(None)
    return Chunk(k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), *scales)


def load_tokens(
    kv: PagedCache | PackedKV,
    block_table: Int32[Array, "reqs max_blocks"],
    row: Array,
    positions: Int32[Array, " keys"],
) -> Chunk:
    """Load keys and values at any positions of a row; undefined past the row's end."""
    if isinstance(kv, PackedKV):
        index = kv.kv_start_loc[row] + positions
        k, v = (jnp.take(array, index, axis=0, mode="clip") for array in (kv.k, kv.v))
        return Chunk(k, v, None, None)
    columns = jnp.minimum(positions // kv.block_size, block_table.shape[1] - 1)
    blocks, offsets = block_table[row, columns], positions % kv.block_size
    k, v = take_tokens(kv, blocks, offsets)
    k_scale, v_scale = (
        jnp.asarray(scale)[blocks, :, offsets].T if scale is not None and has_token_axis(scale) else None
        for scale in (kv.stored_k_scale, kv.stored_v_scale)
    )
    return Chunk(k, v, k_scale, v_scale)


def static_scales(
    kv: PagedCache | PackedKV, dtype: np.dtype
) -> tuple[Float[Array, "k_heads 1 1 1"], Float[Array, "v_heads 1 1 channels"]]:
    """Return static k_scale and v_scale, broadcastable against [kv_heads, group, tile_q, x]; 1 if none."""
    k_scale = v_scale = jnp.ones((1, 1, 1, 1), dtype)
    if isinstance(kv, PagedCache):
        k_stored, v_stored = kv.stored_k_scale, kv.stored_v_scale
        if k_stored is not None and not has_token_axis(k_stored):
            k_scale = jnp.asarray(k_stored, dtype).reshape(*(jnp.shape(k_stored)[:1] or (1,)), 1, 1, -1)
        if v_stored is not None and not has_token_axis(v_stored):
            v_scale = jnp.asarray(v_stored, dtype).reshape(*(jnp.shape(v_stored)[:1] or (1,)), 1, 1, -1)
    return k_scale, v_scale


def prefill_tiles(metadata: BatchMetadata, tile_q: int | None = None) -> QueryTiles:
    """Split the prefill region into query tiles; the bucket bounds their number.

    Args:
        metadata: Metadata of the step.
        tile_q: Tokens per tile; None uses TILE_Q, or fewer if the region is smaller.
    """
    bucket = metadata.bucket
    if tile_q is None:
        tile_q = min(TILE_Q, -(-max(bucket.max_prefill_tokens, 1) // 8) * 8)
    bound = min(bucket.max_prefill_tokens // tile_q + bucket.max_prefills, bucket.max_prefill_tokens)
    lens = metadata.query_lens[bucket.max_decodes :]
    tiles_of_row = -(-lens // tile_q)
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    tile = jnp.arange(bound, dtype=jnp.int32)
    # The default method is a loop, which would compile as several fusions.
    prefill_row = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    prefill_row = jnp.minimum(prefill_row, max(bucket.max_prefills - 1, 0))
    index = tile - (ends - tiles_of_row)[prefill_row]
    row = bucket.max_decodes + prefill_row
    starts = metadata.row_starts[row] - bucket.max_decode_tokens + index * tile_q
    remaining = lens[prefill_row] - index * tile_q
    return QueryTiles(
        rows=row,
        starts=starts.astype(jnp.int32),
        lens=jnp.where(tile < ends[-1], jnp.clip(remaining, 0, tile_q), 0).astype(jnp.int32),
        tile_q=tile_q,
    )


def group_tiles(x: Shaped[Array, "tiles ..."], size: int, fill: int = 0) -> Shaped[Array, "groups size ..."]:
    """Group per-tile values by `size`, padding the last group with `fill`."""
    ends = [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, ends, constant_values=fill).reshape(-1, size, *x.shape[1:])


def match_varying_axes[Tree](like: Float[Array, "..."], tree: Tree) -> Tree:
    """Make each float array of `tree` vary over every device axis that `like` varies over.

    Adds the sum of an empty slice of `like`, which is 0 and which XLA removes. No gradient flows to `like`.
    """
    zero = jax.lax.stop_gradient(like).reshape(-1)[:0].sum()
    return jax.tree.map(lambda array: array + zero.astype(array.dtype), tree)
