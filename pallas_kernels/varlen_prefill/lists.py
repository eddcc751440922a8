"""Which tiles of keys each tile of queries and head is to see: lists that the kernel walks through.

Without lists an item (a tile of queries of one head) walks from its first key to its last. With them it walks
through its list, first the tiles that need a mask, then those that every query sees whole.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from pallas_kernels.varlen_prefill.schedule import COLUMNS, TABLE_WIDTH, Schedule, sorted_places

# What a kernel reads of an item, after the columns of its tile of queries:
ITEM_COLUMNS = (
    "head",
    "num",  # tiles in its list
    "num_partial",  # of which so many at the beginning need a mask
)
PART_SHIFT = 20  # an entry: the tile's number below, above it one bit for each part of the queries
MAX_PARTS = 10
WORD = 32  # tiles whose bits are counted together


def num_parts(tile_q: int, block_q: int) -> int:
    """How many blocks of queries a tile of queries touches at most."""
    return (tile_q + block_q - 2) // block_q + 1


class TileLists(NamedTuple):
    """The items of a step in the order in which thread blocks take them.

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


class Words(NamedTuple):
    """Which tiles each list names: a bit a tile, 32 tiles a word, the first in the lowest bit.

    A tile's place in its list is a count of bits. XLA makes one kernel each of packing, counting and writing;
    a cumulative sum over the tiles takes it a dozen.

    Attributes:
        bits: Which tiles are seen at all, which are seen whole where not all of these are, and what an entry
            says from PART_SHIFT on.
        before: Tiles of the one or two first kinds before each word, and in all.
        num_tiles: Of a list at most.
    """

    bits: UInt32[Array, "kinds *lists words"]
    before: Int32[Array, "seen *lists words+1"]
    num_tiles: int

    @classmethod
    def of(cls, some: Array, every: Array | None = None, parts: Sequence[Array] = ()) -> "Words":
        """From Bool [*lists, tiles]: whether some pair of a tile is seen; whether all are; None = as some."""
        seen = (some,) if every is None else (some, every)
        bits = jnp.stack([_packed(kind) for kind in (*seen, *parts)])
        words = bits.shape[-1]
        is_before = jnp.arange(words + 1)[:, None] > jnp.arange(words)[None, :]
        counts = _num_bits(bits[: len(seen)])[..., None, :]
        before = jnp.where(_with_axes(is_before, counts.ndim), counts, 0).sum(axis=-1, dtype=jnp.int32)
        return cls(bits, before, some.shape[-1])

    def counts(self) -> tuple[Int32[Array, " *lists"], Int32[Array, " *lists"]]:
        """Tiles of each list that are seen in part, and that are seen whole."""
        num_seen = self.before[..., -1]
        return num_seen[0] - num_seen[-1], num_seen[-1]

    def written(self, rows: Int32[Array, " *lists"] | None = None) -> Int32[Array, "rows tiles"]:
        """The lists: tiles seen in part, the last one first, then those seen whole, then zeros.

        Args:
            rows: Where each list goes, one past the last for lists that are not wanted; its number when None.
        """
        tiles, count = self.num_tiles, math.prod(self.bits.shape[1:-1])
        each = _with_axes(jnp.arange(WORD, dtype=jnp.uint32), self.bits.ndim + 1)
        flat = lambda x: x.reshape(x.shape[0], count, -1)[:, :, :tiles]
        is_set, seen = flat((self.bits[..., None] >> each) & 1 != 0), self.before.shape[0]
        below = self.bits[:seen, ..., None] & ((jnp.uint32(1) << each) - 1)
        before = flat(self.before[..., :-1, None] + _num_bits(below))
        some, every, parts = is_set[0], is_set[seen - 1], is_set[seen:]
        num_partial = self.counts()[0].reshape(count, 1)
        place = num_partial + jnp.where(every, before[-1], before[-1] - before[0] - 1)
        entries = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32)[None, :], (count, tiles))
        for nth, part in enumerate(parts):
            entries = entries + (part.astype(jnp.int32) << (PART_SHIFT + nth))
        rows = jnp.arange(count, dtype=jnp.int32) if rows is None else rows.reshape(count)
        where = rows[:, None], jnp.where(some, place, tiles)
        return jnp.zeros((count, tiles), jnp.int32).at[where].set(entries, mode="drop")


def _packed(bits: Bool[Array, "*lists tiles"]) -> UInt32[Array, "*lists words"]:
    missing = -bits.shape[-1] % WORD
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, missing)])
    bits = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    each = _with_axes(jnp.arange(WORD, dtype=jnp.uint32), bits.ndim)
    return (bits << each).sum(axis=-1, dtype=jnp.uint32)


def _num_bits(words: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _with_axes(x: Array, ndim: int) -> Array:
    """Axes of 1 in front."""
    return x.reshape(*(1,) * (ndim - x.ndim), *x.shape)


def make_lists(
    schedule: Schedule,
    some: Bool[Array, "tiles q_heads kv_tiles"],
    every: Bool[Array, "tiles q_heads kv_tiles"],
    parts: Sequence[Bool[Array, "tiles q_heads kv_tiles"]] = (),
    *,
    sets: int = 1,
) -> TileLists:
    """Lists for the tiles of queries of a schedule.

    Args:
        schedule: The tiles of queries.
        some: Whether some query of the tile sees some of the keys. Nothing where a tile of queries is not
            live or a tile of keys lies outside the request.
        every: Whether every live query sees every key; not where a tile reaches past the request's ends.
        parts: Which parts of the queries see the tile; none where a tile is one part.
        sets: Static: the heads are worked through in so many sets, one after the other.
    """
    tiles, heads, kv_tiles = some.shape
    by_set = lambda x: jnp.swapaxes(x.reshape(tiles, sets, -1), 0, 1).reshape(sets, -1)
    words = Words.of(some, every, parts)
    num_partial, num_full = words.counts()
    lens = by_set(num_partial + num_full)
    is_live = jnp.arange(tiles, dtype=jnp.int32)[:, None] < schedule.num_live[0]
    is_live = by_set(jnp.broadcast_to(is_live, (tiles, heads)))
    # The longest first, in every other set last, so that lengths change little from one item to the next.
    number = jnp.arange(sets, dtype=jnp.int32)[:, None]
    keys = jnp.where((sets - 1 - number) % 2 == 0, -lens, lens)
    per_set = schedule.num_live[0] * (heads // sets)
    rows = sorted_places(jnp.where(is_live, keys, kv_tiles + 1)) + number * per_set
    rows = jnp.where(is_live, rows, tiles * heads)
    rows = jnp.swapaxes(rows.reshape(sets, tiles, -1), 0, 1).reshape(tiles, heads)
    columns = [jnp.arange(heads, dtype=jnp.int32)[None, :], num_partial + num_full, num_partial]
    columns = [jnp.broadcast_to(x, (tiles, heads))[..., None] for x in columns]
    of_tile = jnp.broadcast_to(schedule.table[:, None, : len(COLUMNS)], (tiles, heads, len(COLUMNS)))
    table = jnp.concatenate([of_tile, *columns], axis=-1)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, TABLE_WIDTH - table.shape[-1])))
    table = table.reshape(tiles * heads, TABLE_WIDTH)
    return TileLists(
        table=jnp.zeros_like(table).at[rows.reshape(-1)].set(table, mode="drop"),
        num_live=schedule.num_live * heads,
        entries=words.written(rows),
    )
