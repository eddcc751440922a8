"""What a thread block works on: items, which are tiles of queries of one head, and their order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.list_tiles import PART_SHIFT
from pallas_kernels.shared.head_dims import HeadCut
from pallas_kernels.shared.paged_kv import CacheCut
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill.schedule import ALIGN, kv_tile_range, tile_range
from pallas_kernels.varlen_prefill.tiles import WARPGROUP_ROWS, Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call besides the tiles.

    Attributes:
        q_heads: Query heads.
        group: Query heads of a kv head.
        cut: The cut of head_dim.
        block_size: Tokens of a cache block; None where keys are packed.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        heads_at_once: Query heads whose keys and values are read side by side, where there are no lists.
        block_q: Queries of a block of queries, where lists tell the blocks of an item apart.
    """

    q_heads: int
    group: int
    cut: HeadCut
    block_size: int | None
    is_hnd: bool
    heads_at_once: int
    block_q: int | None = None

    def in_cache(self, tile_kv: int) -> CacheCut:
        """How a tile of keys is fetched from the cache."""
        assert self.block_size is not None
        return CacheCut(block_size=self.block_size, tile_kv=tile_kv, is_hnd=self.is_hnd, head=self.cut)


class Item:
    """A tile of queries of one head; traced scalars. Keys of tile i begin at position i * tile_kv - skew.

    `item["position"]` is a column of the schedule: in a register if the caller has it there, else read anew
    at every use.

    Attributes:
        head: Query head.
        low: First key whose block is certain to be there; a stand-in for those before may not hold keys that
            are neither seen nor cleared.
        high: One past the last.
        first: First tile of keys, where there are no lists.
        num: Tiles of keys.
        skew: Rows by which tiles of keys begin before the request's first key.
    """

    def __init__(
        self,
        head: Any,
        column: Callable[[str], Any],
        entries_g: Any,
        score: Score,
        tiles: Tiles,
        shape: Shape,
    ):
        self.column, self.entries_g, self.tile_kv = column, entries_g, tiles.tile_kv
        has_lists = entries_g is not None
        self.head = head
        position = column("position")
        first, last = position + column("begin"), position + (column("end") - 1)
        self.low, self.high = low, high = tile_range(score, first, last, column("seq_len"))
        # The request's last block may hold anything behind its end, and must not stand in for blocks whose
        # keys some query of the request sees. No item of more than 64 queries begins in it and has others in
        # its first tile.
        if has_lists or tiles.tile_q <= WARPGROUP_ROWS:
            # Where nothing is masked from below, low is a 0 that the compiler sees, and high not negative: a
            # number of unknown sign made the loading warp's part of a step 2 % of vertical_slash_16k longer.
            has_low = score.window[0] is not None or score.chunk_size is not None
            self.low = column("seen") if has_low else low
            self.high = jnp.maximum(column("seq_len"), 0)
        is_packed = shape.block_size is None
        self.skew = lax.rem(column("kv_start"), jnp.int32(ALIGN)) if is_packed else position * 0
        self.first, self.num = kv_tile_range(low, high, self.skew, tiles.tile_kv)
        if has_lists:
            self.num = column("num")

    def entry(self, i: Any) -> Any:
        """What the list says of the item's tile i; where there is none, the tile's number."""
        return self.first + i if self.entries_g is None else self.entries_g[self.column("list"), i]

    def first_entry(self) -> Any:
        """Entry 0, without a look at the list."""
        return self.first if self.entries_g is None else self.column("first_entry")

    def tile_of(self, entry: Any) -> Any:
        """The tile's number."""
        return entry if self.entries_g is None else entry & ((1 << PART_SHIFT) - 1)

    def first_key(self, entry: Any) -> Any:
        """Position of the first key of a tile."""
        return self.tile_of(entry) * self.tile_kv - self.skew

    def __getitem__(self, name: str) -> Any:
        return self.column(name)


def rounds_of(num_items: Any, tiles: Tiles, team: Any) -> tuple[Any, Callable]:
    """How many items this team has, and the function from their place among these to their number.

    Teams take items in turn, every other round in the opposite order, so that their shares are equal.
    """
    worker, workers = lax.axis_index("cta") * tiles.teams + team, jnp.int32(tiles.workers)
    full_rounds = lax.div(num_items, workers)
    place = lambda r: r * workers + jnp.where(lax.rem(r, jnp.int32(2)) == 0, worker, workers - 1 - worker)
    rounds = full_rounds + (place(full_rounds) < num_items).astype(jnp.int32)
    return rounds, place


def row_and_head(number: Any, num_rows: Any, shape: Shape) -> tuple[Any, Any]:
    """Which row of the schedule and which head an item is, where there are no lists.

    Heads of a row follow each other, so that thread blocks at work share keys in L2: as many heads as fit it,
    then all rows for the next ones, in the opposite order, so that lengths do not jump and shares stay equal.
    The last heads end with the shortest row.
    """
    at_once = jnp.int32(shape.heads_at_once)
    if shape.heads_at_once == shape.q_heads:
        return lax.div(number, at_once), lax.rem(number, at_once)
    per_part, parts = num_rows * at_once, shape.q_heads // shape.heads_at_once
    part = sum((number >= n * per_part).astype(jnp.int32) for n in range(1, parts))
    rest = number - part * per_part
    row, is_turned = lax.div(rest, at_once), lax.rem(parts - 1 - part, jnp.int32(2)) == 1
    return jnp.where(is_turned, num_rows - 1 - row, row), part * at_once + lax.rem(rest, at_once)


def aligned(row: Any) -> Any:
    """A row that 8 divides, so that the compiler sees it; multiple_of is not for a single warp."""
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN


def stage_of(step: Any, tiles: Tiles, team: Any) -> Any:
    """Where a team has the keys and values of a step."""
    # Products are issued after this: a remainder costs up to 1 % over lists (sparse-variants).
    is_power_of_2 = tiles.stages & (tiles.stages - 1) == 0
    stage = step & (tiles.stages - 1) if is_power_of_2 else lax.rem(step, jnp.int32(tiles.stages))
    return stage if tiles.teams == 1 else stage + team * tiles.stages
