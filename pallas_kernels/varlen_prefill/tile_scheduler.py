"""Work tiles of the prefill kernel, and their assignment to the teams of the persistent thread blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.arithmetic import alternating_rounds
from pallas_kernels.shared.memory import ALIGN
from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_prefill.refs import PrefillScheduleRefs
from pallas_kernels.varlen_prefill.schedule import COLUMNS, kv_tile_range, visible_key_range
from pallas_kernels.varlen_prefill.sizes import WARPGROUP_ROWS
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.splits import SPLIT_COLUMNS
from pallas_kernels.varlen_prefill.tile_lists import LIST_COLUMNS


class PrefillWorkTile:
    """A query tile of one head, or of one group of packed heads, with all of its keys or one KV split.

    Its scalars are traced. Keys of KV tile i start at position `i * tile_kv - alignment_offset`.

    `work_tile["position"]` is a column of the schedule's table. A work tile from `read_to_registers` holds it
    in a register; a work tile from `read_from_smem` loads it from shared memory at each use.

    Attributes:
        head: Query head, or index of the group of packed heads: heads `head * pack_gqa` onward.
        first_key_with_block: Position of the first key whose block is certain to exist. Its block is loaded
            in place of earlier blocks, so it must not hold keys that are neither visible nor zeroed.
        end_key_with_block: One past the position of the last key whose block is certain to exist.
        first: Index of the first KV tile; not used with tile lists.
        num: Number of KV tiles.
        alignment_offset: Number of rows between the start of KV tile 0 and the request's first key.
        entries: The tile lists, or None.
    """

    def __init__(self, head: Scalar, column: Callable[[str], Scalar], entries: Ref, spec: PrefillSpec):
        self.column, self.entries, self.tile_kv = column, entries, spec.sizes.tile_kv
        self.work_tiles_per_kv_head = spec.shape.group // spec.sizes.pack_gqa
        self.head = head
        position = column("position")
        first, last = position + column("begin"), position + (column("end") - 1)
        self.first_key_with_block, self.end_key_with_block = low, high = visible_key_range(
            spec.score, first, last, column("seq_len")
        )
        # The request's last block may hold anything after its end, and must not replace blocks whose keys
        # some query of the request attends to. No work tile of more than 64 tokens starts in it and has
        # further blocks in its first tile.
        if spec.has_lists or spec.sizes.tile_tokens <= WARPGROUP_ROWS:
            # Without a window low is a 0 that the compiler knows, and high is not negative: a number of
            # unknown sign made the loading warp's part of a step 2 % of vertical_slash_16k longer.
            self.first_key_with_block = column("first_visible_key") if spec.has_window else low
            self.end_key_with_block = jnp.maximum(column("seq_len"), 0)
        is_packed = spec.shape.cache_tiling is None
        self.alignment_offset = lax.rem(column("kv_start"), jnp.int32(ALIGN)) if is_packed else position * 0
        self.first, self.num = kv_tile_range(low, high, self.alignment_offset, self.tile_kv)
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
        """KV head of the query heads."""
        return lax.div(self.head, jnp.int32(self.work_tiles_per_kv_head))

    def entry(self, i: Scalar) -> Scalar:
        """Return the i-th entry of the tile list or, without lists, the index of the i-th KV tile."""
        return self.first + i if self.entries is None else self.entries[self.column("list"), i]

    def first_entry(self) -> Scalar:
        """Return entry 0 without reading the list."""
        return self.first if self.entries is None else self.column("first_entry")

    def kv_tile_index(self, entry: Scalar) -> Scalar:
        """Return the index of an entry's KV tile."""
        return entry if self.entries is None else entry & ((1 << QUERY_BLOCK_SHIFT) - 1)

    def first_key(self, entry: Scalar) -> Scalar:
        """Return the position of the first key of an entry's KV tile."""
        return self.kv_tile_index(entry) * self.tile_kv - self.alignment_offset

    def __getitem__(self, name: str) -> Scalar:
        return self.column(name)


