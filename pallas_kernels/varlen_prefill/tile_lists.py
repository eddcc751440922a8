"""Which tiles of keys each tile of queries and head is to see: lists that the kernel walks through.

Without lists an item (a tile of queries of one head) walks from its first key to its last. With them it walks
through its list, first the tiles that need a mask, then those that every query sees whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt

from pallas_kernels.list_tiles import list_tiles
from pallas_kernels.ptx import tile_order
from pallas_kernels.varlen_prefill.refs import PrefillScheduleRefs
from pallas_kernels.varlen_prefill.schedule import COLUMNS, PrefillSchedule, PrefillScheduleKey

# What a kernel reads of an item, after the columns of its tile of queries:
LIST_COLUMNS = (
    "head",
    "list",  # which row of the entries is its list
    "first_entry",  # of its list
    "num",  # tiles in its list
    "num_partial",  # of which so many at the beginning need a mask
)


def num_query_blocks(tile_q: int, block_q: int) -> int:
    """How many blocks of queries a tile of queries touches at most."""
    return (tile_q + block_q - 2) // block_q + 1


class PrefillTileLists(NamedTuple):
    """The items of a step in the order in which thread blocks take them.

    Attributes:
        table: One row an item: COLUMNS of its tile of queries, then ITEM_COLUMNS. Rows from num_valid on are
            garbage.
        num_valid: How many items there are.
        entries: The lists: tiles that need a mask, the last one first, then the others. A tile is its number,
            and from bit QUERY_BLOCK_SHIFT on which blocks of queries see it, of those that the item touches.
        built_for: Static: what their schedule is made for.
    """

    table: Int32[Array, "items columns"]
    num_valid: Int32[Array, " 1"]
    entries: Int32[Array, "lists max_list"]
    built_for: PrefillScheduleKey


def schedule_refs(schedule: PrefillSchedule, lists: PrefillTileLists | None) -> PrefillScheduleRefs:
    """What a kernel is to do: with lists they say it."""
    if lists is None:
        return PrefillScheduleRefs(schedule.table, schedule.num_valid, None)
    return PrefillScheduleRefs(lists.table, lists.num_valid, lists.entries)


def make_tile_lists(
    schedule: PrefillSchedule, codes: UInt[Array, "tiles q_heads kv_tiles"], *, sets: int = 1
) -> PrefillTileLists:
    """Lists for the tiles of queries of a schedule.

    Args:
        schedule: The tiles of queries.
        codes: `encode_tiles`, for each head: no tile is seen where a tile of queries is not live or a
            tile of keys lies outside the request; none is seen whole that reaches past the request's ends.
        sets: Static: the heads are worked through in so many sets, one after the other.
    """
    if codes.shape[2] == 0:  # nothing to see: as a tile that nobody sees
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, 1)))
    tiles, heads, kv_tiles = codes.shape
    listed = list_tiles(codes.reshape(tiles * heads, kv_tiles))
    arrays = schedule.table, schedule.num_valid, *listed
    sort: Callable[..., Any] = tile_order.sort_work_tiles.by_platform
    if not tile_order.has_kernel(num_tiles=tiles * heads // sets, max_len=kv_tiles):
        sort = tile_order.sort_work_tiles.fallback
    table, num_valid = sort(*arrays, columns=len(COLUMNS), sets=sets)
    return PrefillTileLists(table, num_valid, listed.entries, schedule.built_for)
