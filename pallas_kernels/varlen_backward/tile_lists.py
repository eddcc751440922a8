"""Tile lists: the query tiles that attend to each key tile, one list per query head.

They are the transpose of varlen_prefill's lists, which name the KV tiles that each query tile attends to.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int, Int32, UInt

from pallas_kernels.list_tiles import list_tiles
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.tile_codes import FULL_BIT, VISIBLE_BIT, encode_tiles
from pallas_kernels.varlen_backward.schedule import (
    COLUMNS,
    BackwardSchedule,
    BackwardScheduleKey,
    order_work_tiles,
)
from pallas_kernels.varlen_backward.sizes import BackwardSizes
from pallas_kernels.varlen_prefill import KernelMask, PrefillTileLists


class BackwardTileLists(NamedTuple):
    """Tile lists of a call, and the processing order of its work tiles.

    Attributes:
        table: The schedule's table, but `first_query_row` and `query_position` are reduced by the queries in
            the tiles of earlier requests, because entries number the tiles over all requests: tile i starts
            at row `first_query_row + i * tile_q`, also in the last request.
        order: Work tiles in processing order, see DkDvScheduleRefs.order.
        entries: One list of query tiles, or blocks of queries, numbered over all requests, per key tile and
            query head: partial ones, then full ones. Elements after the end of a list are undefined. With a
            dq kernel and teams of two warpgroups, bit QUERY_BLOCK_SHIFT + w says whether the query tile
            attends to the 64 keys of warpgroup w; if not, that warpgroup skips the tile.
        num_partial: Number of partial entries in each list.
        num_full: Number of full entries in each list.
        dq_lists: Tile lists of the dq kernel for BackwardSchedule.dq_schedule, or None.
        built_for: Static arguments that the schedule of these lists was built for, and list_block_size.
    """

    table: Int32[Array, "tiles columns"]
    order: Int32[Array, " work_tiles"]
    entries: Int32[Array, "lists max_list"]
    num_partial: Int32[Array, " lists"]
    num_full: Int32[Array, " lists"]
    dq_lists: PrefillTileLists | None
    built_for: BackwardScheduleKey


class BackwardMask(NamedTuple):
    """Mask of a call, which applies to partial tiles of the tile lists.

    Attributes:
        dkdv_mask: Mask in the dk/dv kernel, whose tiles are TransposedPairTile.
        dq_mask: Mask in the dq kernel, whose tiles are PairTile; None if its lists say all, or without a dq
            kernel.
    """

    dkdv_mask: KernelMask
    dq_mask: KernelMask | None = None


class QueryTiles(NamedTuple):
    """Query tiles, or blocks, that the tile codes refer to, in token order; see varlen_prefill's schedule.

    Attributes:
        first_tiles: Index of each request's first tile, and the number of tiles.
        begin: First valid row of each tile.
        end: One past the last valid row of each tile.
    """

    first_tiles: Int32[Array, " bounds"]
    begin: Int32[Array, " tiles"]
    end: Int32[Array, " tiles"]


def make_tile_lists(
    schedule: BackwardSchedule,
    query_tiles: QueryTiles,
    codes: UInt[Array, "query_tiles q_heads kv_tiles"],
    *,
    kv_heads: int,
    sizes: BackwardSizes,
    list_block_size: int | None = None,
) -> BackwardTileLists:
    """Build the tile lists for the key tiles of a schedule.

    Args:
        schedule: Schedule of the key tiles.
        query_tiles: Query tiles of `sizes.tile_q` rows, or blocks of `list_block_size`. The first one of a
            request starts at its first query rounded down to a multiple of 8.
        codes: Coverage of each KV tile of a request by each query tile and head, see `encode_tiles`. KV tiles
            have `keys_per_code(sizes)` keys, and start at a multiple of 8 like query tiles. Codes are empty
            for invalid query tiles and for KV tiles outside of the request.
        kv_heads: Number of KV heads. Static.
        sizes: Tile sizes of the kernel. Static.
        list_block_size: Number of queries per code if `codes` describe blocks of which several fill a tile;
            None if they describe tiles. Static.
    """
    num_queries = list_block_size or sizes.tile_q
    key_codes = _transpose_codes(schedule, query_tiles, codes, sizes, num_queries)
    tiles, heads, max_list = key_codes.shape
    listed = list_tiles(key_codes.reshape(tiles * heads, max_list))
    table = schedule.table
    num_before = query_tiles.first_tiles[table[:, COLUMNS.index("req")]] * num_queries
    for name in ("first_query_row", "query_position"):
        table = table.at[:, COLUMNS.index(name)].add(-num_before)
    num_steps = -(-(listed.num_partial + listed.num_full) // (sizes.tile_q // num_queries))
    lengths = num_steps.reshape(tiles * kv_heads, -1).sum(axis=1).astype(jnp.int32)
    order = order_work_tiles(lengths, schedule.l2_sets, schedule.num_valid * kv_heads)
    splits = sizes.list_splits
    if splits > 1:  # the splits of a list, which have equal lengths, are adjacent
        order = (order[:, None] * splits + jnp.arange(splits, dtype=jnp.int32)[None, :]).reshape(-1)
    built_for = dataclasses.replace(schedule.built_for, list_block_size=list_block_size)
    return BackwardTileLists(table, order, *listed, dq_lists=None, built_for=built_for)


def keys_per_code(sizes: BackwardSizes) -> int:
    """Return the number of keys per tile code: a warpgroup's with a dq kernel, else a work tile's."""
    return sizes.tile_kv if sizes.dq_sizes is None else WARPGROUP_ROWS


def _transpose_codes(
    schedule: BackwardSchedule, query_tiles: QueryTiles, codes: Array, sizes: BackwardSizes, num_queries: int
) -> UInt[Array, "key_tiles q_heads query_tiles"]:
    """Return a code for each pair of a key tile and a tile of `num_queries` queries, of any request."""
    num, num_keys, last_kv_tile = codes.shape[0], keys_per_code(sizes), codes.shape[2] - 1

    def column(name: str) -> Int[Array, "1 key_tiles"]:
        return schedule.table[:, COLUMNS.index(name)][None, :]

    first, end = (query_tiles.first_tiles[column("req") + offset] for offset in (0, 1))
    tile = jnp.arange(num, dtype=jnp.int32)[:, None]
    in_request = (first <= tile) & (tile < end)
    in_request &= (jnp.arange(len(schedule.table)) < schedule.num_valid)[None, :]
    is_full_tile = ((query_tiles.end - query_tiles.begin) == num_queries)[:, None]

    def coverage(begin: int) -> tuple[Array, Array]:
        """Return whether any, and whether all, of the `num_keys` keys from row `begin` on are visible."""
        kv_tile = (column("kv_tile") * sizes.tile_kv + begin) // num_keys
        exists = in_request & (kv_tile <= last_kv_tile)
        has_all_keys = (column("begin") <= begin) & (column("end") >= begin + num_keys)
        tile_codes = codes[:, :, jnp.minimum(kv_tile[0], last_kv_tile)]
        is_visible = (tile_codes & (1 << VISIBLE_BIT) != 0) & exists[:, None, :]
        is_full = (tile_codes & (1 << FULL_BIT) != 0) & (is_full_tile & has_all_keys)[:, None, :]
        return is_visible, is_full

    visible, full = zip(*map(coverage, range(0, sizes.tile_kv, num_keys)), strict=True)
    is_full = functools.reduce(operator.and_, (~a | b for a, b in zip(visible, full, strict=True)))
    is_visible = functools.reduce(operator.or_, visible)
    by_query_tile = encode_tiles(is_visible, is_full, visible if len(visible) > 1 else ())
    # With these layouts XLA computes the codes from masks that it reads in order, then transposes them in
    # tiles. Left to choose, it computes them in the order of the result, or while it transposes.
    rows_first = Layout((0, 1, 2))
    by_query_tile = lax.optimization_barrier(with_layout_constraint(by_query_tile, rows_first))
    return with_layout_constraint(by_query_tile.transpose(2, 1, 0), rows_first)
