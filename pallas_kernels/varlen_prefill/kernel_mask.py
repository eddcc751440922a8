"""What a mask is to the kernel: arrays, what is read of them for a tile, and who sees whom by that."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.bit_mask import WORD_BITS, apply_bit_mask, unpack_bit_mask
from pallas_kernels.shared.types import Columns, Index, Interpret, Ref, Rows, Scalar, Tile

ROW = plgpu.Layout.WGMMA.reduce(1)


# What a row has of a tile's columns, as bits, one int32 each row: bit i of word w is that of column 32 w + i.
type Words = tuple[Rows, ...]

type LoadedMask = Any  # what a KernelMask's load returned; its sees alone looks into it

type VisiblePairs = Any  # Words where KernelMask.is_words, else a Tile of Bool: its reader knows which


def lowest_bits(num: Rows) -> Rows:
    """The `num` lowest of 32 bits, 0 to 32."""
    return jnp.where(num == WORD_BITS, -1, (jnp.int32(1) << (num & (WORD_BITS - 1))) - 1)


class KernelMask(NamedTuple):
    """Which keys a query sees, as a kernel finds out.

    Attributes:
        arrays: Of 32-bit elements; they stay in global memory.
        load: `load(tile, row of the batch, arrays)`: what is read of them for a tile, before its scores are
            there. Not called where there are none: () then.
        visible: `visible(tile, what was loaded)`: Words, or Bool of the tile's shape.
        is_words: Static: which of the two.
    """

    arrays: tuple[jax.Array, ...]
    load: Callable[["PairTile", Scalar, tuple[Ref, ...]], LoadedMask]
    visible: Callable[["PairTile", LoadedMask], VisiblePairs]
    is_words: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTile:
    """The rows of a warpgroup, which are queries one after the other, and a tile of keys; traced.

    Attributes:
        head: Query head.
        first_query: Position of the first query; may lie before the request, a later one behind it.
        first_key: Position of the first key; likewise.
        columns: The number of each column in the tile, f32, of the tile's shape.
        shape: Static: rows and columns.
        interpret: Static: how the kernel is interpreted, if it is.
    """

    has_key_rows: ClassVar[bool] = False

    head: Scalar
    first_query: Scalar
    first_key: Scalar
    columns: Callable[[], Tile]
    shape: tuple[int, int]
    interpret: Interpret

    @property
    def first_row(self) -> Scalar:
        """Position of the first row."""
        return self.first_query

    @property
    def first_column(self) -> Scalar:
        """Position of the first column."""
        return self.first_key

    @property
    def rows(self) -> Rows:
        """Position of each row."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=ROW) + self.first_row

    @property
    def num_queries(self) -> int:
        """Of the tile."""
        return self.shape[0]

    @property
    def queries(self) -> Rows | Columns:
        """Position of each query."""
        return self.rows

    def of_queries(self, x: Scalar) -> Rows | Columns:
        """One value to that of each query."""
        return self.of_rows(x)

    def wide_queries(self, x: Rows | Columns) -> Tile:
        """One value a query to one a pair."""
        return self.wide(x)

    @property
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.wide(self.rows)

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.columns().astype(jnp.int32) + self.first_key

    def wide(self, x: Rows) -> Tile:
        """One value a row to one a pair."""
        return lax.broadcast_in_dim(x, self.shape, [0])

    def of_rows(self, x: Scalar) -> Rows:
        """One value to that of each row. Not `rows * 0 + x`: Pallas finds no layout for unused rows."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[:1], []), ROW)

    def rows_from(self, ref: Ref, index: Index, first: Scalar) -> Rows:
        """A value for each row: `ref[*index, first + row]`."""
        return plgpu.load(ref.at[(*index, pl.ds(first, self.shape[0]))], layout=ROW, optimized=False)

    def words_between(self, low: Rows | None, high: Rows) -> Words:
        """Columns from `low` of the tile up to `high`, one a row; low None: from the first."""
        words = []
        for begin in range(0, self.shape[1], WORD_BITS):
            word = lowest_bits(jnp.clip(high - begin, 0, WORD_BITS))
            words.append(word if low is None else word & ~lowest_bits(jnp.clip(low - begin, 0, WORD_BITS)))
        return tuple(words)

    def unpack_bit_mask(self, words: Words) -> Tile:
        """Whether a pair's bit is set: Bool, of the tile's shape."""
        return unpack_bit_mask(words, shape=self.shape, is_interpreted=bool(self.interpret))

    def masked(self, s: Tile, words: Words) -> Tile:
        """The scores of pairs whose bits are set, -inf for the others."""
        return apply_bit_mask(s, words, is_interpreted=bool(self.interpret))
