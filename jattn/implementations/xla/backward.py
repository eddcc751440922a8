"""Gradients of attention over packed keys in plain XLA, by query tiles over the chunks visible to them.

Scores are recomputed, so memory is linear in tokens. The chunks' contributions to the gradients of keys and
values are added one after the other, so that results are bit-identical between runs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from jattn.implementations.xla.attention import (
    PRECISION,
    TileQueries,
    alibi_bias,
    capped_scores,
    chunk_range,
    chunk_size,
    group_tiles,
    has_no_keys,
    load_chunk,
    make_tile_queries,
    match_varying_axes,
    pairs_of,
    prefill_tiles,
    static_scales,
    tile_alibi_bias,
)
from jattn.score_mod import visible_pairs
from jattn.spec import AttentionSpec

QUERIES_AT_ONCE = 512  # queries per group of tiles, which has at least one tile
# Values of BackwardQueries for unused entries of a tile; the values of another request might be NaN.
UNUSED_QUERY = 0.0, 0.0, math.inf, 0.0


class BackwardQueries(NamedTuple):
    """Per-query inputs of the backward pass.

    Attributes:
        query: Queries; 0 for a query without visible keys.
        grad_out: Gradient of the output; 0 for a query without visible keys.
        lse: Log-sum-exp; +inf for a query without visible keys, so that its probabilities are 0.
        delta: Row sum of out * grad_out minus the gradient of lse, subtracted from dp.
    """

    query: Float[Array, "*tokens q_heads head_dim"]
    grad_out: Float[Array, "*tokens q_heads head_dim"]
    lse: Float[Array, "*tokens q_heads"]
    delta: Float[Array, "*tokens q_heads"]


class TileGradients(NamedTuple):
    """Contribution of a query tile and a chunk of keys to the gradients."""

    query: Float[Array, "tile_q q_heads head_dim"]
    k: Float[Array, "keys kv_heads head_dim"]
    v: Float[Array, "keys kv_heads head_dim"]
    alibi_slopes: Float[Array, "kv_heads group"]
    score_arrays: tuple[Array, ...]


def tile_gradients(
    queries: TileQueries, tokens: BackwardQueries, c: Int[Array, ""], inputs: RegionInputs
) -> TileGradients:
    """Return the contribution of a tile and chunk c of its request's keys.

    Args:
        queries: Queries of the tile.
        tokens: Per-query inputs of the backward pass.
        c: Index of the chunk.
        inputs: Inputs of the forward pass.
    """
    matmul_dtype, acc_dtype = queries.q.dtype, tokens.lse.dtype
    chunk = load_chunk(inputs.kv, inputs.metadata.block_table, queries.row, c)
    key_positions = c * chunk.k.shape[0] + jnp.arange(chunk.k.shape[0], dtype=jnp.int32)
    static_k, _ = static_scales(inputs.kv, acc_dtype)
    capped, visible = capped_scores(queries, chunk, key_positions, static_k, inputs)
    is_visible_key = visible.any(axis=(1, 2)).T[..., None]  # per KV head: an invisible key may be NaN
    k, v = (
        jnp.where(is_visible_key, x, jnp.zeros((), x.dtype)).astype(matmul_dtype) for x in (chunk.k, chunk.v)
    )
    grad_out, lse, delta = (_group_by_kv_head(x, inputs.spec) for x in tokens[1:])
    grad_out = grad_out.astype(matmul_dtype)
    matmul = functools.partial(
        jnp.einsum, preferred_element_type=acc_dtype, precision=PRECISION[matmul_dtype.itemsize]
    )
    s = capped
    if inputs.alibi_slopes is not None:
        s = s + tile_alibi_bias(queries, key_positions, inputs, s.dtype)
    s, modified_vjp = _modify_scores(s, visible, queries, key_positions, inputs)
    s = jnp.where(visible, s, -jnp.inf)
    p = jnp.exp(s - lse[..., None])
    dp = matmul("hgqd,khd->hgqk", grad_out, v)
    ds = jnp.where(visible, p * (dp - delta[..., None]), 0.0)
    ds, score_arrays = modified_vjp(ds)
    slopes = _slope_gradient(ds, queries, key_positions, inputs)
    ds = _gradient_before_cap(ds, capped, visible, inputs.spec) * inputs.spec.softmax_scale
    ds, p = ds.astype(matmul_dtype), p.astype(matmul_dtype)
    dq = matmul("hgqk,khd->qhgd", ds, k)
    dk, dv = matmul("hgqk,hgqd->khd", ds, queries.q), matmul("hgqk,hgqd->khd", p, grad_out)
    # Keys past the request's end belong to another request: a NaN query would give them 0 * NaN.
    dk, dv = (jnp.where(is_visible_key, x, 0.0) for x in (dk, dv))
    return TileGradients(
        query=dq.reshape(dq.shape[0], -1, dq.shape[-1]),
        k=dk,
        v=dv,
        alibi_slopes=slopes,
        score_arrays=score_arrays,
    )


def _modify_scores(
    s: Array, visible: Array, queries: TileQueries, key_positions: Array, inputs: RegionInputs
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """Apply the layer's score function, if any.

    Returns:
        The new scores, and the function from their gradient, which is 0 for invisible pairs, to that of the
        scores before and those of the score function's float arrays.
    """
    score_mod = inputs.score_mod
    if score_mod is None:
        return s, lambda ds: (ds, ())
    pairs = pairs_of(
        inputs.spec, queries.row, queries.positions, key_positions, is_prefill=queries.is_prefill
    )
    visible = jnp.broadcast_to(visible, s.shape)
    at_visible_pairs = visible_pairs(visible, pairs.row, pairs.head, pairs.query, pairs.key)

    def modify(s: Array, arrays: tuple[Array, ...]) -> Array:
        return score_mod.with_arrays(arrays, score_mod.other_arrays)(s, *at_visible_pairs)

    modified, vjp = jax.vjp(modify, jnp.where(visible, s, 0.0), score_mod.float_arrays)

    def gradients(ds: Array) -> tuple[Array, tuple[Array, ...]]:
        ds, arrays = vjp(ds.astype(modified.dtype))
        has_visible = visible.any()
        return jnp.where(visible, ds, 0.0), tuple(jnp.where(has_visible, x, 0) for x in arrays)

    return modified, gradients


def _group_by_kv_head(x: Float[Array, "tile_q q_heads *rest"], spec: AttentionSpec) -> Array:
    """Reshape to [kv_heads, group, tile_q, *rest]."""
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head
    return jnp.moveaxis(x.reshape(x.shape[0], *heads, *x.shape[2:]), 0, 2)


def _slope_gradient(
    ds: Array, queries: TileQueries, key_positions: Array, inputs: RegionInputs
) -> Float[Array, "kv_heads group"]:
    """Return the gradient of the ALiBi slopes from the gradient of the scores."""
    if inputs.alibi_slopes is None:
        return jnp.zeros(ds.shape[:2], ds.dtype)
    bias_per_slope = alibi_bias(inputs.spec, jnp.ones((1, 1), ds.dtype), queries.positions, key_positions)
    return jnp.sum(ds * bias_per_slope, axis=(2, 3))


def _gradient_before_cap(ds: Array, capped: Array, visible: Bool[Array, "..."], spec: AttentionSpec) -> Array:
    """Return the gradient of scores before the soft cap from that after it."""
    if spec.soft_cap is None:
        return ds
    return jnp.where(visible, ds * (1.0 - jnp.square(capped / spec.soft_cap)), 0.0)


class Gradients(NamedTuple):
    """Gradients of the differentiable arguments of attention; None for absent arguments."""

    query: Array
    k: Array
    v: Array
    sinks: Array | None
    alibi_slopes: Array | None
    score_arrays: tuple[Array, ...]


class BackwardTiles(NamedTuple):
    """Query tiles of a region, of one request each.

    Attributes:
        tokens: Token indices of each tile; past the last token for unused entries.
        rows: Row of the metadata per tile.
        firsts: Position of each tile's first query.
        lens: Number of queries per tile; 0 for an unused tile.
    """

    tokens: Int[Array, "*some tiles tile_q"]
    rows: Int[Array, "*some tiles"]
    firsts: Int[Array, "*some tiles"]
    lens: Int[Array, "*some tiles"]


class GradientSums(NamedTuple):
    """Gradient accumulators in f32 or f64; keys and values are padded by one chunk."""

    k: Float[Array, "kv_room kv_heads head_dim"]
    v: Float[Array, "kv_room kv_heads head_dim"]
    alibi_slopes: Float[Array, "kv_heads group"]
    score_arrays: tuple[Array, ...]


def gradients(inputs: RegionInputs, outputs: OutputGradients) -> Gradients:
    """Compute the gradients of `attend` over PackedKV.

    Args:
        inputs: Inputs of the forward pass; keys and values of 16 bits or more.
        outputs: Results of the forward pass and their gradients.
    """
    query, kv, metadata, sinks = inputs.query, inputs.kv, inputs.metadata, inputs.sinks
    assert isinstance(kv, PackedKV)
    score_arrays = () if inputs.score_mod is None else inputs.score_mod.float_arrays
    if metadata.bucket.max_tokens == 0 or has_no_keys(kv, metadata):
        arrays = Gradients(query, kv.k, kv.v, sinks, inputs.alibi_slopes, score_arrays)
        return jax.tree.map(jnp.zeros_like, arrays)
    acc_dtype = jnp.dtype(jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    tokens = _backward_queries(query, outputs, metadata, acc_dtype)
    room = (kv.k.shape[0] + chunk_size(kv), *kv.k.shape[1:])
    spec = inputs.spec
    zeros = jnp.zeros(room, acc_dtype), jnp.zeros(room, acc_dtype)
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head
    array_sums = tuple(jnp.zeros(x.shape, jnp.promote_types(x.dtype, acc_dtype)) for x in score_arrays)
    sums = match_varying_axes(query, GradientSums(*zeros, jnp.zeros(heads, acc_dtype), array_sums))
    grad_query = jnp.zeros_like(query)
    for tiles, is_prefill in _regions(metadata):
        add_group = functools.partial(_add_group, tokens=tokens, inputs=inputs, is_prefill=is_prefill)
        sums, grads = jax.lax.scan(add_group, sums, tiles)
        grad_query = grad_query.at[tiles.tokens].set(grads, mode="drop")
    k, v = (x[: kv.k.shape[0]] for x in (sums.k, sums.v))
    slopes = inputs.alibi_slopes
    return Gradients(
        query=grad_query,
        k=k.astype(kv.k.dtype),
        v=v.astype(kv.v.dtype),
        sinks=None if sinks is None else _sink_gradient(sinks, tokens),
        alibi_slopes=None if slopes is None else sums.alibi_slopes.reshape(-1).astype(slopes.dtype),
        score_arrays=tuple(
            x.astype(array.dtype) for x, array in zip(sums.score_arrays, score_arrays, strict=True)
        ),
    )


def _backward_queries(
    query: Array, outputs: OutputGradients, metadata: BatchMetadata, acc_dtype: Any
) -> BackwardQueries:
    """Return the per-query inputs, cleared for padding and for rows without keys, which may hold NaN."""
    lse = outputs.lse.T.astype(acc_dtype)
    is_valid = metadata.is_valid_token[:, None] & ~jnp.isneginf(lse)
    query, grad_out, out = (
        jnp.where(is_valid[..., None], x, jnp.zeros((), x.dtype))
        for x in (query, outputs.grad_out, outputs.out)
    )
    delta = jnp.sum(grad_out.astype(acc_dtype) * out.astype(acc_dtype), axis=-1)
    if outputs.grad_lse is not None:
        delta -= jnp.where(is_valid, outputs.grad_lse.T.astype(acc_dtype), 0.0)
    return BackwardQueries(query, grad_out, jnp.where(is_valid, lse, jnp.inf), delta)


def gradient_of_sinks(
    sinks: Float[Array, " q_heads"], outputs: OutputGradients, metadata: BatchMetadata
) -> Float[Array, " q_heads"]:
    """Compute the gradient of the sinks alone, if a kernel computes the other gradients."""
    return _sink_gradient(sinks, _backward_queries(outputs.out, outputs, metadata, jnp.float32))


def _sink_gradient(sinks: Float[Array, " q_heads"], tokens: BackwardQueries) -> Float[Array, " q_heads"]:
    """Return the gradient of the sinks: minus the sum of probability times delta."""
    probability = jnp.exp(sinks.astype(tokens.lse.dtype)[None] - tokens.lse)
    return -jnp.sum(probability * tokens.delta, axis=0).astype(sinks.dtype)


def _regions(metadata: BatchMetadata) -> list[tuple[BackwardTiles, bool]]:
    """Return the grouped tiles of each region, and whether it is the prefill region."""
    bucket, regions = metadata.bucket, []
    if bucket.max_decodes:
        index = jnp.arange(bucket.max_decode_tokens, dtype=jnp.int32).reshape(bucket.max_decodes, -1)
        lens = metadata.query_lens[: bucket.max_decodes]
        rows = jnp.arange(bucket.max_decodes, dtype=jnp.int32)
        firsts = metadata.num_computed_tokens[: bucket.max_decodes]
        regions.append((BackwardTiles(index, rows, firsts, lens), False))
    if bucket.max_prefill_tokens:
        query_tiles = prefill_tiles(metadata)
        index = query_tiles.token_index(past_end=bucket.max_prefill_tokens) + bucket.max_decode_tokens
        firsts = query_tiles.first_positions(metadata)
        regions.append((BackwardTiles(index, query_tiles.rows, firsts, query_tiles.lens), True))
    return [(_group_tiles(tiles, past_end=bucket.max_tokens), is_prefill) for tiles, is_prefill in regions]


def _group_tiles(tiles: BackwardTiles, past_end: int) -> BackwardTiles:
    """Group tiles by QUERIES_AT_ONCE queries, padding the last group with unused tiles."""
    count, tile_q = tiles.tokens.shape
    size = min(max(QUERIES_AT_ONCE // tile_q, 1), count)
    return BackwardTiles(
        group_tiles(tiles.tokens, size, past_end), *(group_tiles(x, size) for x in tiles[1:])
    )


def _add_group(
    sums: GradientSums,
    tiles: BackwardTiles,
    *,
    tokens: BackwardQueries,
    inputs: RegionInputs,
    is_prefill: bool,
) -> tuple[GradientSums, Float[Array, "tiles tile_q q_heads head_dim"]]:
    """Add a group's contributions to the accumulators and return the gradient of its queries."""
    kv = inputs.kv
    assert isinstance(kv, PackedKV)
    size, num_tiles = chunk_size(kv), tiles.rows.shape[0]
    tile_queries = BackwardQueries(
        *(
            jnp.take(x, tiles.tokens, axis=0, mode="fill", fill_value=fill_value)
            for x, fill_value in zip(tokens, UNUSED_QUERY, strict=True)
        )
    )

    def queries(tile: BackwardTiles, q: Array) -> TileQueries:
        return make_tile_queries(q, tile.rows, tile.firsts, tile.lens, inputs=inputs, is_prefill=is_prefill)[
            0
        ]

    def chunk_gradients(tile: BackwardTiles, tokens: BackwardQueries, chunk: Array) -> TileGradients:
        return tile_gradients(queries(tile, tokens.query), tokens, chunk, inputs)

    def visible_chunks(tile: BackwardTiles, q: Array) -> tuple[Array, Array]:
        return chunk_range(queries(tile, q), inputs, size)

    low, high = jax.vmap(visible_chunks)(tiles, tile_queries.query)

    def step(index: Array, state: tuple[GradientSums, Array]) -> tuple[GradientSums, Array]:
        (dk, dv, dslopes, darrays), dq = state
        chunk = low + index
        parts = jax.vmap(chunk_gradients)(
            tiles._replace(lens=jnp.where(chunk < high, tiles.lens, 0)), tile_queries, chunk
        )
        starts = kv.kv_start_loc[tiles.rows] + chunk * size

        def add_rows(x: Array, rows: Array, start: Array) -> Array:
            updated = jax.lax.dynamic_slice_in_dim(x, start, size) + rows
            return jax.lax.dynamic_update_slice_in_dim(x, updated, start, axis=0)

        def add(tile: Array, kv_sums: tuple[Array, Array]) -> tuple[Array, Array]:
            k, v = kv_sums
            return add_rows(k, parts.k[tile], starts[tile]), add_rows(v, parts.v[tile], starts[tile])

        dk, dv = jax.lax.fori_loop(0, num_tiles, add, (dk, dv))
        darrays = tuple(
            x + part.sum(axis=0, dtype=x.dtype) for x, part in zip(darrays, parts.score_arrays, strict=True)
        )
        return GradientSums(dk, dv, dslopes + parts.alibi_slopes.sum(axis=0), darrays), dq + parts.query

    dq = match_varying_axes(tokens.query, jnp.zeros(tile_queries.query.shape, tokens.lse.dtype))
    sums, dq = jax.lax.fori_loop(0, jnp.max(high - low), step, (sums, dq))
    return sums, dq.astype(tokens.query.dtype)
