"""The subclasses of KernelMask: windows, ranges, bits of blocks and pairs, slashes, and compositions."""

import dataclasses
import functools
import itertools
import operator
from typing import Any, NamedTuple, dataclass_transform, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.shared import floor_div, full_like, normalize_window_side
from pallas_kernels.shared.types import Ref, Rows, Scalar
from pallas_kernels.varlen_prefill.kernel_mask import (
    MAX_ROWS,
    WORD_BITS,
    KernelMask,
    PairTile,
    Words,
    lowest_bits,
)

HALF = WORD_BITS // 2
MAX_COLUMN_BLOCKS = HALF + 1  # Block bits in a word, from any position of its first half on.
# Number of row blocks per tile up to which each word is read once for all rows; else each row looks up its
# own. With lookups, gradients of blocks of 16 x 16, five per tile, take 0.89 times as long
# (backward-word-lookups), and prefill under a mask of each token 0.91 times (forward-heads-as-rows).
MAX_UNIFORM_ROW_BLOCKS = 2
ALL_COLUMNS = 2**28  # size of a block that holds all columns


def static() -> Any:
    """Declare a hashable field of a policy's structure: changing it recompiles."""
    return dataclasses.field(metadata={"static": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def policy[T](cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree; fields made by `static()` are structure."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


class Lines(NamedTuple):
    """Numbers of requests and query heads that have a line of an array each; None if all share a line."""

    num_reqs: int | None
    num_heads: int | None

    def line_of(self, req: Any, head: Any) -> Any:
        """Return the index of a request's and a query head's line. Requests past the last share its line."""
        if self.num_reqs is None:
            return jnp.int32(0) if self.num_heads is None else head
        req = jnp.minimum(req, self.num_reqs - 1)
        return req if self.num_heads is None else req * self.num_heads + head


@policy
class WindowWords(KernelMask):
    """A sliding window.

    Attributes:
        left: Number of visible keys before the query; None = unlimited.
        right: Number of visible keys after the query; None = unlimited.
    """

    left: int | None = static()
    right: int | None = static()

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Words:
        left, right = normalize_window_side(self.left), normalize_window_side(self.right)
        diagonal = tile.row_positions - tile.first_column
        before, after = (right, left) if tile.has_key_rows else (left, right)
        high = tile.fill_rows(jnp.int32(tile.shape[1])) if after is None else diagonal + (after + 1)
        return tile.words_in_range(None if before is None else diagonal - before, high)


@policy
class RowRanges(KernelMask):
    """One range of visible columns per row, read from arrays that start at position -MAX_ROWS.

    Attributes:
        first: Position of the first visible column for the row at each position, [lines, positions]; None =
            the tile's first column.
        end: One past the last visible column; None = all columns.
        lines: Lines of the arrays. Static.
        num_positions: Position from which on all rows are alike; None if the arrays hold all rows. Static.
    """

    first: Ref
    end: Ref
    lines: Lines = static()
    num_positions: int | None = static()

    @override
    def load(self, tile: PairTile, req: Scalar) -> Any:
        line = (self.lines.line_of(req, tile.head),)
        start = jnp.maximum(tile.first_row, -MAX_ROWS)  # All rows before position 0 are alike.
        if self.num_positions is not None:
            start = jnp.clip(tile.first_row, -MAX_ROWS, self.num_positions)
        start = start + MAX_ROWS
        return tuple(
            None if ref is None else tile.load_rows(ref, line, start) for ref in (self.first, self.end)
        )

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Words:
        low, high = (None if x is None else x - tile.first_column for x in loaded)
        return tile.words_in_range(low, tile.fill_rows(jnp.int32(tile.shape[1])) if high is None else high)


@policy
class PrefixWords(KernelMask):
    """All pairs among the first positions of a request; `lengths` [reqs] or [1] is their number."""

    lengths: Ref

    @override
    def load(self, tile: PairTile, req: Scalar) -> Any:
        return self.lengths[jnp.minimum(req, self.lengths.shape[0] - 1)]

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Words:
        high = jnp.where(tile.row_positions < loaded, loaded - tile.first_column, 0)
        return tile.words_in_range(None, high)


def pack_words(marks: Bool[Array, "*rows n"]) -> Int32[Array, "*rows words"]:
    """Pack marks into n + 31 overlapping words: bit j of word i is mark `i - 31 + j`."""
    ends = [(0, 0)] * (marks.ndim - 1) + [(WORD_BITS - 1, WORD_BITS - 1)]
    words, bits = jnp.pad(marks, ends).astype(jnp.uint32), 1
    while bits < WORD_BITS:
        words, bits = words[..., :-bits] | (words[..., bits:] << bits), 2 * bits
    return lax.bitcast_convert_type(words, jnp.int32)


@policy
class SlashWords(KernelMask):
    """Visible keys and visible distances from a query to a key.

    Attributes:
        columns: Words of the visible keys, see `make`.
        slashes: Words of the visible distances.
        hidden: Words of the keys that distances do not make visible, stored like `columns`; None for none.
        column_lines: Lines of `columns` and `hidden`. Static.
        slash_lines: Lines of `slashes`. Static.
        num_columns: Number of positions of the keys. Static.
        num_slashes: Number of distances. Static.
    """

    columns: Ref
    slashes: Ref
    hidden: Ref
    column_lines: Lines = static()
    slash_lines: Lines = static()
    num_columns: int = static()
    num_slashes: int = static()

    @classmethod
    def make(
        cls,
        columns: Bool[Array, "lines positions"],
        slashes: Bool[Array, "lines distances"],
        hidden: Bool[Array, "lines positions"] | None,
        *,
        lines: tuple[Lines, Lines],
        has_key_rows: bool,
    ) -> "SlashWords":
        """Pack the marks of keys and distances for tiles whose rows are keys, or queries.

        With queries as rows, a word per key holds whether it and the 31 keys after it are marked, and a word
        per distance whether it and the 31 smaller ones are, the smallest in the highest bit. With keys as
        rows, a word per key holds its mark in all bits, and a word per distance those of it and the 31
        greater ones.
        """

        def key_words(marks: Array) -> Array:
            if has_key_rows:
                return jnp.pad(0 - marks.astype(jnp.int32), ((0, 0), (MAX_ROWS, MAX_ROWS)))
            return jnp.pad(pack_words(marks), ((0, 0), (1, 1)))  # an empty word at either end

        # Words of key rows are stored from the greatest distance down: the next key's distance is smaller.
        words = pack_words(slashes)[:, ::-1] if has_key_rows else pack_words(slashes[:, ::-1])[:, ::-1]
        return cls(
            columns=key_words(columns),
            slashes=jnp.pad(words, ((0, 0), (MAX_ROWS, MAX_ROWS))),
            hidden=None if hidden is None else key_words(hidden),
            column_lines=lines[0],
            slash_lines=lines[1],
            num_columns=columns.shape[1],
            num_slashes=slashes.shape[1],
        )

    @override
    def load(self, tile: PairTile, req: Scalar) -> Words:
        column_line = self.column_lines.line_of(req, tile.head)
        slash_line = self.slash_lines.line_of(req, tile.head)
        load_words = self._load_key_rows if tile.has_key_rows else self._load_query_rows
        return load_words(tile, column_line, slash_line)

    def _load_query_rows(self, tile: PairTile, column_line: Scalar, slash_line: Scalar) -> Words:
        """Load the words of a tile whose rows are queries: all rows share the words of the keys."""
        words = []
        for begin in range(0, tile.shape[1], WORD_BITS):
            key = tile.first_key + begin
            index = column_line, jnp.clip(key, -WORD_BITS, self.num_columns) + WORD_BITS
            start = self._clip_to_slashes(tile.first_query - key)
            column = self.columns[index]
            word = tile.load_rows(self.slashes, (slash_line,), start + MAX_ROWS)
            if self.hidden is not None:
                word = word & ~self.hidden[index]
            words.append(word | column)
        return tuple(words)

    def _load_key_rows(self, tile: PairTile, column_line: Scalar, slash_line: Scalar) -> Words:
        """Load the words of a tile whose rows are keys: a row has one word of its key for all queries."""
        first = jnp.clip(tile.first_key, -MAX_ROWS, self.num_columns) + MAX_ROWS
        column = tile.load_rows(self.columns, (column_line,), first)
        hidden = None if self.hidden is None else tile.load_rows(self.hidden, (column_line,), first)
        words = []
        for begin in range(0, tile.shape[1], WORD_BITS):
            distance = tile.first_query + begin - tile.first_key
            start = self._clip_to_slashes(self.num_slashes - 1 - distance)
            word = tile.load_rows(self.slashes, (slash_line,), start + MAX_ROWS)
            if hidden is not None:
                word = word & ~hidden
            words.append(word | column)
        return tuple(words)

    def _clip_to_slashes(self, start: Scalar) -> Scalar:
        """Clip the index of a tile's first word of distances to the words of a padded line."""
        return jnp.clip(start, -MAX_ROWS, self.num_slashes + WORD_BITS - 1)

    @override
    def visible(self, tile: PairTile, loaded: Words) -> Words:
        return loaded


@policy
class BlockBits(KernelMask):
    """A bit per block of rows and block of columns.

    Attributes:
        words: Bits of 32 column blocks from every 16th on, [reqs, heads, words, row_blocks], so that one word
            holds the 17 blocks from any position on.
        first_q_block: Index of the array's first block of queries, [reqs]; None = 0.
        row_block: Number of rows per block; None = all rows share one block. Static.
        column_block: Number of columns per block; ALL_COLUMNS = all columns share one block. Static.
        group: Number of query heads that share an entry. Static.
        is_aligned: Whether tiles begin with a block or lie within one, so that the columns of a tile that a
            bit covers are static. Static.
    """

    words: Ref
    first_q_block: Ref
    row_block: int | None = static()
    column_block: int = static()
    group: int = static()
    is_aligned: bool = static()

    @staticmethod
    def pack(blocks: Bool[Array, "reqs heads row_blocks blocks"]) -> Int32[Array, "reqs heads _ row_blocks"]:
        """Return `words` for an array of blocks."""
        num_halves = -(-blocks.shape[-1] // HALF)
        padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, (num_halves + 2) * HALF - blocks.shape[-1])))
        bits = padded.reshape(*blocks.shape[:-1], -1, HALF).astype(jnp.int32)
        halves = (bits << lax.broadcasted_iota(jnp.int32, bits.shape, 4)).sum(axis=-1, dtype=jnp.int32)
        return jnp.swapaxes(halves[..., :-1] | (halves[..., 1:] << HALF), 2, 3)

    def _first_column_block(self, tile: PairTile, first_block: Scalar | None) -> Scalar:
        """Return the index of the tile's first column block, not before the array's first one."""
        block = _quotient(jnp.maximum(tile.first_column, 0), self.column_block)
        return block if first_block is None else jnp.maximum(block, first_block)

    @override
    def load(self, tile: PairTile, req: Scalar) -> tuple[Rows, Scalar | None]:
        reqs, _, num_words, row_blocks = self.words.shape
        head, first_row_block, first_column_block = _quotient(tile.head, self.group), jnp.int32(0), None
        if self.first_q_block is not None:
            first_q_block = self.first_q_block[jnp.minimum(req, self.first_q_block.shape[0] - 1)]
            if tile.has_key_rows:
                first_column_block = first_q_block
            else:
                first_row_block = first_q_block
        begin = self._first_column_block(tile, first_column_block)
        if first_column_block is not None:
            begin = begin - first_column_block
        line = jnp.minimum(req, reqs - 1), head, jnp.minimum(_quotient(begin, HALF), num_words - 1)

        def word(row_block: Any) -> Any:
            """Return the word of a row block or, for one row block per row, a word per row."""
            is_inside = (row_block >= 0) & (row_block < row_blocks)
            row_block = jnp.clip(row_block, 0, row_blocks - 1)
            stored = (
                tile.look_up_rows(self.words, line, row_block)
                if row_block.ndim
                else self.words[*line, row_block]
            )
            shift = lax.rem(begin, full_like(begin, HALF))
            return jnp.where(
                is_inside, lax.shift_right_logical(stored, jnp.broadcast_to(shift, stored.shape)), 0
            )

        if self.row_block is None:
            return tile.fill_rows(word(jnp.int32(0))), first_column_block
        rows, tile_block = tile.row_positions, floor_div(tile.first_row, self.row_block)
        num_row_blocks = (tile.distinct_rows + self.row_block - 2) // self.row_block + 1
        if num_row_blocks > MAX_UNIFORM_ROW_BLOCKS:
            return word(floor_div(rows, self.row_block) - first_row_block), first_column_block
        bits = tile.fill_rows(word(tile_block - first_row_block))
        for index in range(1, num_row_blocks):
            is_reached = rows >= (tile_block + index) * self.row_block
            bits = jnp.where(is_reached, word(tile_block + index - first_row_block), bits)
        return bits, first_column_block

    @override
    def visible(self, tile: PairTile, loaded: tuple[Rows, Scalar | None]) -> Words:
        bits, first_block = loaded
        if self.is_aligned:
            return self._expand_aligned(tile, bits)
        first_block = self._first_column_block(tile, first_block)
        words = [jnp.zeros_like(bits)] * (tile.shape[1] // WORD_BITS)
        for index in range((tile.shape[1] + self.column_block - 2) // self.column_block + 1):
            is_visible = 0 - (lax.shift_right_logical(bits, jnp.int32(index)) & 1)  # all bits or none
            begin = (first_block + index) * self.column_block - tile.first_column
            for n in range(len(words)):
                low, high = (
                    lowest_bits(jnp.clip(end - n * WORD_BITS, 0, WORD_BITS))
                    for end in (begin, begin + self.column_block)
                )
                words[n] = words[n] | (is_visible & (high & ~low))
        return tuple(words)

    def _expand_aligned(self, tile: PairTile, bits: Any) -> Words:
        """Expand bits of blocks to bits of columns."""
        words = [jnp.zeros_like(bits)] * (tile.shape[1] // WORD_BITS)
        for index, begin in enumerate(range(0, tile.shape[1], self.column_block)):
            is_visible = 0 - (lax.shift_right_logical(bits, jnp.int32(index)) & 1)  # all bits or none
            for n in range(len(words)):
                low, high = (
                    min(max(end - n * WORD_BITS, 0), WORD_BITS) for end in (begin, begin + self.column_block)
                )
                if low < high:
                    column_bits = (1 << high) - (1 << low)
                    words[n] = words[n] | (is_visible & np.uint32(column_bits).astype(np.int32))
        return tuple(words)


@policy
class PairBits(KernelMask):
    """A bit per pair, for masks of blocks that are too fine for BlockBits.

    Attributes:
        words: Words of 32 columns of each row, [lines, words, rows]; the arrays hold MAX_ROWS rows and
            columns without bits before and after the mask's. If all queries share a row of keys, this is the
            only row; with keys as rows, there is then one word, which has equal bits.
        first_query: Position of the mask's first query, [reqs]; None = 0.
        lines: Lines of `words`. Static.
        group: Number of query heads that share a line. Static.
        size: Numbers of rows and columns of the mask; None for the queries if they share one row. Static.
        is_aligned: Whether tiles begin at a multiple of 32 columns. Static.
    """

    words: Ref
    first_query: Ref
    lines: Lines = static()
    group: int = static()
    size: tuple[int | None, int | None] = static()
    is_aligned: bool = static()

    @classmethod
    def make(
        cls,
        pairs: Bool[Array, "reqs heads queries keys"],
        *,
        first_query: Int32[Array, " rows"] | None,
        shares_queries: bool,
        num_q_heads: int,
        is_aligned: bool,
        has_key_rows: bool,
    ) -> "PairBits":
        """Pack bits for tiles whose rows are queries, or keys.

        Args:
            pairs: Whether each pair is visible; one query if all share it.
            first_query: Position of the first query, by request; None = 0.
            shares_queries: Whether all queries of a request share a row.
            num_q_heads: Number of query heads.
            is_aligned: Whether tiles begin at a multiple of 32 columns.
            has_key_rows: Whether the rows are keys.
        """
        reqs, heads = pairs.shape[:2]
        queries, keys = (None if shares_queries else pairs.shape[2]), pairs.shape[3]
        margin = (MAX_ROWS, MAX_ROWS)
        if has_key_rows and shares_queries:
            words = 0 - jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), margin)).astype(jnp.int32)
        else:
            pairs = jnp.swapaxes(pairs, 2, 3) if has_key_rows else pairs
            columns = pairs.shape[3] + -pairs.shape[3] % WORD_BITS
            # A tile may begin one column after the mask's and reads one word more than it has.
            after = columns - pairs.shape[3] + MAX_ROWS + 2 * WORD_BITS
            row_margin = (0, 0) if shares_queries else margin
            pairs = jnp.pad(pairs, ((0, 0), (0, 0), row_margin, (MAX_ROWS, after)))
            bits = pairs.reshape(*pairs.shape[:3], -1, WORD_BITS).astype(jnp.int32)
            words = (bits << lax.broadcasted_iota(jnp.int32, bits.shape, 4)).sum(axis=-1, dtype=jnp.int32)
            words = jnp.swapaxes(words, 2, 3)
        return cls(
            words=words.reshape(reqs * heads, *words.shape[2:]),
            first_query=first_query,
            lines=Lines(reqs, heads),
            group=num_q_heads // heads,
            size=(keys, queries) if has_key_rows else (queries, keys),
            is_aligned=is_aligned,
        )

    @override
    def load(self, tile: PairTile, req: Scalar) -> Words:
        line, (num_rows, num_columns) = self.lines.line_of(req, _quotient(tile.head, self.group)), self.size
        first_row, first_column = tile.first_row, tile.first_column
        if self.first_query is not None:
            first_query = self.first_query[jnp.minimum(req, self.first_query.shape[0] - 1)]
            if tile.has_key_rows:
                first_column = first_column - first_query
            else:
                first_row = first_row - first_query

        def load(word: Any) -> Any:
            if num_rows is None:
                return tile.fill_rows(self.words[line, word, 0])
            start = jnp.clip(first_row, -MAX_ROWS, num_rows) + MAX_ROWS
            return tile.load_rows(self.words, (line, word), start)

        num_words = tile.shape[1] // WORD_BITS
        if num_columns is None:
            return (load(jnp.int32(0)),) * num_words
        column = jnp.clip(first_column, -MAX_ROWS, num_columns + WORD_BITS) + MAX_ROWS
        first_word, shift = column // WORD_BITS, column % WORD_BITS
        words = [load(first_word + i) for i in range(num_words + (not self.is_aligned))]
        if self.is_aligned:
            return tuple(words)
        # The second shift is by 31 minus `shift` bits after one bit, because a shift by 32 is undefined.
        return tuple(
            lax.shift_right_logical(low, shift) | ((high << 1) << (WORD_BITS - 1 - shift))
            for low, high in itertools.pairwise(words)
        )

    @override
    def visible(self, tile: PairTile, loaded: Words) -> Words:
        return loaded


def _quotient(x: Any, size: int) -> Any:
    """Return `x // size` for x >= 0."""
    return lax.div(x, full_like(x, size))


@policy
class Joined(KernelMask):
    """The intersection of masks, or their union; as words where all of them are."""

    operands: tuple[KernelMask, ...]
    is_union: bool = static()

    @property
    @override
    def is_words(self) -> bool:
        return all(operand.is_words for operand in self.operands)

    @override
    def load(self, tile: PairTile, req: Scalar) -> Any:
        return tuple(operand.load(tile, req) for operand in self.operands)

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Any:
        join = operator.or_ if self.is_union else operator.and_
        words: list[Words] = []
        pairs: list[Any] = []
        loaded = loaded or ((),) * len(self.operands)  # () without arrays
        for operand, x in zip(self.operands, loaded, strict=True):
            (words if operand.is_words else pairs).append(operand.visible(tile, x))
        if words:
            joined = tuple(functools.reduce(join, column) for column in zip(*words, strict=True))
            if not pairs:
                return joined
            pairs.append(tile.unpack_bit_mask(joined))
        return functools.reduce(join, pairs)


@policy
class Inverted(KernelMask):
    """The complement of a mask."""

    operand: KernelMask

    @property
    @override
    def is_words(self) -> bool:
        return self.operand.is_words

    @override
    def load(self, tile: PairTile, req: Scalar) -> Any:
        return self.operand.load(tile, req)

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Any:
        inverse = self.operand.visible(tile, loaded)
        return tuple(~word for word in inverse) if self.is_words else ~inverse
