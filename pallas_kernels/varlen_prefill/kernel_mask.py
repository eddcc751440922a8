"""The interface between masks and kernels: a mask's arrays, and the visible pairs of a tile."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.bit_mask import WORD_BITS, apply_bit_mask, unpack_bit_mask
from pallas_kernels.ptx.look_up import look_up
from pallas_kernels.shared.layouts import COLUMN, ROW
from pallas_kernels.shared.types import Columns, Index, Interpret, Ref, Rows, Scalar, Tile

MAX_ROWS = 128  # Maximum number of queries or keys per tile.

# One bit per element of a tile: word w of a row is an int32 whose bit i belongs to column 32 w + i.
type Words = tuple[Rows, ...]

type LoadedMask = Any  # the result of KernelMask.load, which only KernelMask.visible interprets

type VisiblePairs = Any  # Words if KernelMask.is_words, else a bool Tile


def lowest_bits(num: Rows) -> Rows:
    """Return words whose lowest `num` bits, 0 to 32, are set."""
    return jnp.where(num == WORD_BITS, -1, (jnp.int32(1) << (num & (WORD_BITS - 1))) - 1)


def join_half_words(words: Sequence[Rows]) -> Words:
    """Return words of the low halves of two words each."""
    half = WORD_BITS // 2
    return tuple(
        (low & ((1 << half) - 1)) | (high << half) for low, high in zip(words[::2], words[1::2], strict=True)
    )


class KernelMask(abc.ABC):
    """The mask of a tile's pairs as a kernel evaluates it; `mask_policies` has the classes.

    A subclass is a pytree whose leaves are arrays of 32-bit elements. They stay in global memory: in a kernel
    the leaves are references.
    """

    @property
    def is_words(self) -> bool:
        """Whether `visible` returns Words."""
        return True

    def load(self, tile: "PairTile", req: Scalar) -> LoadedMask:
        """Load the elements of the arrays that a tile of the request `req` needs.

        Kernels call it before the tile's scores are ready; without arrays they pass () to `visible` instead.
        """
        return ()

    @abc.abstractmethod
    def visible(self, tile: "PairTile", loaded: LoadedMask) -> VisiblePairs:
        """Return the visible pairs, from the result of `load`: Words, or bools that broadcast to the tile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTile:
    """A tile of (query, key) pairs with one query per row and one key per column; traced.

    Attributes:
        head: Query head; the first one with packed heads, which share their mask.
        first_query: Position of the first query. It may lie before the request's first query, and later
            queries of the tile after its last.
        first_key: Position of the first key. Keys of the tile may lie before or after the request's keys.
        columns: Function that returns the index of each column within the tile, f32, of the tile's shape.
        shape: Numbers of rows and columns. Static.
        interpret: Interpret-mode parameters, or None. Static.
        packed_heads: Number of query heads whose queries the rows hold, one head after another. Static.
    """

    has_key_rows: ClassVar[bool] = False

    head: Scalar
    first_query: Scalar
    first_key: Scalar
    columns: Callable[[], Tile]
    shape: tuple[int, int]
    interpret: Interpret
    packed_heads: int = 1

    @property
    def first_row(self) -> Scalar:
        """Position of the query or key in the first row."""
        return self.first_query

    @property
    def first_column(self) -> Scalar:
        """Position of the query or key in the first column."""
        return self.first_key

    @property
    def row_positions(self) -> Rows:
        """Position of the query or key in each row."""
        return self._row_indices() + self.first_row

    def _row_indices(self) -> Rows:
        """Return the index of each row or, with packed heads, the index of its query among its head's."""
        row = plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=ROW)
        return row if self.packed_heads == 1 else row & (self.distinct_rows - 1)

    @property
    def distinct_rows(self) -> int:
        """Number of rows with different positions."""
        return self.shape[0] // self.packed_heads

    def broadcast_queries(self, x: Rows | Columns) -> Tile:
        """Broadcast a value per query to a value per pair."""
        return lax.broadcast_in_dim(x, self.shape, [1 if self.has_key_rows else 0])

    def broadcast_keys(self, x: Rows | Columns) -> Tile:
        """Broadcast a value per key to a value per pair."""
        return lax.broadcast_in_dim(x, self.shape, [0 if self.has_key_rows else 1])

    @property
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.broadcast_rows(self.row_positions)

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.columns().astype(jnp.int32) + self.first_key

    def broadcast_rows(self, x: Rows) -> Tile:
        """Broadcast a value per row to a value per pair."""
        return lax.broadcast_in_dim(x, self.shape, [0])

    def fill_rows(self, x: Scalar) -> Rows:
        """Return a vector with one element per row, all equal to `x`."""
        # Not `row_positions * 0 + x`: Pallas finds no layout for rows that nothing uses.
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[:1], []), ROW)

    def load_rows(self, ref: Ref, index: Index, first: Scalar) -> Rows:
        """Load a value per row: `ref[*index, first + row]`; packed heads have equal values."""
        if self.packed_heads > 1:
            return self.look_up_rows(ref, index, self._row_indices() + first)
        return plgpu.load(ref.at[(*index, pl.ds(first, self.shape[0]))], layout=ROW, optimized=False)

    def look_up_rows(self, ref: Ref, index: Index, elements: Rows) -> Rows:
        """Load a value per row: `ref[*index, element]`, with the element of each row."""
        return look_up(ref.at[index], elements, layout=ROW, is_interpreted=bool(self.interpret))

    def load_queries(self, ref: Ref, index: Index, first: Scalar) -> Rows | Columns:
        """Load a value per query: `ref[*index, first + query]`."""
        return (self.load_columns if self.has_key_rows else self.load_rows)(ref, index, first)

    def load_keys(self, ref: Ref, index: Index, first: Scalar) -> Rows | Columns:
        """Load a value per key: `ref[*index, first + key]`."""
        return (self.load_rows if self.has_key_rows else self.load_columns)(ref, index, first)

    def load_columns(self, ref: Ref, index: Index, first: Scalar) -> Columns:
        """Load a value per column: `ref[*index, first + column]`."""
        return plgpu.load(ref.at[(*index, pl.ds(first, self.shape[1]))], layout=COLUMN, optimized=False)

    def words_in_range(self, low: Rows | None, high: Rows) -> Words:
        """Return bit words in which the bits of each row's columns [low, high) are set; low=None means 0."""
        words = []
        for begin in range(0, self.shape[1], WORD_BITS):
            word = lowest_bits(jnp.clip(high - begin, 0, WORD_BITS))
            words.append(word if low is None else word & ~lowest_bits(jnp.clip(low - begin, 0, WORD_BITS)))
        return tuple(words)

    def unpack_bit_mask(self, words: Words) -> Tile:
        """Return whether each pair's bit is set, a bool array of the tile's shape."""
        return unpack_bit_mask(words, shape=self.shape, is_interpreted=bool(self.interpret))

    def masked(self, s: Tile, words: Words) -> Tile:
        """Return the scores with -inf for pairs whose bits are not set."""
        return apply_bit_mask(s, words, is_interpreted=bool(self.interpret))
