"""Gradients of attention over packed keys in plain XLA, by query tiles over the chunks visible to them.

Scores are recomputed, so memory is linear in tokens. The chunks' contributions to the gradients of keys and
values are added one after the other, so that results are bit-identical between runs.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV
from jattn.implementations.xla.kv_chunks import chunk_size, has_no_keys, load_chunk, static_scales
from jattn.implementations.xla.online_softmax import precision
from jattn.implementations.xla.query_tiles import group_tiles, prefill_tiles
from jattn.implementations.xla.scores import alibi_bias
from jattn.implementations.xla.tile_attention import (
    Problem,
    Queries,
    biased,
    capped_scores,
    chunk_range,
    match_varying_axes,
    queries_of,
)
from jattn.spec import AttentionSpec

QUERIES_AT_ONCE = 512  # in tiles that are worked on together, at least one
NO_TOKEN = 0.0, 0.0, math.inf, 0.0  # Tokens' numbers that fill a tile: another request's might be NaN


class Tokens(NamedTuple):
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


class Parts(NamedTuple):
    """Contribution of a tile and a chunk of keys to the gradients."""

    query: Float[Array, "tile_q q_heads head_dim"]
    k: Float[Array, "keys kv_heads head_dim"]
    v: Float[Array, "keys kv_heads head_dim"]
    alibi_slopes: Float[Array, "kv_heads group"]


def parts_at(queries: Queries, tokens: Tokens, c: Int[Array, ""], problem: Problem) -> Parts:
    """Return the contribution of a tile and chunk c of its request's keys.

    Args:
        queries: Queries of the tile.
        tokens: Per-query inputs of the backward pass.
        c: Index of the chunk.
        problem: Arguments of the forward pass.
    """
    multiplied, summed = queries.q.dtype, tokens.lse.dtype
    chunk = load_chunk(problem.kv, problem.metadata.block_table, queries.row, c)
    keys = c * chunk.k.shape[0] + jnp.arange(chunk.k.shape[0], dtype=jnp.int32)
    static_k, _ = static_scales(problem.kv, summed)
    capped, visible = capped_scores(queries, chunk, keys, static_k, problem)
    is_seen = visible.any(axis=(1, 2)).T[..., None]  # of each kv head: what nobody sees may be NaN
    k, v = (jnp.where(is_seen, x, jnp.zeros((), x.dtype)).astype(multiplied) for x in (chunk.k, chunk.v))
    grad_out, lse, delta = (_by_head(x, problem.spec) for x in tokens[1:])
    grad_out = grad_out.astype(multiplied)
    product = functools.partial(jnp.einsum, preferred_element_type=summed, precision=precision(multiplied))
    s = jnp.where(visible, biased(capped, queries, keys, problem), -jnp.inf)
    p = jnp.exp(s - lse[..., None])
    dp = product("hgqd,khd->hgqk", grad_out, v)
    ds = jnp.where(visible, p * (dp - delta[..., None]), 0.0)
    slopes = _of_slopes(ds, queries, keys, problem)
    ds = _before_cap(ds, capped, visible, problem.spec) * problem.spec.softmax_scale
    ds, p = ds.astype(multiplied), p.astype(multiplied)
    dq = product("hgqk,khd->qhgd", ds, k)
    dk, dv = product("hgqk,hgqd->khd", ds, queries.q), product("hgqk,hgqd->khd", p, grad_out)
    # Keys past the request's end belong to another request: a NaN query would give them 0 * NaN.
    dk, dv = (jnp.where(is_seen, x, 0.0) for x in (dk, dv))
    return Parts(
        query=dq.reshape(dq.shape[0], -1, dq.shape[-1]),
        k=dk,
        v=dv,
        alibi_slopes=slopes,
    )


def _by_head(x: Float[Array, "tile_q q_heads *rest"], spec: AttentionSpec) -> Array:
    """Reshape to [kv_heads, group, tile_q, *rest]."""
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head
    return jnp.moveaxis(x.reshape(x.shape[0], *heads, *x.shape[2:]), 0, 2)


def _of_slopes(ds: Array, queries: Queries, keys: Array, problem: Problem) -> Float[Array, "kv_heads group"]:
    """Return the gradient of the ALiBi slopes from the gradient of the scores."""
    if problem.alibi_slopes is None:
        return jnp.zeros(ds.shape[:2], ds.dtype)
    of_one = alibi_bias(problem.spec, jnp.ones((1, 1), ds.dtype), queries.positions, keys)
    return jnp.sum(ds * of_one, axis=(2, 3))


def _before_cap(ds: Array, capped: Array, visible: Bool[Array, "..."], spec: AttentionSpec) -> Array:
    """Return the gradient of scores before the soft cap from that after it."""
    if spec.soft_cap is None:
        return ds
    return jnp.where(visible, ds * (1.0 - jnp.square(capped / spec.soft_cap)), 0.0)


class Saved(NamedTuple):
    """Results of the forward pass and their gradients.

    Attributes:
        out: Output.
        lse: Log-sum-exp.
        grad_out: Gradient of the output.
        grad_lse: Gradient of the log-sum-exp; None is 0.
    """

    out: Float[Array, "tokens q_heads head_dim"]
    lse: Float[Array, "q_heads tokens"]
    grad_out: Float[Array, "tokens q_heads head_dim"]
    grad_lse: Float[Array, "q_heads tokens"] | None


class Gradients(NamedTuple):
    """Gradients of the differentiable arguments of attention; None for absent arguments."""

    query: Array
    k: Array
    v: Array
    sinks: Array | None
    alibi_slopes: Array | None


class Tiles(NamedTuple):
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


class Sums(NamedTuple):
    """Gradient accumulators in f32 or f64; keys and values are padded by one chunk."""

    k: Float[Array, "kv_room kv_heads head_dim"]
    v: Float[Array, "kv_room kv_heads head_dim"]
    alibi_slopes: Float[Array, "kv_heads group"]


def gradients(query: Float[Array, "tokens q_heads head_dim"], problem: Problem, saved: Saved) -> Gradients:
    """Compute the gradients of `attend` over PackedKV.

    Args:
        query: Queries of the step.
        problem: Other arguments of the forward pass; keys and values of 16 bits or more.
        saved: Results of the forward pass and their gradients.
    """
    kv, metadata, sinks = problem.kv, problem.metadata, problem.sinks
    assert isinstance(kv, PackedKV)
    if metadata.bucket.max_tokens == 0 or has_no_keys(kv, metadata):
        return jax.tree.map(jnp.zeros_like, Gradients(query, kv.k, kv.v, sinks, problem.alibi_slopes))
    summed = jnp.dtype(jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    tokens = _tokens(query, saved, metadata, summed)
    room = (kv.k.shape[0] + chunk_size(kv), *kv.k.shape[1:])
    spec = problem.spec
    nothing = jnp.zeros(room, summed), jnp.zeros(room, summed)
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head
    sums = match_varying_axes(query, Sums(*nothing, jnp.zeros(heads, summed)))
    grad_query = jnp.zeros_like(query)
    for tiles, is_prefill in _regions(metadata):
        of_group = functools.partial(_add_group, tokens=tokens, problem=problem, is_prefill=is_prefill)
        sums, grads = jax.lax.scan(of_group, sums, tiles)
        grad_query = grad_query.at[tiles.tokens].set(grads, mode="drop")
    k, v = (x[: kv.k.shape[0]] for x in (sums.k, sums.v))
    slopes = problem.alibi_slopes
    return Gradients(
        query=grad_query,
        k=k.astype(kv.k.dtype),
        v=v.astype(kv.v.dtype),
        sinks=None if sinks is None else _of_sinks(sinks, tokens),
        alibi_slopes=None if slopes is None else sums.alibi_slopes.reshape(-1).astype(slopes.dtype),
    )


def _tokens(query: Array, saved: Saved, metadata: BatchMetadata, summed: Any) -> Tokens:
    """Return the per-query inputs, cleared for padding and for rows without keys, which may hold NaN."""
    lse = saved.lse.T.astype(summed)
    is_real = metadata.is_valid_token[:, None] & ~jnp.isneginf(lse)
    clear = lambda x: jnp.where(is_real[..., None], x, jnp.zeros((), x.dtype))
    grad_out, out = clear(saved.grad_out), clear(saved.out)
    delta = jnp.sum(grad_out.astype(summed) * out.astype(summed), axis=-1)
    if saved.grad_lse is not None:
        delta -= jnp.where(is_real, saved.grad_lse.T.astype(summed), 0.0)
    return Tokens(clear(query), grad_out, jnp.where(is_real, lse, jnp.inf), delta)


def gradient_of_sinks(
    sinks: Float[Array, " q_heads"], saved: Saved, metadata: BatchMetadata
) -> Float[Array, " q_heads"]:
    """Compute the gradient of the sinks alone, if a kernel computes the other gradients."""
    return _of_sinks(sinks, _tokens(saved.out, saved, metadata, jnp.float32))


def _of_sinks(sinks: Float[Array, " q_heads"], tokens: Tokens) -> Float[Array, " q_heads"]:
    """Return the gradient of the sinks: minus the sum of probability times delta."""
    share = jnp.exp(sinks.astype(tokens.lse.dtype)[None] - tokens.lse)
    return -jnp.sum(share * tokens.delta, axis=0).astype(sinks.dtype)


def _regions(metadata: BatchMetadata) -> list[tuple[Tiles, bool]]:
    """Return the grouped tiles of each region, and whether it is the prefill region."""
    bucket, found = metadata.bucket, []
    if bucket.max_decodes:
        index = jnp.arange(bucket.max_decode_tokens, dtype=jnp.int32).reshape(bucket.max_decodes, -1)
        lens = metadata.query_lens[: bucket.max_decodes]
        rows = jnp.arange(bucket.max_decodes, dtype=jnp.int32)
        firsts = metadata.num_computed_tokens[: bucket.max_decodes]
        found.append((Tiles(index, rows, firsts, lens), False))
    if bucket.max_prefill_tokens:
        cut = prefill_tiles(metadata)
        index = cut.token_index(past_end=bucket.max_prefill_tokens) + bucket.max_decode_tokens
        found.append((Tiles(index, cut.rows, cut.first_positions(metadata), cut.lens), True))
    return [(_grouped(tiles, past_end=bucket.max_tokens), is_prefill) for tiles, is_prefill in found]


def _grouped(tiles: Tiles, past_end: int) -> Tiles:
    """Group tiles by QUERIES_AT_ONCE queries, padding the last group with unused tiles."""
    count, tile_q = tiles.tokens.shape
    size = min(max(QUERIES_AT_ONCE // tile_q, 1), count)
    return Tiles(group_tiles(tiles.tokens, size, past_end), *(group_tiles(x, size) for x in tiles[1:]))


def _add_group(
    sums: Sums, tiles: Tiles, *, tokens: Tokens, problem: Problem, is_prefill: bool
) -> tuple[Sums, Float[Array, "tiles tile_q q_heads head_dim"]]:
    """Add a group's contributions to the accumulators and return the gradient of its queries."""
    kv = problem.kv
    assert isinstance(kv, PackedKV)
    size, num_tiles = chunk_size(kv), tiles.rows.shape[0]
    of_tiles = Tokens(
        *(
            jnp.take(x, tiles.tokens, axis=0, mode="fill", fill_value=nothing)
            for x, nothing in zip(tokens, NO_TOKEN, strict=True)
        )
    )

    def queries(tile: Tiles, q: Array) -> Queries:
        how: Any = {"problem": problem, "is_prefill": is_prefill}
        return queries_of(q, tile.rows, tile.firsts, tile.lens, **how)[0]

    def parts_of(tile: Tiles, of_tile: Tokens, chunk: Array) -> Parts:
        return parts_at(queries(tile, of_tile.query), of_tile, chunk, problem)

    reach = lambda tile, q: chunk_range(queries(tile, q), problem, size)
    low, high = jax.vmap(reach)(tiles, of_tiles.query)

    def step(nth: Array, state: tuple[Sums, Array]) -> tuple[Sums, Array]:
        (sum_k, sum_v, sum_slopes), dq = state
        chunk = low + nth
        parts = jax.vmap(parts_of)(
            tiles._replace(lens=jnp.where(chunk < high, tiles.lens, 0)), of_tiles, chunk
        )
        starts = kv.kv_start_loc[tiles.rows] + chunk * size

        def add(tile: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
            place, k, v = starts[tile], both[0], both[1]
            plus = lambda x, part: jax.lax.dynamic_update_slice_in_dim(
                x, jax.lax.dynamic_slice_in_dim(x, place, size) + part[tile], place, axis=0
            )
            return plus(k, parts.k), plus(v, parts.v)

        sum_k, sum_v = jax.lax.fori_loop(0, num_tiles, add, (sum_k, sum_v))
        return Sums(sum_k, sum_v, sum_slopes + parts.alibi_slopes.sum(axis=0)), dq + parts.query

    dq = match_varying_axes(tokens.query, jnp.zeros(of_tiles.query.shape, tokens.lse.dtype))
    sums, dq = jax.lax.fori_loop(0, jnp.max(high - low), step, (sums, dq))
    return sums, dq.astype(tokens.query.dtype)
