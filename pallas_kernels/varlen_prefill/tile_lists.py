"""Tile lists: the KV tiles that each query tile and head attends to.

Without lists, a work tile (a query tile of one head) loops over all KV tiles from its first visible key to
its last one. With lists, it loops over the KV tiles of its list: first the partial tiles, which need the
mask, then the full tiles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt

from pallas_kernels.list_tiles import list_tiles
from pallas_kernels.ptx import tile_order
from pallas_kernels.varlen_prefill.schedule import COLUMNS, PrefillSchedule, PrefillScheduleKey
from pallas_kernels.varlen_prefill.spec import PrefillScheduleRefs


def num_query_blocks(tile_q: int, block_q: int) -> int:
    """Return the maximum number of query blocks that a query tile overlaps."""
    return (tile_q + block_q - 2) // block_q + 1


class PrefillTileLists(NamedTuple):
    """Work tiles of a step in processing order, with their lists of KV tiles.

    Attributes:
        table: One row per work tile: COLUMNS of its query tile, then LIST_COLUMNS. Rows from `num_valid` on
            are undefined.
        num_valid: Number of work tiles.
        entries: One list per row: partial tiles in descending order, then full tiles. The low bits of an
            entry are the index of the KV tile. Bit QUERY_BLOCK_SHIFT + n says whether the n-th query block of
            the query tile attends to it.
        built_for: Static arguments that the schedule of these lists was built for.
    """

    table: Int32[Array, "work_tiles columns"]
    num_valid: Int32[Array, " 1"]
    entries: Int32[Array, "lists max_list"]
    built_for: PrefillScheduleKey


def schedule_refs(schedule: PrefillSchedule, lists: PrefillTileLists | None) -> PrefillScheduleRefs:
    """Return the arrays of work tiles that the kernel reads: those of the lists, or else of the schedule."""
    if lists is None:
        return PrefillScheduleRefs(schedule.table, schedule.num_valid, None)
    return PrefillScheduleRefs(lists.table, lists.num_valid, lists.entries)


def make_tile_lists(
    schedule: PrefillSchedule, codes: UInt[Array, "tiles q_heads kv_tiles"], *, sets: int = 1
) -> PrefillTileLists:
    """Build the tile lists for the query tiles of a schedule.

    Args:
        schedule: Schedule of the query tiles.
        codes: Coverage of each KV tile by each query tile and head, see `encode_tiles`. Codes are empty for
            invalid query tiles and for KV tiles outside of the request, and not full for tiles that contain
            rows outside of the request.
        sets: Number of sets of heads that are processed one after the other. Static.
    """
    if codes.shape[2] == 0:  # no keys: add one empty tile
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, 1)))
    tiles, heads, kv_tiles = codes.shape
    listed = list_tiles(codes.reshape(tiles * heads, kv_tiles))
    arrays = schedule.table, schedule.num_valid, *listed
    sort: Callable[..., Any] = tile_order.sort_work_tiles.by_platform
    if not tile_order.has_kernel(num_tiles=tiles * heads // sets, max_len=kv_tiles):
        sort = tile_order.sort_work_tiles.fallback
    table, num_valid = sort(*arrays, columns=len(COLUMNS), sets=sets)
    return PrefillTileLists(table, num_valid, listed.entries, schedule.built_for)
