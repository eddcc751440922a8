"""Vertical-slash masks in the form that kernels evaluate: a bit word for 32 pairs of a tile's row."""

from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jattn.masks import GatheredColumns, Mask, UngatheredVerticalSlash, VerticalSlash
from jattn.masks.vertical_slash import UNUSED_POSITION, flatten_lines, line_index
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels.varlen_prefill import WORD_BITS, KernelMask, PairTile, Words

MAX_ROWS = 128  # maximum number of queries per tile


def gathers_columns(mask: Mask | None, spec: AttentionSpec) -> TypeGuard[VerticalSlash]:
    """Return whether a layer gathers columns, which requires that visibility follows from positions alone."""
    is_plain = spec.causal and spec.window is None and spec.chunk_size is None and not spec.batch_invariant
    return isinstance(mask, VerticalSlash) and mask.num_gathered > 0 and is_plain


def without_gathering(mask: Mask | None) -> Mask | None:
    """Return the mask with no columns gathered."""
    return replace(mask, num_gathered=0) if isinstance(mask, VerticalSlash) else mask


def pack_words(marks: Bool[Array, "*rows n"]) -> Int32[Array, "*rows words"]:
    """Pack marks into n + 31 overlapping words: bit j of word i is mark `i - 31 + j`."""
    ends = [(0, 0)] * (marks.ndim - 1) + [(WORD_BITS - 1, WORD_BITS - 1)]
    words, bits = jnp.pad(marks, ends).astype(jnp.uint32), 1
    while bits < WORD_BITS:
        words, bits = words[..., :-bits] | (words[..., bits:] << bits), 2 * bits
    return lax.bitcast_convert_type(words, jnp.int32)


def vertical_slash_by_query(mask: VerticalSlash) -> KernelMask:
    """Convert columns and slashes for tiles whose rows are queries.

    A word per key holds whether it and the 31 keys after it are columns. A word per distance holds whether it
    and the 31 smaller distances are slashes, the smallest in the highest bit. Gathered keys, stored like
    columns, are removed from the slashes.
    """
    slashes, rows = flatten_lines(mask.slashes), MAX_ROWS
    num_columns, num_slashes = mask.columns.shape[-1], slashes.shape[1]

    def key_words(marks: Any) -> Array:
        return jnp.pad(pack_words(flatten_lines(marks)), ((0, 0), (1, 1)))  # an empty word at either end

    gathered_words = (key_words(mask.gathered),) if isinstance(mask, UngatheredVerticalSlash) else ()
    slash_words = jnp.pad(pack_words(slashes[:, ::-1])[:, ::-1], ((0, 0), (rows, rows)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        column_line, slash_line = (line_index(x, row, tile.head) for x in (mask.columns, mask.slashes))
        words = []
        for begin in range(0, tile.shape[1], WORD_BITS):
            key = tile.first_key + begin
            index = column_line, jnp.clip(key, -WORD_BITS, num_columns) + WORD_BITS
            distance = jnp.clip(tile.first_query - key, -rows, num_slashes + WORD_BITS - 1)
            column, word = refs[0][index], tile.load_rows(refs[1], (slash_line,), distance + rows)
            for gathered in refs[2:]:
                word = word & ~gathered[index]
            words.append(word | column)
        return tuple(words)

    arrays = key_words(mask.columns), slash_words, *gathered_words
    return KernelMask(arrays, load, lambda _, words: words, is_words=True)


def vertical_slash_by_key(mask: VerticalSlash) -> KernelMask:
    """Convert columns and slashes for tiles whose rows are keys.

    A word per key holds whether it is a column in all of its bits, and another whether it is gathered. A word
    per distance holds whether it and the 31 greater distances are slashes.
    """
    slashes, rows = flatten_lines(mask.slashes), MAX_ROWS
    num_columns, num_slashes = mask.columns.shape[-1], slashes.shape[1]

    def key_words(marks: Any) -> Array:
        return jnp.pad(0 - flatten_lines(marks).astype(jnp.int32), ((0, 0), (rows, rows)))

    gathered_words = (key_words(mask.gathered),) if isinstance(mask, UngatheredVerticalSlash) else ()
    slash_words = jnp.pad(pack_words(slashes)[:, ::-1], ((0, 0), (rows, rows)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        column_line, slash_line = (line_index(x, row, tile.head) for x in (mask.columns, mask.slashes))
        first = jnp.clip(tile.first_key, -rows, num_columns) + rows
        column = tile.load_rows(refs[0], (column_line,), first)
        gathered, words = [tile.load_rows(ref, (column_line,), first) for ref in refs[2:]], []
        for begin in range(0, tile.shape[1], WORD_BITS):
            # Words are stored from the greatest distance down, since the distance of the next key is smaller.
            start = num_slashes - 1 - (tile.first_query + begin - tile.first_key)
            start = jnp.clip(start, -rows, num_slashes + WORD_BITS - 1) + rows
            word = tile.load_rows(refs[1], (slash_line,), start)
            for gathered_word in gathered:
                word = word & ~gathered_word
            words.append(word | column)
        return tuple(words)

    arrays = key_words(mask.columns), slash_words, *gathered_words
    return KernelMask(arrays, load, lambda _, words: words, is_words=True)


def gathered_columns_by_query(mask: GatheredColumns) -> KernelMask:
    """Convert gathered columns for tiles of queries: a query attends to the first `count` gathered keys."""
    counts = flatten_lines(mask.counts)
    num_positions = counts.shape[1]
    padded = jnp.pad(counts, ((0, 0), (0, MAX_ROWS)), mode="edge")
    padded = jnp.pad(padded, ((0, 0), (MAX_ROWS, 0)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        start = jnp.clip(tile.first_row, -MAX_ROWS, num_positions) + MAX_ROWS
        return tile.load_rows(refs[0], (line_index(mask.counts, row, tile.head),), start)

    def visible(tile: PairTile, counts: Any) -> Words:
        return tile.words_in_range(None, counts - tile.first_column)

    return KernelMask((padded,), load, visible, is_words=True)


def gathered_columns_by_key(mask: GatheredColumns) -> KernelMask:
    """Convert gathered columns for tiles of keys: a key is visible to queries from its position on."""
    positions = flatten_lines(mask.positions)
    num_keys = positions.shape[1]
    padded = jnp.pad(positions, ((0, 0), (MAX_ROWS, MAX_ROWS)), constant_values=UNUSED_POSITION)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        first = jnp.clip(tile.first_row, -MAX_ROWS, num_keys) + MAX_ROWS
        return tile.load_rows(refs[0], (line_index(mask.positions, row, tile.head),), first)

    def visible(tile: PairTile, positions: Any) -> Words:
        return tile.words_in_range(positions - tile.first_column, tile.fill_rows(jnp.int32(tile.shape[1])))

    return KernelMask((padded,), load, visible, is_words=True)
