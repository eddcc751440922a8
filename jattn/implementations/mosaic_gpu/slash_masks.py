"""Columns and slashes as kernels take them, gathered columns among them: a word for 32 pairs of a row."""

from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jattn.masks import GatheredColumns, Mask, UngatheredVerticalSlash, VerticalSlash
from jattn.masks.vertical_slash import UNUSED_POSITION, flatten_lines, line_index
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels.varlen_prefill import WORD_BITS, KernelMask, PairTile, Words

MAX_ROWS = 128  # queries of a tile


def gathers(mask: Mask | None, spec: AttentionSpec) -> TypeGuard[VerticalSlash]:
    """Whether a layer's columns are gathered: what a query sees of these must follow from where it stands."""
    is_plain = spec.causal and spec.window is None and spec.chunk_size is None and not spec.batch_invariant
    return isinstance(mask, VerticalSlash) and mask.num_gathered > 0 and is_plain


def in_place(mask: Mask | None) -> Mask | None:
    """The mask, no columns gathered."""
    return replace(mask, num_gathered=0) if isinstance(mask, VerticalSlash) else mask


def words_of(marks: Bool[Array, "*rows n"]) -> Int32[Array, "*rows words"]:
    """Word i has mark `i - 31 + j` as bit j: so many bits from any place on, n + 31 words."""
    ends = [(0, 0)] * (marks.ndim - 1) + [(WORD_BITS - 1, WORD_BITS - 1)]
    words, bits = jnp.pad(marks, ends).astype(jnp.uint32), 1
    while bits < WORD_BITS:
        words, bits = words[..., :-bits] | (words[..., bits:] << bits), 2 * bits
    return lax.bitcast_convert_type(words, jnp.int32)


def slashes_of_queries(mask: VerticalSlash) -> KernelMask:
    """Of each key 32 columns from it on, of each distance that and 31 smaller ones, the smallest last.

    Of keys that are gathered likewise: no slash is seen there.
    """
    slashes, rows = flatten_lines(mask.slashes), MAX_ROWS
    num_columns, num_slashes = mask.columns.shape[-1], slashes.shape[1]
    of_keys = lambda marks: jnp.pad(words_of(flatten_lines(marks)), ((0, 0), (1, 1)))  # nothing at either end
    of_gathered = (of_keys(mask.gathered),) if isinstance(mask, UngatheredVerticalSlash) else ()
    of_slashes = jnp.pad(words_of(slashes[:, ::-1])[:, ::-1], ((0, 0), (rows, rows)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        of_column, of_slash = (line_index(x, row, tile.head) for x in (mask.columns, mask.slashes))
        words = []
        for begin in range(0, tile.shape[1], WORD_BITS):
            key = tile.first_key + begin
            at = of_column, jnp.clip(key, -WORD_BITS, num_columns) + WORD_BITS
            distance = jnp.clip(tile.first_query - key, -rows, num_slashes + WORD_BITS - 1)
            column, word = refs[0][at], tile.load_rows(refs[1], (of_slash,), distance + rows)
            for gathered in refs[2:]:
                word = word & ~gathered[at]
            words.append(word | column)
        return tuple(words)

    arrays = of_keys(mask.columns), of_slashes, *of_gathered
    return KernelMask(arrays, load, lambda _, words: words, is_words=True)


def slashes_of_keys(mask: VerticalSlash) -> KernelMask:
    """Of each key whether it is a column, in all bits; of each distance that and 31 greater ones.

    And whether a key is gathered, likewise in all bits.
    """
    slashes, rows = flatten_lines(mask.slashes), MAX_ROWS
    num_columns, num_slashes = mask.columns.shape[-1], slashes.shape[1]
    of_keys = lambda marks: jnp.pad(0 - flatten_lines(marks).astype(jnp.int32), ((0, 0), (rows, rows)))
    of_gathered = (of_keys(mask.gathered),) if isinstance(mask, UngatheredVerticalSlash) else ()
    of_slashes = jnp.pad(words_of(slashes)[:, ::-1], ((0, 0), (rows, rows)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        of_column, of_slash = (line_index(x, row, tile.head) for x in (mask.columns, mask.slashes))
        first = jnp.clip(tile.first_key, -rows, num_columns) + rows
        of_rows = lambda ref: tile.load_rows(ref, (of_column,), first)
        column, gathered, words = of_rows(refs[0]), [of_rows(ref) for ref in refs[2:]], []
        for begin in range(0, tile.shape[1], WORD_BITS):
            behind = num_slashes - 1 - (tile.first_query + begin - tile.first_key)  # the next key is nearer
            at = jnp.clip(behind, -rows, num_slashes + WORD_BITS - 1) + rows
            word = tile.load_rows(refs[1], (of_slash,), at)
            for its in gathered:
                word = word & ~its
            words.append(word | column)
        return tuple(words)

    arrays = of_keys(mask.columns), of_slashes, *of_gathered
    return KernelMask(arrays, load, lambda _, words: words, is_words=True)


def gathered_of_queries(mask: GatheredColumns) -> KernelMask:
    """Of each position how many gathered keys a query there sees: the first ones."""
    counts = flatten_lines(mask.counts)
    num_positions = counts.shape[1]
    padded = jnp.pad(counts, ((0, 0), (0, MAX_ROWS)), mode="edge")
    padded = jnp.pad(padded, ((0, 0), (MAX_ROWS, 0)))

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        place = jnp.clip(tile.first_row, -MAX_ROWS, num_positions) + MAX_ROWS
        return tile.load_rows(refs[0], (line_index(mask.counts, row, tile.head),), place)

    def visible(tile: PairTile, counts: Any) -> Words:
        return tile.words_in_range(None, counts - tile.first_column)

    return KernelMask((padded,), load, visible, is_words=True)


def gathered_keys(mask: GatheredColumns) -> KernelMask:
    """Of each gathered key its position: the first that a query may have that sees it."""
    places = flatten_lines(mask.positions)
    num_keys = places.shape[1]
    padded = jnp.pad(places, ((0, 0), (MAX_ROWS, MAX_ROWS)), constant_values=UNUSED_POSITION)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        first = jnp.clip(tile.first_row, -MAX_ROWS, num_keys) + MAX_ROWS
        return tile.load_rows(refs[0], (line_index(mask.positions, row, tile.head),), first)

    def visible(tile: PairTile, places: Any) -> Words:
        return tile.words_in_range(places - tile.first_column, tile.fill_rows(jnp.int32(tile.shape[1])))

    return KernelMask((padded,), load, visible, is_words=True)
