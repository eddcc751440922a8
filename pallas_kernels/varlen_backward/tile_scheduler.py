"""What a thread block works on: items, which are tiles of keys of one kv head, and their steps."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_backward.refs import DkDvScheduleRefs, QueryListRefs
from pallas_kernels.varlen_backward.schedule import COLUMNS
from pallas_kernels.varlen_backward.spec import BackwardSpec
from pallas_kernels.varlen_prefill.schedule import ALIGN


class QuerySteps(NamedTuple):
    """What an item does for one query head: a tile of queries a step; traced.

    Attributes:
        num_masked: The first so many need a mask.
        num: All of them.
        entry: `entry(i)`: the i-th one's tile, counted in the request, and what a list says of it.
    """

    num_masked: Scalar
    num: Scalar
    entry: Callable[[Scalar], Scalar]

    def tile(self, i: Scalar) -> Scalar:
        """The i-th one's tile."""
        return entry_tile(self.entry(i))


class BackwardWorkTile:
    """A tile of keys of one kv head; traced scalars.

    Attributes:
        kv_head: The head.
    """

    def __init__(
        self, kv_head: Scalar, row: Scalar, columns: Ref, lists: QueryListRefs | None, spec: BackwardSpec
    ):
        """With the number of its row in the schedule's table, and that row, in global or shared memory."""
        self.kv_head, self.row, self.columns, self.lists, self.spec = kv_head, row, columns, lists, spec

    def __getitem__(self, name: str) -> Scalar:
        return self.columns[COLUMNS.index(name)]

    def head(self, nth: Scalar) -> Scalar:
        """The n-th query head of the group."""
        return self.kv_head * self.spec.group + nth

    def steps(self, nth: Scalar) -> QuerySteps:
        """Of the n-th query head of the group."""
        if self.lists is None:
            return QuerySteps(self["num_low"] + self["num_high"], self["num"], self._tile)
        q_heads = self.spec.kv_heads * self.spec.group
        at, lists = self.row * q_heads + self.head(nth), self.lists
        num_partial = lists.num_partial[at]
        return QuerySteps(num_partial, num_partial + lists.num_full[at], lambda i: lists.entries[at, i])

    def _tile(self, i: Scalar) -> Scalar:
        """Without lists: tiles to be masked at either end, then those between."""
        num_low, num_high = self["num_low"], self["num_high"]
        num_masked = num_low + num_high
        behind = self["num"] - num_masked
        nth = jnp.where(i < num_low, i, jnp.where(i < num_masked, i + behind, i - num_high))
        return self["first_tile"] + nth

    def query_row(self, tile: Scalar) -> Scalar:
        """Row of a tile's first query."""
        return align_row(self["first_query_row"] + tile * self.spec.sizes.tile_q)

    def position(self, tile: Scalar) -> Scalar:
        """Its position in the request; before the first query for rows that are not the request's."""
        return self["query_position"] + tile * self.spec.sizes.tile_q


class BackwardTileScheduler:
    """The items of a step, and which of them a thread block takes."""

    def __init__(self, schedule: DkDvScheduleRefs, ctas: int, spec: BackwardSpec):
        self.schedule, self.ctas, self.spec = schedule, ctas, spec
        self.num_items = schedule.num_valid[0] * spec.kv_heads

    def rounds(self) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """How many items this thread block has, and the function from place among these to item.

        Thread blocks take items in turn, every other round in the opposite order, so that their shares are
        equal where the longest come first.
        """
        cta, ctas = lax.axis_index("cta"), jnp.int32(self.ctas)
        full_rounds = lax.div(self.num_items, ctas)
        place = lambda r: r * ctas + jnp.where(lax.rem(r, jnp.int32(2)) == 0, cta, ctas - 1 - cta)
        rounds = full_rounds + (place(full_rounds) < self.num_items).astype(jnp.int32)
        return rounds, lambda r: self.schedule.order[place(r)]

    def item(self, number: Scalar, columns: Ref = None) -> BackwardWorkTile:
        """An item; its row of the table is in `columns`, or in global memory."""
        kv_heads = jnp.int32(self.spec.kv_heads)
        row = lax.div(number, kv_heads)
        columns = self.schedule.table.at[row] if columns is None else columns
        return BackwardWorkTile(lax.rem(number, kv_heads), row, columns, self.schedule.lists, self.spec)


def entry_tile(entry: Scalar) -> Scalar:
    """Which tile of the request an entry is of."""
    return entry & ((1 << QUERY_BLOCK_SHIFT) - 1)


def align_row(row: Scalar) -> Scalar:
    """A row that 8 divides, so that the compiler sees it; multiple_of is not for a single warp."""
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN
