"""What a thread block works on: items, which are tiles of queries of one head or a few, and their order."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_prefill.refs import PrefillScheduleRefs
from pallas_kernels.varlen_prefill.schedule import ALIGN, COLUMNS, kv_tile_range, visible_key_range
from pallas_kernels.varlen_prefill.sizes import WARPGROUP_ROWS
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.splits import SPLIT_COLUMNS
from pallas_kernels.varlen_prefill.tile_lists import LIST_COLUMNS


class PrefillWorkTile:
    """A tile of queries, of one head or of those that share it, before all of its keys or a split.

    Its scalars are traced.

    Keys of tile i begin at position i * tile_kv - skew.

    `item["position"]` is a column of the schedule: in a register if the caller has it there, else read anew
    at every use.

    Attributes:
        head: Query head, or which of its tile's items it is: that of heads `head * pack_gqa` onward.
        low: First key whose block is certain to be there; a stand-in for those before may not hold keys that
            are neither seen nor cleared.
        high: One past the last.
        first: First tile of keys, where there are no lists.
        num: Tiles of keys.
        skew: Rows by which tiles of keys begin before the request's first key.
        entries: The lists, or None.
    """

    def __init__(self, head: Scalar, column: Callable[[str], Scalar], entries: Ref, spec: PrefillSpec):
        self.column, self.entries, self.tile_kv = column, entries, spec.sizes.tile_kv
        self.items_per_kv_head = spec.shape.group // spec.sizes.pack_gqa
        self.head = head
        position = column("position")
        first, last = position + column("begin"), position + (column("end") - 1)
        self.low, self.high = low, high = visible_key_range(spec.score, first, last, column("seq_len"))
        # The request's last block may hold anything behind its end, and must not stand in for blocks whose
        # keys some query of the request sees. No item of more than 64 tokens begins in it and has others in
        # its first tile.
        if spec.has_lists or spec.sizes.tile_tokens <= WARPGROUP_ROWS:
            # Where nothing is masked from below, low is a 0 that the compiler sees, and high not negative: a
            # number of unknown sign made the loading warp's part of a step 2 % of vertical_slash_16k longer.
            self.low = column("seen") if spec.has_window else low
            self.high = jnp.maximum(column("seq_len"), 0)
        is_packed = spec.shape.in_cache is None
        self.skew = lax.rem(column("kv_start"), jnp.int32(ALIGN)) if is_packed else position * 0
        self.first, self.num = kv_tile_range(low, high, self.skew, self.tile_kv)
        if spec.has_lists:
            self.num = column("num")
        if spec.has_splits:
            skipped = column("skipped")
            self.first, self.num = (
                self.first + skipped,
                jnp.clip(self.num - skipped, 0, column("split_tiles")),
            )

    @property
    def kv_head(self) -> Scalar:
        """Kv head."""
        return lax.div(self.head, jnp.int32(self.items_per_kv_head))

    def entry(self, i: Scalar) -> Scalar:
        """What the list says of the item's tile i; where there is none, the tile's number."""
        return self.first + i if self.entries is None else self.entries[self.column("list"), i]

    def first_entry(self) -> Scalar:
        """Entry 0, without a look at the list."""
        return self.first if self.entries is None else self.column("first_entry")

    def tile_of(self, entry: Scalar) -> Scalar:
        """The tile's number."""
        return entry if self.entries is None else entry & ((1 << QUERY_BLOCK_SHIFT) - 1)

    def first_key(self, entry: Scalar) -> Scalar:
        """Position of the first key of a tile."""
        return self.tile_of(entry) * self.tile_kv - self.skew

    def __getitem__(self, name: str) -> Scalar:
        return self.column(name)


class PrefillTileScheduler:
    """The items of a step, and which of them a team of warpgroups takes, the longest first."""

    def __init__(self, schedule: PrefillScheduleRefs, spec: PrefillSpec):
        self.schedule, self.spec = schedule, spec
        self.num_rows = schedule.num_valid[0]
        self.num_items = self.num_rows * (1 if spec.has_lists else spec.items_per_tile)
        self.columns = table_columns(spec)

    def rounds_of(self, team: Scalar | int) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """How many items this team has, and the function from their place among these to their number.

        Teams take items in turn, every other round in the opposite order, so that their shares are equal.
        """
        sizes = self.spec.sizes
        worker, workers = lax.axis_index("cta") * sizes.teams + team, jnp.int32(sizes.workers)
        full_rounds = lax.div(self.num_items, workers)
        place = lambda r: r * workers + jnp.where(lax.rem(r, jnp.int32(2)) == 0, worker, workers - 1 - worker)
        rounds = full_rounds + (place(full_rounds) < self.num_items).astype(jnp.int32)
        return rounds, place

    def in_registers(self, number: Scalar) -> tuple[PrefillWorkTile, Scalar]:
        """An item, all columns of its row of the table read at once, and the row."""
        row, head = (number, None) if self.spec.has_lists else self._row_and_head(number)
        columns = {name: self.schedule.table[row, i] for i, name in enumerate(self.columns)}
        return self._item(columns["head"] if head is None else head, columns.__getitem__), row

    def in_memory(self, number: Scalar, columns_s: Ref) -> PrefillWorkTile:
        """An item whose row of the table is in shared memory, each column read where it is used."""
        column = lambda name: columns_s[self.columns.index(name)]
        head = column("head") if self.spec.has_lists else self._row_and_head(number)[1]
        return self._item(head, column)

    def _item(self, head: Scalar, column: Callable[[str], Scalar]) -> PrefillWorkTile:
        return PrefillWorkTile(head, column, self.schedule.entries, self.spec)

    def _row_and_head(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """Which row of the schedule and which head an item is, where there are no lists.

        Heads of a row follow each other, so that thread blocks at work share keys in L2: as many heads as fit
        it, then all rows for the next ones, in the opposite order, so that lengths do not jump and shares
        stay equal. The last heads end with the shortest row.
        """
        shape, num_rows = self.spec.shape, self.num_rows
        at_once = jnp.int32(shape.heads_at_once // self.spec.sizes.pack_gqa)
        if shape.heads_at_once == shape.q_heads:
            return lax.div(number, at_once), lax.rem(number, at_once)
        per_set, sets = num_rows * at_once, shape.q_heads // shape.heads_at_once
        nth = sum((number >= n * per_set).astype(jnp.int32) for n in range(1, sets))
        rest = number - nth * per_set
        row, is_turned = lax.div(rest, at_once), lax.rem(sets - 1 - nth, jnp.int32(2)) == 1
        return jnp.where(is_turned, num_rows - 1 - row, row), nth * at_once + lax.rem(rest, at_once)


class HeadRows(NamedTuple):
    """A head of an item, and where its rows are.

    Attributes:
        head: Query head.
        first: Row of its first token, among those of a warpgroup.
    """

    head: Scalar
    first: int


def packed_heads(item: PrefillWorkTile, spec: PrefillSpec) -> list[HeadRows]:
    """The query heads of an item."""
    num = spec.sizes.pack_gqa
    if num == 1:
        return [HeadRows(item.head, 0)]
    return [HeadRows(item.head * num + nth, nth * spec.sizes.warpgroup_tokens) for nth in range(num)]


def table_columns(spec: PrefillSpec) -> tuple[str, ...]:
    """What the schedule's table has of an item."""
    if spec.has_lists:
        return *COLUMNS, *LIST_COLUMNS
    return (*COLUMNS, *SPLIT_COLUMNS) if spec.has_splits else COLUMNS


def align_row(row: Scalar) -> Scalar:
    """A row that 8 divides, so that the compiler sees it; multiple_of is not for a single warp."""
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN
