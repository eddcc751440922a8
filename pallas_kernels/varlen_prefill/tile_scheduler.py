"""Work tiles of the prefill kernel, their assignment to teams, and the KV tiles of a warpgroup's rows."""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.ptx.bit_mask import WORD_BITS
from pallas_kernels.ptx.look_up import look_up
from pallas_kernels.score_mod import PairValue, Positions, ScoreTile
from pallas_kernels.shared.arithmetic import alternating_rounds
from pallas_kernels.shared.layouts import COLUMN, ROW, WARPGROUP_ROWS
from pallas_kernels.shared.memory import ALIGN
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.kernel_mask import PairTile
from pallas_kernels.varlen_prefill.schedule import key_range, overlapping_kv_tiles, visible_key_range
from pallas_kernels.varlen_prefill.spec import PrefillScheduleRefs, PrefillSpec

NO_KEY = 2**30  # position of the keys of runs that a tile lacks: after the end of every request
# Columns of the table that loads and masks of KV tiles use.
KV_TILE_COLUMNS = ("req", "kv_start", "list")


class PrefillWorkTile:
    """A query tile of one head, or of one group of packed heads, with all of its keys or one KV split.

    `work_tile[name]` is the value of a column of the schedule's table. A work tile from `read_to_registers`
    holds the columns in registers; one from `read_from_smem` loads a column from shared memory at each use.
    All scalars are traced. Keys of KV tile i start at position `i * tile_kv - alignment_offset`.

    Attributes:
        head: Query head, or index of the group of packed heads: heads `head * pack_gqa` onward.
        first_key_with_block: Position of the first key whose block is certain to exist. Its block is loaded
            in place of earlier blocks, so it must not hold keys that are neither visible nor zeroed.
        end_key_with_block: One past the position of the last key whose block is certain to exist.
        first: Index of the first KV tile; not used with tile lists.
        num: Number of KV tiles.
        alignment_offset: Number of rows between the start of KV tile 0 and the request's first key.
        entries: The tile lists, or None.
        run_length: Number of keys per entry, see PrefillSpec. Static.
        runs_per_tile: Number of entries that fill a tile. Static.
    """

    def __init__(self, head: Scalar, column: Callable[[str], Scalar], entries: Ref, spec: PrefillSpec):
        """Create the work tile; `column` returns the value of a column of its row of the table."""
        self._column, self.entries = column, entries
        self.run_length, self.runs_per_tile = spec.run_length, spec.runs_per_tile
        self.head, self.work_tiles_per_kv_head = head, spec.shape.group // spec.sizes.pack_gqa
        position = column("position")
        first, last = position + column("begin"), position + (column("end") - 1)
        self.first_key_with_block, self.end_key_with_block = low, high = visible_key_range(
            spec.score, first, last, column("seq_len")
        )
        # The request's last block may hold anything after its end, and must not replace blocks whose keys
        # some query of the request attends to. No work tile of more than 64 tokens starts in it and has
        # further blocks in its first tile.
        if spec.has_lists or spec.sizes.tile_tokens <= WARPGROUP_ROWS:
            # The loading warp divides both by the block size, in fewer instructions if the compiler knows
            # that they are not negative: without a window low is the constant 0, and high is clamped.
            self.first_key_with_block = column("first_visible_key") if spec.has_window else low
            self.end_key_with_block = jnp.maximum(column("seq_len"), 0)
        self.alignment_offset = position * 0
        if not spec.shape.has_aligned_keys:
            self.alignment_offset = lax.rem(column("kv_start"), jnp.int32(ALIGN))
        self.first, self.num = overlapping_kv_tiles(low, high, self.alignment_offset, spec.sizes.tile_kv)
        if spec.has_lists:
            self.num = column("num")
        if spec.has_splits:
            skipped = column("skipped")
            self.first, self.num = (
                self.first + skipped,
                jnp.clip(self.num - skipped, 0, column("split_tiles")),
            )

    def __getitem__(self, name: str) -> Scalar:
        return self._column(name)

    @property
    def kv_head(self) -> Scalar:
        """KV head of the work tile's query heads."""
        return lax.div(self.head, jnp.int32(self.work_tiles_per_kv_head))

    def entry(self, i: Scalar) -> Scalar:
        """Return the i-th entry of the tile list or, without lists, the index of the i-th KV tile."""
        return self.first + i if self.entries is None else self.entries[self["list"], i]

    def tile_entries(self, i: Scalar) -> tuple[Scalar, ...]:
        """Return the entries of the i-th KV tile, with entry 0 for those that the first tile lacks."""
        if self.runs_per_tile == 1:
            return (self.entry(i),)
        first = i * self.runs_per_tile - self["num_missing"]
        return tuple(self.entry(jnp.maximum(first + run, 0)) for run in range(self.runs_per_tile))

    def first_entries(self) -> tuple[Scalar, ...]:
        """Return the entries of the first KV tile. A single entry comes from the table, not from the list."""
        if self.runs_per_tile > 1:
            return self.tile_entries(jnp.int32(0))
        return (self.first if self.entries is None else self["first_entry"],)

    def kv_tile_index(self, entry: Scalar) -> Scalar:
        """Return the index of an entry's KV tile, or block of keys."""
        return entry if self.entries is None else entry & ((1 << QUERY_BLOCK_SHIFT) - 1)


