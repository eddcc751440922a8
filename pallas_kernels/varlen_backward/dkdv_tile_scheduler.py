"""Work tiles of the dk/dv kernel, their assignment to thread blocks, and the query tiles of each."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.shared.arithmetic import alternating_rounds
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_backward.dkdv_spec import DkDvSpec
from pallas_kernels.varlen_backward.refs import DkDvScheduleRefs, QueryListRefs
from pallas_kernels.varlen_backward.schedule import COLUMNS
from pallas_kernels.varlen_prefill.tile_scheduler import align_row


class QuerySteps(NamedTuple):
    """Query tiles that a work tile visits for one query head, one per step.

    Attributes:
        num_masked: Number of steps that need a mask; they come first.
        num_steps: Number of steps.
        entry: Function from the number of a step to the index of its query tile in the request. With tile
            lists, it returns the entry with this index in the list, see BackwardTileLists.entries.
        num_missing: Number of entries that the first tile lacks if several fill a tile. The last entry of a
            tile is never missing.
        runs_per_tile: Number of entries that fill a tile. Static.
    """

    num_masked: Scalar
    num_steps: Scalar
    entry: Callable[[Scalar], Scalar]
    num_missing: Scalar | int = 0
    runs_per_tile: int = 1

    def runs(self, i: Scalar) -> tuple[Scalar, ...]:
        """Return the index of each run of consecutive queries of step `i`; entry 0 for a missing one."""
        if self.runs_per_tile == 1:
            return (entry_tile(self.entry(i)),)
        first = i * self.runs_per_tile - self.num_missing
        return tuple(entry_tile(self.entry(jnp.maximum(first + run, 0))) for run in range(self.runs_per_tile))


class DkDvWorkTile:
    """A tile of keys of one KV head, and one split of its lists.

    `work_tile[name]` is the value of a column of the schedule's table.

    Attributes:
        row: Row of the tile in the schedule's table.
        grad_head: Index of the work tile's gradients among the heads of the outputs.
        kv_head: KV head.
        split: Index of the split of the lists that the work tile visits; None if they are not split.
    """

    def __init__(
        self, row: Scalar, grad_head: Scalar, table_row: Ref, lists: QueryListRefs | None, spec: DkDvSpec
    ):
        """Create the work tile; `table_row` is its row of the table in global or shared memory."""
        self.row, self.grad_head, self.lists, self.spec = row, grad_head, lists, spec
        self._table_row = table_row
        self.kv_head, self.split = grad_head, None
        if spec.sizes.list_splits > 1:
            splits = jnp.int32(spec.sizes.list_splits)
            self.kv_head, self.split = lax.div(grad_head, splits), lax.rem(grad_head, splits)

    def __getitem__(self, name: str) -> Scalar:
        return self._table_row[COLUMNS.index(name)]

    def head(self, index: Scalar) -> Scalar:
        """Return the number of the query head with index `index` in the group."""
        return self.kv_head * self.spec.group + index

    def steps(self, index: Scalar) -> QuerySteps:
        """Return the steps for the query head with index `index` in the group."""
        if self.lists is None:
            return QuerySteps(
                self["num_partial_first"] + self["num_partial_last"],
                self["num_query_tiles"],
                self._query_tile,
            )
        q_heads = self.spec.kv_heads * self.spec.group
        list_row, lists = self.row * q_heads + self.head(index), self.lists
        num_partial = lists.num_partial[list_row]
        num_entries, runs_per_tile = num_partial + lists.num_full[list_row], self.spec.runs_per_tile

        def entry(i: Scalar) -> Scalar:
            return lists.entries[list_row, i]

        if runs_per_tile == 1:
            return self._steps_of_split(QuerySteps(num_partial, num_entries, entry))
        # The first tile has a mask in any case, so it is the one that lacks entries.
        num_missing = (0 - num_entries) & (runs_per_tile - 1)
        num_masked, num_steps = (
            lax.div(num + num_missing + (runs_per_tile - 1), jnp.int32(runs_per_tile))
            for num in (num_partial, num_entries)
        )
        return self._steps_of_split(QuerySteps(num_masked, num_steps, entry, num_missing, runs_per_tile))

    def _steps_of_split(self, steps: QuerySteps) -> QuerySteps:
        """Return the steps of a list that belong to the work tile's split."""
        if self.split is None:
            return steps
        splits = jnp.int32(self.spec.sizes.list_splits)
        begin, end = (lax.div(steps.num_steps * split, splits) for split in (self.split, self.split + 1))
        # Only the list's first tile lacks entries.
        first_entry = begin * steps.runs_per_tile - jnp.where(begin > 0, steps.num_missing, 0)
        return QuerySteps(
            jnp.clip(steps.num_masked - begin, 0, end - begin),
            end - begin,
            lambda i: steps.entry(first_entry + i),
            jnp.where(begin > 0, 0, steps.num_missing),
            steps.runs_per_tile,
        )

    def _query_tile(self, i: Scalar) -> Scalar:
        """Return the query tile of step `i` without lists: partial tiles of both ends, then full ones."""
        num_first, num_last = self["num_partial_first"], self["num_partial_last"]
        num_masked = num_first + num_last
        num_full = self["num_query_tiles"] - num_masked
        index = jnp.where(i < num_first, i, jnp.where(i < num_masked, i + num_full, i - num_last))
        return self["first_query_tile"] + index

    def query_row(self, run: Scalar) -> Scalar:
        """Return the row, in the array of queries, of the first query of a tile or run of queries."""
        return align_row(self["first_query_row"] + run * self.spec.run_length)

    def position(self, run: Scalar) -> Scalar:
        """Return the position of the first query of a tile or run, maybe before the request's first one."""
        return self["query_position"] + run * self.spec.run_length


class DkDvTileScheduler:
    """Assignment of the work tiles of a call to thread blocks, or to their teams of warpgroups."""

    def __init__(self, schedule: DkDvScheduleRefs, ctas: int, spec: DkDvSpec):
        self.schedule, self.ctas, self.spec = schedule, ctas, spec
        self.num_work_tiles = schedule.num_valid[0] * spec.grad_heads

    def assignment(self, team: Scalar | int) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """Return the number of work tiles of a team, and a function from round to work tile index."""
        teams = self.spec.sizes.teams
        worker = lax.axis_index("cta") * teams + team
        rounds, position = alternating_rounds(self.num_work_tiles, worker, self.ctas * teams)
        return rounds, lambda r: self.schedule.order[position(r)]

    def work_tile(self, index: Scalar, table_row: Ref = None) -> DkDvWorkTile:
        """Return the work tile with an index from the schedule's `order`.

        Args:
            index: Index of the work tile.
            table_row: Its row of the table in shared memory; None to read it from global memory.
        """
        grad_heads = jnp.int32(self.spec.grad_heads)
        row = lax.div(index, grad_heads)
        table_row = self.schedule.table.at[row] if table_row is None else table_row
        return DkDvWorkTile(row, lax.rem(index, grad_heads), table_row, self.schedule.lists, self.spec)


def entry_tile(entry: Scalar) -> Scalar:
    """Return the index of the query tile in a list entry, without the bits of the warpgroups."""
    return entry & ((1 << QUERY_BLOCK_SHIFT) - 1)


def is_needed_by(warpgroup: Scalar, entry: Scalar) -> Scalar:
    """Return whether a query tile attends to the keys of a warpgroup; see DkDvSpec.has_warpgroup_bits."""
    return lax.shift_right_logical(entry, QUERY_BLOCK_SHIFT + warpgroup) & 1 != 0
