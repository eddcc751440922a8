"""What a thread block works on: items, which are tiles of keys of one kv head, and their steps."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_backward.schedule import ALIGN, COLUMNS
from pallas_kernels.varlen_backward.spec import BackwardSpec


class Item:
    """A tile of keys of one kv head; traced scalars. Its steps: a tile of queries each, for each query head.

    Attributes:
        kv_head: The head.
    """

    def __init__(self, kv_head: Scalar, row: Ref, spec: BackwardSpec):
        """With its row of the schedule's table, in global or shared memory."""
        self.kv_head, self.row, self.spec = kv_head, row, spec

    def __getitem__(self, name: str) -> Scalar:
        return self.row[COLUMNS.index(name)]

    @property
    def num_masked(self) -> Scalar:
        """Tiles of queries that do not see all keys; they come first."""
        return self["num_low"] + self["num_high"]

    def tile(self, i: Scalar) -> Scalar:
        """The i-th of its tiles of queries: those to be masked at either end, then those between."""
        num_low, num_high = self["num_low"], self["num_high"]
        num_masked = num_low + num_high
        behind = self["num"] - num_masked
        nth = jnp.where(i < num_low, i, jnp.where(i < num_masked, i + behind, i - num_high))
        return self["first_tile"] + nth

    def query_row(self, tile: Scalar) -> Scalar:
        """Row of a tile's first query."""
        return aligned(self["first_query_row"] + tile * self.spec.sizes.tile_q)

    def position(self, tile: Scalar) -> Scalar:
        """Its position in the request; before the first query for rows that are not the request's."""
        return self["query_position"] + tile * self.spec.sizes.tile_q

    def head(self, nth: Scalar) -> Scalar:
        """The n-th query head of the group."""
        return self.kv_head * self.spec.group + nth


class Worklist:
    """The items of a step, and which of them a thread block takes, the longest first."""

    def __init__(self, table: Ref, num_live: Ref, spec: BackwardSpec):
        self.table, self.spec = table, spec
        self.num_items = num_live[0] * spec.kv_heads

    def rounds(self) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
        """How many items this thread block has, and the function from place among these to number.

        Thread blocks take items in turn, every other round in the opposite order, so that their shares are
        equal. Heads of a tile follow each other, so that tiles at work share queries in L2.
        """
        cta, ctas = lax.axis_index("cta"), jnp.int32(self.spec.sizes.ctas)
        full_rounds = lax.div(self.num_items, ctas)
        place = lambda r: r * ctas + jnp.where(lax.rem(r, jnp.int32(2)) == 0, cta, ctas - 1 - cta)
        return full_rounds + (place(full_rounds) < self.num_items).astype(jnp.int32), place

    def row(self, number: Scalar) -> Scalar:
        """Which row of the table an item's tile has."""
        return lax.div(number, jnp.int32(self.spec.kv_heads))

    def item(self, number: Scalar, row: Ref) -> Item:
        """An item whose row of the table is given."""
        return Item(lax.rem(number, jnp.int32(self.spec.kv_heads)), row, self.spec)


def aligned(row: Scalar) -> Scalar:
    """A row that 8 divides, so that the compiler sees it; multiple_of is not for a single warp."""
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN
