"""Tile schedules: the lists of key tiles that a kernel processes under a mask, computed on the device."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jattn.masks import BatchSizes, Coverage, Mask, check_mask, tile_coverage
from jattn.masks.checks import require_array, require_heads, require_ints
from jattn.pytree import pytree, static
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_shape
from pallas_kernels.list_tiles import build_lists_by_sorting, encode_tiles


@pytree
class TileSchedule:
    """The key tiles that each head attends to from each query tile: PARTIAL tiles first, then FULL tiles.

    Attributes:
        kv_tiles: Indices of key tiles; tile i starts at key `i * tile_kv`. First num_partial PARTIAL tiles,
            in descending order, then num_full FULL tiles, in ascending order, then zeros.
        num_partial: Number of PARTIAL tiles, which need masking.
        num_full: Number of FULL tiles, which need no masking.
        order: All `query_tile * q_heads + head`, sorted by descending length of their lists.
        rows: Batch row of each query tile.
        first_query: Position of the first query of each query tile.
        num_queries: Number of queries of each query tile; 0 for unused tiles, whose lists are empty.
        tile_q: Static: number of queries per tile.
        tile_kv: Static: number of keys per tile.
    """

    kv_tiles: Int32[Array, "q_tiles q_heads max_kv_tiles"]
    num_partial: Int32[Array, "q_tiles q_heads"]
    num_full: Int32[Array, "q_tiles q_heads"]
    order: Int32[Array, " work_tiles"]
    rows: Int32[Array, " q_tiles"]
    first_query: Int32[Array, " q_tiles"]
    num_queries: Int32[Array, " q_tiles"]
    tile_q: int = static()
    tile_kv: int = static()


def schedule(
    mask: Mask,
    seq_lens: Int[Array, " reqs"],
    *,
    query_lens: Int[Array, " queries"] | None = None,
    max_query_len: int,
    max_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int | None = None,
    tile_q: int = 128,
    tile_kv: int = 128,
    is_prefill: bool = True,
) -> TileSchedule:
    """List the key tiles that each head attends to from each query tile. Runs inside jit, on the device.

    Args:
        mask: Complete mask; for causal attention `Causal() & ...`.
        seq_lens: Number of keys of each request.
        query_lens: Number of queries of each request, its last tokens; None = all tokens are queries.
        max_query_len: Static: maximum of query_lens.
        max_seq_len: Static: maximum of seq_lens; bounds the length of the lists.
        num_q_heads: Static: number of query heads on this device.
        num_kv_heads: Static: number of kv heads on this device; None = num_q_heads.
        tile_q: Static: number of queries per tile.
        tile_kv: Static: number of keys per tile.
        is_prefill: Static: whether the queries are in the prefill region.

    Returns:
        The schedule, with `ceil(max_query_len / tile_q)` query tiles per request, in order.

    Raises:
        ValueError: If a size is not positive; if the kv heads do not divide the query heads; if query_lens
            and seq_lens do not match or exceed their maximum; or if the mask does not fit the batch.
    """
    require_ints(1, max_query_len=max_query_len, max_seq_len=max_seq_len, tile_q=tile_q, tile_kv=tile_kv)
    require_heads(num_q_heads, num_kv_heads)
    query_lens = seq_lens if query_lens is None else query_lens
    _check_lens(seq_lens, query_lens, max_seq_len, max_query_len)
    check_mask(mask, BatchSizes(num_q_heads, seq_lens.shape[0], max_query_len, max_seq_len), causal=False)
    tiles = _make_query_tiles(seq_lens, query_lens, -(-max_query_len // tile_q), tile_q)
    coverage = tile_coverage(
        mask,
        **tiles._asdict(),
        num_heads=(num_q_heads, num_kv_heads or num_q_heads),
        size=(tile_q, tile_kv),
        max_kv_tiles=-(-max_seq_len // tile_kv),
        is_prefill=is_prefill,
    )
    return _make_schedule(coverage, tiles, tile_q, tile_kv)


def _check_lens(seq_lens: Any, query_lens: Any, max_seq_len: int, max_query_len: int) -> None:
    """Raise ValueError unless the lengths match and, if they are concrete, do not exceed their maximum.

    The schedule has no tiles beyond the maximum: keys and queries would be dropped silently.
    """
    for name, lens in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        require_array(name, lens, "integer", {1: "[reqs]"})
    require_shape("query_lens", query_lens.shape, seq_lens.shape, "one entry per request")
    if not architectures.is_concrete(seq_lens, query_lens):
        return
    keys, queries = np.asarray(seq_lens), np.asarray(query_lens)
    is_valid = bool(((queries >= 0) & (queries <= keys)).all())
    require(is_valid, "query_lens", f"be at least 0 and at most seq_lens {keys.tolist()}", queries.tolist())
    for name, lens, max_len in (("seq_lens", keys, max_seq_len), ("query_lens", queries, max_query_len)):
        rule = f"be at most max_{name[:-1]} ({max_len})"
        require(int(lens.max(initial=0)) <= max_len, name, rule, lens.tolist())


class _QueryTiles(NamedTuple):
    """The query tiles of all requests: batch row, first query, number of queries, and keys of the request."""

    rows: Int32[Array, " q_tiles"]
    first_query: Int32[Array, " q_tiles"]
    num_queries: Int32[Array, " q_tiles"]
    seq_lens: Int32[Array, " q_tiles"]


def _make_query_tiles(seq_lens: Array, query_lens: Array, tiles_per_req: int, tile_q: int) -> _QueryTiles:
    rows = jnp.repeat(jnp.arange(seq_lens.shape[0], dtype=jnp.int32), tiles_per_req)
    offset = jnp.tile(jnp.arange(tiles_per_req, dtype=jnp.int32) * tile_q, seq_lens.shape[0])
    lens, queries = seq_lens.astype(jnp.int32)[rows], query_lens.astype(jnp.int32)[rows]
    return _QueryTiles(rows, lens - queries + offset, jnp.clip(queries - offset, 0, tile_q), lens)


def _make_schedule(coverage: Coverage, tiles: _QueryTiles, tile_q: int, tile_kv: int) -> TileSchedule:
    """List the PARTIAL and FULL tiles."""
    any_visible = coverage.any_visible
    listed = build_lists_by_sorting(
        encode_tiles(any_visible, coverage.all_visible).reshape(-1, any_visible.shape[-1])
    )
    num_partial, num_full = (x.reshape(any_visible.shape[:2]) for x in (listed.num_partial, listed.num_full))
    return TileSchedule(
        kv_tiles=listed.entries.reshape(any_visible.shape),
        num_partial=num_partial,
        num_full=num_full,
        order=jnp.argsort(-(num_partial + num_full).reshape(-1), stable=True).astype(jnp.int32),
        rows=tiles.rows,
        first_query=tiles.first_query,
        num_queries=tiles.num_queries,
        tile_q=tile_q,
        tile_kv=tile_kv,
    )


def expand_schedule(
    schedule: TileSchedule,
) -> tuple[Bool[Array, "q_tiles q_heads tiles"], Bool[Array, "q_tiles q_heads tiles"]]:
    """Return which key tiles of a schedule are PARTIAL, and which are FULL. For tests and plots.

    Args:
        schedule: Schedule to expand.
    """
    tiles = schedule.kv_tiles.shape[-1]
    index = jnp.arange(tiles, dtype=jnp.int32)[None, None, :]
    is_partial = index < schedule.num_partial[..., None]
    is_listed = index < (schedule.num_partial + schedule.num_full)[..., None]
    matches = schedule.kv_tiles[..., None] == index[:, :, None]
    partial = (matches & is_partial[..., None]).any(axis=-2)
    full = (matches & (is_listed & ~is_partial)[..., None]).any(axis=-2)
    return partial, full