def team_and_rank(wg: Scalar, teams: int) -> tuple[Scalar, Scalar]:
    """Return the team of a computing warpgroup and the warpgroup's index in the team.

    Args:
        wg: Index of the warpgroup.
        teams: Number of teams: one for all warpgroups, or one for each.
    """
    return (wg * 0, wg) if teams == 1 else (wg, wg * 0)


class PrefillTileScheduler:
    """Assigns the work tiles of a step to the teams, the longest work tiles first."""

    def __init__(self, schedule: PrefillScheduleRefs, spec: PrefillSpec):
        self.schedule, self.spec = schedule, spec
        self.num_rows = schedule.num_valid[0]
        self.num_work_tiles = self.num_rows * (1 if spec.has_lists else spec.work_tiles_per_query_tile)

    def assignment(self, team: Scalar | int) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """Return the number of work tiles of a team, and a function from iteration to work tile index."""
        sizes = self.spec.sizes
        worker = lax.axis_index("cta") * sizes.teams + team
        return alternating_rounds(self.num_work_tiles, worker, sizes.workers)

    def read_to_registers(self, index: Scalar) -> tuple[PrefillWorkTile, Scalar]:
        """Read all columns of a work tile to registers, and return the work tile and its row of the table."""
        row, head = (index, None) if self.spec.has_lists else self._row_and_head(index)
        columns = {name: self.schedule.table[row, i] for i, name in enumerate(self.spec.table_columns)}
        head = columns["head"] if head is None else head
        return PrefillWorkTile(head, columns.__getitem__, self.schedule.entries, self.spec), row

    def read_from_gmem(self, index: Scalar) -> PrefillWorkTile:
        """Return a work tile whose columns are in registers if KV tiles need them, else read at each use."""
        row, head = (index, None) if self.spec.has_lists else self._row_and_head(index)
        names, schedule_g = self.spec.table_columns, self.schedule.table
        kept = {name: schedule_g[row, names.index(name)] for name in KV_TILE_COLUMNS if name in names}

        def column(name: str) -> Scalar:
            return kept[name] if name in kept else schedule_g[row, names.index(name)]

        return PrefillWorkTile(
            column("head") if head is None else head, column, self.schedule.entries, self.spec
        )

    def read_from_smem(self, index: Scalar, table_row_s: Ref) -> PrefillWorkTile:
        """Return a work tile whose row of the table is in shared memory; columns are read at each use."""

        def column(name: str) -> Scalar:
            return table_row_s[self.spec.table_columns.index(name)]

        head = column("head") if self.spec.has_lists else self._row_and_head(index)[1]
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
        group: Scalar | int = 0
        for n in range(1, num_groups):
            group = group + (index >= n * tiles_per_group).astype(jnp.int32)
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


def align_row(row: Scalar) -> Scalar:
    """Return a row that is a multiple of 8 in a form that the compiler recognizes.

    Pallas's multiple_of is not available to a single warp.
    """
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN


# ------------------------------------------------------------------------------------- rows and KV tiles
class MaskedEnds(enum.Flag):
    """Ends of the range of visible keys that a KV tile may contain; a tile with neither needs no mask."""

    NONE = 0
    LOW = enum.auto()
    HIGH = enum.auto()
    BOTH = LOW | HIGH


class KvTileRange(NamedTuple):
    """The KV tiles that a warpgroup's rows attend to, as indices among the KV tiles of the work tile.

    Attributes:
        begin: First tile that the rows attend to.
        full_begin: First tile that needs no mask.
        full_end: One past the last tile that needs no mask.
        end: One past the last tile that the rows attend to.
    """

    begin: Scalar
    full_begin: Scalar
    full_end: Scalar
    end: Scalar


