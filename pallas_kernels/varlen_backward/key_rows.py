"""A tile of pairs as masks are asked about it, where a row is a key and a column a query."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Columns, Scalar, Tile
from pallas_kernels.varlen_backward.spec import COLUMN
from pallas_kernels.varlen_prefill import PairTile


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyRows(PairTile):
    """PairTile on its side."""

    has_key_rows: ClassVar[bool] = True

    @property
    def first_row(self) -> Scalar:
        """Position of the first key."""
        return self.first_key

    @property
    def first_column(self) -> Scalar:
        """Position of the first query."""
        return self.first_query

    @property
    def num_queries(self) -> int:
        """Of the tile."""
        return self.shape[1]

    @property
    def queries(self) -> Columns:
        """Position of each query."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=COLUMN) + self.first_query

    def of_queries(self, x: Scalar) -> Columns:
        """One value to that of each query."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[1:], []), COLUMN)

    def wide_queries(self, x: Columns) -> Tile:
        """One value a query to one a pair."""
        return lax.broadcast_in_dim(x, self.shape, [1])

    @property
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.columns().astype(jnp.int32) + self.first_query

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.wide(self.rows)