class PrefillTileScheduler:
    """Assigns the work tiles of a step to the teams, the longest work tiles first."""

    def __init__(self, schedule: PrefillScheduleRefs, spec: PrefillSpec):
        self.schedule, self.spec = schedule, spec
        self.num_rows = schedule.num_valid[0]
        self.num_work_tiles = self.num_rows * (1 if spec.has_lists else spec.work_tiles_per_query_tile)
        self.columns = table_columns(spec)

    def assignment(self, team: Scalar | int) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """Return the number of work tiles of a team, and a function from iteration to work tile index."""
        sizes = self.spec.sizes
        worker = lax.axis_index("cta") * sizes.teams + team
        return alternating_rounds(self.num_work_tiles, worker, sizes.workers)

    def read_to_registers(self, index: Scalar) -> tuple[PrefillWorkTile, Scalar]:
        """Read all columns of a work tile to registers, and return the work tile and its row of the table."""
        row, head = (index, None) if self.spec.has_lists else self._row_and_head(index)
        columns = {name: self.schedule.table[row, i] for i, name in enumerate(self.columns)}
        return self._work_tile(columns["head"] if head is None else head, columns.__getitem__), row

    def read_from_smem(self, index: Scalar, columns_s: Ref) -> PrefillWorkTile:
        """Return a work tile whose row of the table is in shared memory; columns are read at each use."""

        def column(name: str) -> Scalar:
            return columns_s[self.columns.index(name)]

        head = column("head") if self.spec.has_lists else self._row_and_head(index)[1]
        return self._work_tile(head, column)

    def _work_tile(self, head: Scalar, column: Callable[[str], Scalar]) -> PrefillWorkTile:
        return PrefillWorkTile(head, column, self.schedule.entries, self.spec)

    def _row_and_head(self, index: Scalar) -> tuple[Scalar, Scalar]:
        """Return the row of the schedule and the head of a work tile, without tile lists.

        The heads of a row are adjacent, so that the running thread blocks share keys in L2: first all rows
        for as many heads as fit in L2, then all rows for the next heads in the opposite order, so that
        lengths do not jump and the work stays balanced. The last heads end with the shortest row.
        """
        shape, num_rows = self.spec.shape, self.num_rows
        group_heads = jnp.int32(shape.heads_per_l2_group // self.spec.sizes.pack_gqa)
        if shape.heads_per_l2_group == shape.q_heads:
            return lax.div(index, group_heads), lax.rem(index, group_heads)
        tiles_per_group, num_groups = num_rows * group_heads, shape.q_heads // shape.heads_per_l2_group
        group = sum((index >= n * tiles_per_group).astype(jnp.int32) for n in range(1, num_groups))
        in_group = index - group * tiles_per_group
        row, is_reversed = (
            lax.div(in_group, group_heads),
            lax.rem(num_groups - 1 - group, jnp.int32(2)) == 1,
        )
        row = jnp.where(is_reversed, num_rows - 1 - row, row)
        return row, group * group_heads + lax.rem(in_group, group_heads)


class PackedHead(NamedTuple):
    """One query head of a work tile.

    Attributes:
        head: Query head.
        first_row: Index of the head's first token among a warpgroup's rows.
    """

    head: Scalar
    first_row: int


def packed_heads(work_tile: PrefillWorkTile, spec: PrefillSpec) -> list[PackedHead]:
    """Return the query heads of a work tile."""
    num = spec.sizes.pack_gqa
    if num == 1:
        return [PackedHead(work_tile.head, 0)]
    tokens = spec.sizes.warpgroup_tokens
    return [PackedHead(work_tile.head * num + index, index * tokens) for index in range(num)]


def table_columns(spec: PrefillSpec) -> tuple[str, ...]:
    """Return the names of the table's columns."""
    if spec.has_lists:
        return *COLUMNS, *LIST_COLUMNS
    return (*COLUMNS, *SPLIT_COLUMNS) if spec.has_splits else COLUMNS


def align_row(row: Scalar) -> Scalar:
    """Return a row that is a multiple of 8 in a form that the compiler recognizes.

    Pallas's multiple_of is not available to a single warp.
    """
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN
