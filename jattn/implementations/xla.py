"""Attention in plain XLA, on any machine: exact, over chunks of keys with an online softmax.

Queries are cut into tiles of one request each; a tile walks over the chunks that it can see. Only a few tiles
are worked on at a time, so memory grows neither with the number of requests nor with their length. Loop
bounds are traced, so there is no reverse-mode derivative: differentiate the reference.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jattn.cache import PackedKV, PagedCache, blocks_of, has_token_axis
from jattn.implementations.tiles import TILE_Q, QueryTiles, prefill_tiles
from jattn.masks import Mask, Pairs
from jattn.metadata.batch import BatchMetadata
from jattn.quantize import quantize_token_head
from jattn.spec import QUERY_DTYPES, AttentionSpec

CHUNK = 128  # keys of a step of the loop, rounded up to whole blocks
TILES_AT_ONCE = (
    64  # decode rows worked on together; prefill tiles: as many as hold this many queries, at least 1
)
PREFILL_QUERIES_AT_ONCE = 512


class Chunk(NamedTuple):
    """Some keys and values of one request, with the scales that they still lack."""

    k: Shaped[Array, "keys kv_heads head_dim"]
    v: Shaped[Array, "keys kv_heads head_dim"]
    k_scale: Float[Array, "kv_heads keys"] | None
    v_scale: Float[Array, "kv_heads keys"] | None


class Softmax(NamedTuple):
    """A softmax under way: largest score, sum of exponentials, weighted sum of values; all f32 or f64."""

    top: Float[Array, "kv_heads group tile_q"]
    total: Float[Array, "kv_heads group tile_q"]
    acc: Float[Array, "kv_heads group tile_q head_dim"]


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    tiles: QueryTiles | None,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Output and log-sum-exp of every token, as `jattn.attend` defines them.

    Args:
        query: The step's queries.
        kv: Where keys and values are.
        metadata: The step's metadata.
        spec: The layer.
        tiles: The prefill region's tiles, made once a step; None = made here.
        mask: Which keys a query sees of those that the spec's numbers let it see; None = all.
        sinks: One more score per head.
        alibi_slopes: Slope per head.
    """
    bucket = metadata.bucket
    if bucket.max_tokens == 0 or _holds_nothing(kv, metadata):
        return jnp.zeros_like(query), jnp.full((spec.num_q_heads, query.shape[0]), -jnp.inf, jnp.float32)
    tile = functools.partial(
        _attend_tile, kv=kv, metadata=metadata, spec=spec, mask=mask, sinks=sinks, alibi_slopes=alibi_slopes
    )
    outs, lses = [], []
    if bucket.max_decodes:
        q = query[: bucket.max_decode_tokens].reshape(
            bucket.max_decodes, bucket.decode_query_len, *query.shape[1:]
        )
        rows = jnp.arange(bucket.max_decodes, dtype=jnp.int32)
        decode = functools.partial(tile, is_prefill=False)
        firsts = metadata.num_computed_tokens[: bucket.max_decodes]
        lens = metadata.query_lens[: bucket.max_decodes]
        out, lse = _map_tiles(decode, (q, rows, firsts, lens), 1 if spec.batch_invariant else TILES_AT_ONCE)
        outs.append(out.reshape(bucket.max_decode_tokens, *query.shape[1:]))
        lses.append(lse.reshape(bucket.max_decode_tokens, -1))
    if bucket.max_prefill_tokens:
        if spec.batch_invariant:  # tiles of one size whatever the bucket, one at a time
            tiles = prefill_tiles(metadata, TILE_Q)
        tiles = prefill_tiles(metadata) if tiles is None else tiles
        q = query[bucket.max_decode_tokens :]
        index = tiles.token_index(past_end=bucket.max_prefill_tokens)  # [tiles, tile_q]
        q_tiles = jnp.take(q, index, axis=0, mode="clip")
        at_once = 1 if spec.batch_invariant else max(PREFILL_QUERIES_AT_ONCE // tiles.tile_q, 1)
        prefill = functools.partial(tile, is_prefill=True)
        firsts = tiles.first_positions(metadata)
        out, lse = _map_tiles(prefill, (q_tiles, tiles.rows, firsts, tiles.lens), at_once)
        outs.append(jnp.zeros_like(q).at[index].set(out, mode="drop"))
        lses.append(jnp.full(q.shape[:2], -jnp.inf, lse.dtype).at[index].set(lse, mode="drop"))
    return jnp.concatenate(outs), jnp.concatenate(lses).T.astype(jnp.float32)


def _holds_nothing(kv: PagedCache | PackedKV, metadata: BatchMetadata) -> bool:
    """Whether there is no key at all, by the shapes: then no chunk can be read, and no row sees one."""
    return 0 in kv.k.shape or (isinstance(kv, PagedCache) and metadata.block_table.shape[1] == 0)


def _map_tiles(tile, inputs: tuple[Array, ...], at_once: int) -> tuple[Array, Array]:  # type: ignore[no-untyped-def]
    if at_once == 1:
        return jax.lax.map(lambda xs: tile(*xs), inputs)
    if inputs[0].shape[0] <= at_once:
        return jax.vmap(tile)(*inputs)
    return jax.lax.map(lambda xs: tile(*xs), inputs, batch_size=at_once)


def _attend_tile(
    q: Float[Array, "tile_q q_heads head_dim"],
    row: Int[Array, ""],
    first_position: Int[Array, ""],
    num_queries: Int[Array, ""],
    *,
    is_prefill: bool,
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
) -> tuple[Float[Array, "tile_q q_heads head_dim"], Float[Array, "tile_q q_heads"]]:
    """The queries of one request at positions `first_position` onward, of which `num_queries` are live."""
    tile_q = q.shape[0]
    heads = (spec.num_kv_heads, spec.q_heads_per_kv_head)
    compute, accumulate = _dtypes(q, kv)
    query_dtype, q_scale = QUERY_DTYPES[spec.query_quantization], None
    q_grouped = q
    if query_dtype is not None:  # widened again: the products are exact in any 16-bit type
        q_grouped, q_scale = quantize_token_head(q, query_dtype)
        q_scale = jnp.moveaxis(q_scale.reshape(tile_q, *heads), 0, 2).astype(accumulate)
    q_grouped = jnp.moveaxis(q_grouped.reshape(tile_q, *heads, spec.head_dim).astype(compute), 0, 2)
    seq_len = jnp.where(num_queries > 0, metadata.seq_lens[row], 0)
    positions = first_position + jnp.arange(tile_q, dtype=jnp.int32)
    live = jnp.arange(tile_q, dtype=jnp.int32) < num_queries
    static_k, static_v = _static_scales(kv, accumulate)
    size = _chunk_size(kv)

    def step(c: Array, state: Softmax) -> Softmax:
        chunk = _load(kv, metadata, row, c)
        keys = c * size + jnp.arange(size, dtype=jnp.int32)
        s = jnp.einsum(
            "hgqd,khd->hgqk",
            q_grouped,
            chunk.k.astype(compute),
            preferred_element_type=accumulate,
            precision=_precision(compute),
        )
        s = s * (static_k * spec.softmax_scale)
        if q_scale is not None:
            s = s * q_scale[..., None]
        if chunk.k_scale is not None:
            s = s * chunk.k_scale[:, None, None, :].astype(accumulate)
        if spec.soft_cap is not None:
            s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
        real = (keys < seq_len)[None, :] & live[:, None]
        sees = _visible(spec, positions, keys) & real[None, None]
        if mask is not None:
            sees &= mask.sees(_pairs(spec, row, positions, keys, is_prefill))
        if alibi_slopes is not None:
            s = s + _alibi(spec, alibi_slopes.astype(accumulate).reshape(heads), positions, keys)
        return _accumulate(state, jnp.where(sees, s, -jnp.inf), chunk, sees.any(axis=(1, 2)), compute)

    low, high = _key_range(spec, first_position, positions[-1], seq_len)
    shape = (*heads, tile_q)
    state = Softmax(
        jnp.full(shape, -jnp.inf, accumulate),
        jnp.zeros(shape, accumulate),
        jnp.zeros((*shape, spec.head_dim), accumulate),
    )
    state = jax.lax.fori_loop(low // size, (high + size - 1) // size, step, state)
    if sinks is not None:
        row_sinks = jnp.where((seq_len > 0) & live, sinks.astype(accumulate).reshape(*heads, 1), -jnp.inf)
        state = _with_sink(state, row_sinks)
    out = state.acc * static_v / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    lse = jnp.where(state.total == 0, -jnp.inf, state.top + jnp.log(state.total))
    out, lse = jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(tile_q, spec.num_q_heads)


def _accumulate(
    state: Softmax,
    s: Float[Array, "kv_heads group tile_q keys"],
    chunk: Chunk,
    reachable: Bool[Array, "heads keys"],
    compute: np.dtype,
) -> Softmax:
    """One step of the online softmax. Keys that no query sees may be NaN: their values count as 0."""
    top = jnp.maximum(state.top, s.max(axis=-1))
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    p = jnp.exp(s - finite_top[..., None])
    shrink = jnp.exp(state.top - finite_top)
    total = state.total * shrink + p.sum(axis=-1)
    if chunk.v_scale is not None:
        v_scale = jnp.where(reachable, chunk.v_scale.astype(p.dtype), 0.0)
        p = p * v_scale[:, None, None, :]
        # float16 has no room for a small probability times a small scale.
        compute = p.dtype if compute == jnp.float16 else compute
    v = jnp.where(reachable.T[..., None], chunk.v.astype(compute), jnp.zeros((), compute))
    new = jnp.einsum(
        "hgqk,khd->hgqd", p.astype(compute), v, preferred_element_type=p.dtype, precision=_precision(compute)
    )
    return Softmax(top, total, state.acc * shrink[..., None] + new)


def _with_sink(state: Softmax, sinks: Float[Array, "kv_heads group tile_q"]) -> Softmax:
    top = jnp.maximum(state.top, sinks)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    shrink = jnp.exp(state.top - finite_top)
    total = state.total * shrink + jnp.exp(sinks - finite_top)
    return Softmax(top, total, state.acc * shrink[..., None])


def _visible(
    spec: AttentionSpec, positions: Int[Array, " tile_q"], keys: Int[Array, " keys"]
) -> Bool[Array, "1 1 tile_q keys"]:
    """Which keys each query sees by the spec's numbers."""
    ahead = keys[None, :] - positions[:, None]  # how far the key is ahead of the query
    left, right = spec.window or (None, None)
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    sees = jnp.ones(ahead.shape, bool)
    if left is not None:
        sees &= ahead >= -left
    if right is not None:
        sees &= ahead <= right
    if spec.chunk_size is not None:
        sees &= (keys // spec.chunk_size)[None, :] == (positions // spec.chunk_size)[:, None]
    return sees[None, None]


def _pairs(
    spec: AttentionSpec,
    row: Int[Array, ""],
    positions: Int[Array, " tile_q"],
    keys: Int[Array, " keys"],
    is_prefill: bool,
) -> Pairs:
    """Every head, query and key of a step of a tile: [kv_heads, group, tile_q, keys]."""
    heads = jnp.arange(spec.num_q_heads, dtype=jnp.int32)
    return Pairs(
        head=heads.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head, 1, 1),
        row=row.reshape(1, 1, 1, 1),
        query=positions[None, None, :, None],
        key=keys[None, None, None, :],
        num_heads=(spec.num_q_heads, spec.num_kv_heads),
        is_prefill=is_prefill,
    )


def _key_range(
    spec: AttentionSpec, first: Int[Array, ""], last: Int[Array, ""], seq_len: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First key that some query of a tile may see, and one past the last."""
    low, high = jnp.zeros_like(seq_len), seq_len
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
    return low, jnp.maximum(high, low)


def _alibi(
    spec: AttentionSpec, slopes: Float[Array, "kv_heads group"], positions: Array, keys: Array
) -> Float[Array, "kv_heads group tile_q keys"]:
    back = (positions[:, None] - keys[None, :]).astype(slopes.dtype)
    back = jnp.sqrt(jnp.maximum(back, 0.0)) if spec.sqrt_alibi else back
    return -slopes[..., None, None] * back[None, None]


def _chunk_size(kv: PagedCache | PackedKV) -> int:
    """Keys of a chunk: whole blocks, at least CHUNK keys."""
    return CHUNK if isinstance(kv, PackedKV) else -(-CHUNK // kv.block_size) * kv.block_size


def _load(kv: PagedCache | PackedKV, metadata: BatchMetadata, row: Array, c: Array) -> Chunk:
    """Keys and values of a row's chunk c. Past the row's end stands something, in range of the arrays."""
    if isinstance(kv, PackedKV):
        index = kv.kv_start_loc[row] + c * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        k, v = (jnp.take(array, index, axis=0, mode="clip") for array in (kv.k, kv.v))
        return Chunk(k, v, None, None)
    blocks = _chunk_size(kv) // kv.block_size
    columns = jnp.minimum(c * blocks + jnp.arange(blocks, dtype=jnp.int32), metadata.block_table.shape[1] - 1)
    ids = metadata.block_table[row, columns]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in blocks_of(kv, ids))
    scales = (
        jnp.swapaxes(jnp.take(scale, ids, axis=0, mode="clip"), 0, 1).reshape(kv.num_kv_heads, -1)
        if scale is not None and has_token_axis(scale)
        else None
        for scale in (kv.stored_k_scale, kv.stored_v_scale)
    )
    return Chunk(k, v, *scales)


def _static_scales(
    kv: PagedCache | PackedKV, dtype: np.dtype
) -> tuple[Float[Array, "k_heads 1 1 1"], Float[Array, "v_heads 1 1 channels"]]:
    """k_scale and v_scale where they do not depend on the token, against [kv_heads, group, tile_q, x]."""
    scales = (None, None) if isinstance(kv, PackedKV) else (kv.stored_k_scale, kv.stored_v_scale)
    k_scale, v_scale = (
        jnp.ones((1, 1, 1, 1), dtype)
        if scale is None or has_token_axis(scale)
        else jnp.asarray(scale, dtype).reshape(*(jnp.shape(scale)[:1] or (1,)), 1, 1, -1)
        for scale in scales
    )
    return k_scale, v_scale


def _dtypes(q: Array, kv: PagedCache | PackedKV) -> tuple[np.dtype, np.dtype]:
    """What products are made of (8-bit keys and values are widened) and what they are summed in."""
    fits = all(jnp.dtype(x.dtype).itemsize == 1 or x.dtype == q.dtype for x in (kv.k, kv.v))
    compute = jnp.dtype(q.dtype if fits else jnp.float32)
    accumulate = jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    return (accumulate, accumulate) if accumulate.itemsize == 8 else (compute, accumulate)


def _precision(compute: np.dtype) -> str | None:
    """Full f32 products where the data are f32 (a GPU would use TF32)."""
    return None if jnp.dtype(compute).itemsize == 2 else "highest"