class QueryRows:
    """The rows of a work tile that one warpgroup computes: rows `rank * warpgroup_rows` onward.

    Attributes:
        work_tile: Work tile that the rows belong to.
        rank: Index of the warpgroup in its team.
        slope: ALiBi slope times log2(e) of the head or, with packed heads, of each row; None without ALiBi.
    """

    def __init__(self, work_tile: PrefillWorkTile, rank: Scalar, slopes: Ref, spec: PrefillSpec):
        """Create the rows; `slopes` are the ALiBi slopes of all query heads times log2(e), or None."""
        self.work_tile, self.rank, self.spec = work_tile, rank, spec
        self.tokens = spec.sizes.warpgroup_tokens
        self.slope = None if slopes is None else self.per_head(lambda head: slopes[head])

    def per_head(self, head_value: Callable[[Scalar], Scalar]) -> Scalar | Rows:
        """Return `head_value(head)` for the work tile's head or, with packed heads, for each row's head."""
        first, *rest = packed_heads(self.work_tile, self.spec)
        value = head_value(first.head)
        if not rest:
            return value
        row = plgpu.broadcasted_iota(jnp.int32, self.spec.s_shape[:1], 0, layout=ROW)
        values = jnp.where(row >= 0, value, jnp.zeros((), value.dtype))
        for head, first_row in rest:
            values = jnp.where(row >= first_row, head_value(head), values)
        return values

    def load_per_row_of_token(self, values: Ref) -> Rows:
        """Load a value per row, of an array with one value per head and row of a token."""
        num = self.spec.score.rows_per_token
        row = plgpu.broadcasted_iota(jnp.int32, self.spec.s_shape[:1], 0, layout=ROW)
        index = self.work_tile.head * num + (row & (num - 1))
        return look_up(values, index, layout=ROW, is_interpreted=self.spec.is_interpreted)

    def positions(self) -> Rows:
        """Return the position of the query in each row, in rows if a token has several."""
        first = self.first_position()
        return self.token_indices() + first

    def first_position(self) -> Scalar:
        """Return the position of the first query of these rows."""
        return self.work_tile["position"] + self.rank * self.tokens

    def token_indices(self) -> Rows:
        """Return the index of the token in each row, among those of these rows."""
        row = plgpu.broadcasted_iota(jnp.int32, self.spec.s_shape[:1], 0, layout=ROW)
        return row if self.tokens == self.spec.sizes.warpgroup_rows else row & (self.tokens - 1)

    def has_work(self) -> Scalar:
        """Return whether at least one of these rows is valid and the work tile has keys."""
        first, work_tile = self.rank * self.tokens, self.work_tile
        return (work_tile.num > 0) & (first < work_tile["end"]) & (first + self.tokens > work_tile["begin"])

    def tile(self, i: Scalar, masked_ends: MaskedEnds, *, is_first: bool = False) -> "KvTile":
        """Return the i-th KV tile of the work tile.

        Args:
            i: Index of the KV tile among those of the work tile.
            masked_ends: Ends of the visible keys that the tile may contain. Static.
            is_first: Whether it is the rows' first tile, which is entry 0 of a tile list. Static.
        """
        if is_first:
            # Without lists, i may exceed 0; lists start with tile 0.
            entries = self.work_tile.first_entries()
            entries = (entries[0] + i,) if len(entries) == 1 else entries
            return KvTile(self, entries, masked_ends, is_first)
        # Read the entry early, and only if it is used: it comes from global memory.
        is_used = masked_ends is not MaskedEnds.NONE or self.spec.has_alibi or self.spec.has_score_mod
        return KvTile(self, self.work_tile.tile_entries(i) if is_used else (), masked_ends)

    def kv_tile_range(self) -> KvTileRange:
        """Return the range of KV tiles that the rows attend to, and the range of those that need no mask."""
        work_tile = self.work_tile
        if self.spec.has_lists:
            full_begin = jnp.maximum(jnp.minimum(work_tile["num_partial"], work_tile.num), 1)
            return KvTileRange(jnp.int32(0), full_begin, work_tile.num, work_tile.num)
        score, tile, offset = self.spec.score, jnp.int32(self.spec.sizes.tile_kv), work_tile.alignment_offset
        # Positions of the first and of the last row, or of the nearest valid rows.
        first, last = [
            work_tile["position"] + jnp.clip(row, work_tile["begin"], work_tile["end"] - 1)
            for row in (self.rank * self.tokens, self.rank * self.tokens + (self.tokens - 1))
        ]
        # Keys in [full_first_key, full_end_key) are visible to all rows.
        full_first_key, _ = key_range(score, last, work_tile["seq_len"])
        _, full_end_key = key_range(score, first, work_tile["seq_len"])
        full_first_key = jnp.maximum(full_first_key, 0)
        full_end_key = jnp.minimum(full_end_key, work_tile["seq_len"])
        # The work tile has more KV tiles at the end, for the rows of later warpgroups, and with a window at
        # the start, for the rows of earlier warpgroups.
        first_key, _ = key_range(score, first, work_tile["seq_len"])
        _, end_key = key_range(score, last, work_tile["seq_len"])
        end = (
            lax.div(jnp.clip(end_key, 0, work_tile["seq_len"]) + offset + (tile - 1), tile) - work_tile.first
        )
        end = jnp.clip(end, 1, work_tile.num)
        begin, full_begin = jnp.int32(0), jnp.int32(1)
        if self.spec.has_window:
            begin = jnp.clip(lax.div(jnp.maximum(first_key, 0) + offset, tile) - work_tile.first, 0, end - 1)
            full_begin = lax.div(full_first_key + offset + (tile - 1), tile) - work_tile.first
            full_begin = jnp.clip(full_begin, begin + 1, end)
        full_end = lax.div(jnp.maximum(full_end_key, 0) + offset, tile) - work_tile.first
        return KvTileRange(begin, full_begin, jnp.clip(full_end, full_begin, end), end)


