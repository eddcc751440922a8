"""Which tiles of keys each tile of queries and head is to see: lists that the kernel walks through.

Without lists an item (a tile of queries of one head) walks from its first key to its last. With them it walks
through its list, first the tiles that need a mask, then those that every query sees whole.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.varlen_prefill.schedule import COLUMNS, TABLE_WIDTH, Schedule

# What a kernel reads of an item, after the columns of its tile of queries:
ITEM_COLUMNS = (
    "head",
    "num",  # tiles in its list
    "num_partial",  # of which so many at the beginning need a mask
)
PART_SHIFT = 20  # an entry: the tile's number below, above it one bit for each part of the queries
MAX_PARTS = 10


def num_parts(tile_q: int, block_q: int) -> int:
    """How many blocks of queries a tile of queries touches at most."""
    return (tile_q + block_q - 2) // block_q + 1


class TileLists(NamedTuple):
    """The items of a step, those with the longest lists first.

    Attributes:
        table: One row an item: COLUMNS of its tile of queries, then ITEM_COLUMNS. Rows from num_live on are
            garbage.
        num_live: How many items there are.
        entries: Each item's list: tiles that need a mask, the last one first, then the others. A tile is its
            number, and from bit PART_SHIFT on which parts of the item's queries see it: part p holds the
            queries of the p-th block of queries that the item touches.
    """

    table: Int32[Array, "items columns"]
    num_live: Int32[Array, " 1"]
    entries: Int32[Array, "items max_list"]


def listed(
    some: Bool[Array, "*lists tiles"],
    every: Bool[Array, "*lists tiles"],
    entries: Int32[Array, "*lists tiles"] | None = None,
) -> tuple[Int32[Array, "*lists tiles"], Int32[Array, "*lists"], Int32[Array, "*lists"]]:
    """Lists of the tiles seen in part, the last one first, then of those seen whole; how many of each.

    Args:
        some: Whether some pair of a tile is seen.
        every: Whether all are; implies some.
        entries: What stands for each tile; its number when None.
    """
    num_full, num_some = (x.sum(axis=-1, dtype=jnp.int32) for x in (every, some))
    num_partial = num_some - num_full
    full_before, some_before = (jnp.cumsum(x, axis=-1, dtype=jnp.int32) - 1 for x in (every, some))
    partial_before = some_before - full_before - 1
    place = jnp.where(every, full_before, -1 - partial_before) + num_partial[..., None]
    tiles = some.shape[-1]
    place = jnp.where(some, place, tiles).reshape(-1, tiles)
    numbers = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32), place.shape)
    numbers = numbers if entries is None else entries.reshape(place.shape)
    lists = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
    out = jnp.zeros(place.shape, jnp.int32).at[lists, place].set(numbers, mode="drop")
    return out.reshape(some.shape), num_partial, num_full


def longest_first(lens: Int32[Array, " lists"]) -> Int32[Array, " lists"]:
    """The lists' numbers, the longest list's first; equally long ones in order."""
    return jnp.argsort(-lens, stable=True).astype(jnp.int32)


def make_lists(
    schedule: Schedule,
    some: Bool[Array, "tiles q_heads kv_tiles"],
    every: Bool[Array, "tiles q_heads kv_tiles"],
    parts: Int32[Array, "tiles q_heads kv_tiles"] | None = None,
) -> TileLists:
    """Lists for the tiles of queries of a schedule, in its order.

    Args:
        schedule: The tiles of queries.
        some: Whether some query of the tile sees some of the keys. Nothing where a tile of queries is not
            live or a tile of keys lies outside the request.
        every: Whether every live query sees every key; not where a tile reaches past the request's ends.
        parts: Bits: which parts of the queries see the tile. All when None.
    """
    tiles, heads, kv_tiles = some.shape
    bits = jnp.full(some.shape, (1 << MAX_PARTS) - 1, jnp.int32) if parts is None else parts
    entries = jnp.arange(kv_tiles, dtype=jnp.int32)[None, None, :] + (bits << PART_SHIFT)
    entries, num_partial, num_full = listed(some, every, entries)
    is_live = jnp.arange(tiles, dtype=jnp.int32)[:, None] < schedule.num_live[0]
    lens = (num_partial + num_full).reshape(-1)
    order = longest_first(jnp.where(jnp.broadcast_to(is_live, (tiles, heads)).reshape(-1), lens, -1))
    columns = [order % heads, lens[order], num_partial.reshape(-1)[order]]
    padding = jnp.zeros((order.shape[0], TABLE_WIDTH - len(COLUMNS) - len(ITEM_COLUMNS)), jnp.int32)
    rows = schedule.table[order // heads, : len(COLUMNS)]
    return TileLists(
        table=jnp.concatenate([rows, jnp.stack(columns, axis=1), padding], axis=1),
        num_live=schedule.num_live * heads,
        entries=entries.reshape(tiles * heads, kv_tiles)[order],
    )