class KvTile(NamedTuple):
    """A KV tile together with the query rows of one warpgroup.

    Attributes:
        rows: Query rows of the warpgroup.
        entries: Entries of the tile list, one per run of consecutive keys, or index of the KV tile without
            lists; () if they are not used.
        masked_ends: Which ends of the visible range may lie in the tile.
        is_first: Whether it is the first tile of a list, whose first runs may be missing. Static.
    """

    rows: QueryRows
    entries: tuple[Scalar, ...]
    masked_ends: MaskedEnds
    is_first: bool = False

    def first_key(self) -> Scalar:
        """Return the position of the first key of a tile of consecutive keys."""
        (start,) = self.run_starts()
        return start

    def run_starts(self) -> tuple[Scalar, ...]:
        """Return the position of the first key of each run of consecutive keys; NO_KEY for missing runs."""
        work_tile = self.rows.work_tile
        starts = [
            work_tile.kv_tile_index(entry) * work_tile.run_length - work_tile.alignment_offset
            for entry in self.entries
        ]
        if self.is_first and len(starts) > 1:
            num_missing = work_tile["num_missing"]
            *others, last = starts  # the last run is never missing
            starts = [jnp.where(run < num_missing, NO_KEY, start) for run, start in enumerate(others)]
            starts.append(last)
        return tuple(starts)

    def run_pairs(self, columns: Callable[[], Tile]) -> tuple[PairTile, ...]:
        """Return the pairs of each run, see `pairs`; a run of 16 keys comes with the 16 keys after it."""
        spec = self.rows.spec
        first_query = self.rows.first_position()
        shape = spec.s_shape[0], max(spec.run_length, WORD_BITS)
        return tuple(self._pairs(first_query, key, columns, shape) for key in self.run_starts())

    def pairs(self, columns: Callable[[], Tile]) -> PairTile:
        """Return the (query, key) pairs of a tile of consecutive keys, which mask functions take.

        Args:
            columns: Function that returns the index of each key within the tile, f32 [rows, tile_kv].
        """
        return self._pairs(self.rows.first_position(), self.first_key(), columns, self.rows.spec.s_shape)

    def _pairs(
        self, first_query: Scalar, first_key: Scalar, columns: Callable[[], Tile], shape: tuple[int, int]
    ) -> PairTile:
        spec = self.rows.spec
        return PairTile(
            head=packed_heads(self.rows.work_tile, spec)[0].head,
            first_query=first_query,
            first_key=first_key,
            columns=columns,
            shape=shape,
            interpret=spec.interpret,
            packed_heads=spec.sizes.pack_gqa,
        )

    def score_tile(self, column_indices: Callable[[], Columns]) -> ScoreTile:
        """Return the pairs of the tile as a score function takes them.

        Args:
            column_indices: Function that returns the index of each key within the tile, f32 [tile_kv].
        """
        rows, spec = self.rows, self.rows.spec
        tile_kv = spec.sizes.tile_kv

        def columns() -> Columns:
            return plgpu.broadcasted_iota(jnp.int32, (tile_kv,), 0, layout=COLUMN)

        has_packed_heads = spec.sizes.pack_gqa > 1
        return ScoreTile(
            shape=spec.s_shape,
            request=rows.work_tile["req"],
            head=PairValue(lambda: rows.per_head(lambda head: head), (0,) if has_packed_heads else ()),
            query=Positions(rows.first_position(), rows.token_indices, (0,), rows.tokens),
            key=Positions(self.first_key(), columns, (1,), tile_kv, column_indices),
            query_axis=0,
            is_interpreted=spec.is_interpreted,
        )
