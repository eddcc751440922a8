"""Masks as the prefill kernel takes them: what is stored for it, and what it makes of that for a tile."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.implementations.mosaic_gpu.interleaved_mask import interleaved_mask, why_not_interleaved
from jattn.implementations.mosaic_gpu.slash_masks import (
    MAX_ROWS,
    gathered_keys,
    gathered_of_queries,
    slashes_of_keys,
    slashes_of_queries,
)
from jattn.masks import (
    And,
    BlockMask,
    Causal,
    Document,
    GatheredColumns,
    InterleavedMask,
    Mask,
    MaskFunction,
    Not,
    Or,
    Pairs,
    Prefix,
    ShardedMask,
    VerticalSlash,
    Window,
)
from jattn.masks.base import leaves
from jattn.masks.blocks import max_blocks_per_tile
from jattn.masks.documents import has_contiguous_ids
from jattn.masks.functions import mask_function_jaxpr
from jattn.masks.pairs import floor_div, quotient, remainder
from pallas_kernels.shared import normalize_window_side
from pallas_kernels.varlen_prefill import WARPGROUP_ROWS, WORD_BITS, KernelMask, PairTile, Words

HALF = WORD_BITS // 2
MAX_BLOCKS = HALF + 1  # bits that a word of block bits has from any place in its first half on
BEFORE_ALL = -(2**30)  # where the first document begins: queries may stand before position 0
MAX_TOUCHED = 10  # blocks of queries, by the rows of a tile: a word is read for each


class Call(NamedTuple):
    """What is static of a call besides its mask.

    Attributes:
        num_heads: Query heads and kv heads.
        is_prefill: Whether the queries stand in the prefill region.
        is_packed: Whether keys are not in a paged cache, so that tiles of keys may begin anywhere.
        max_seq_len: Bound of the requests' lengths.
        tile_kv: Keys of a tile.
        has_key_rows: A tile's rows are keys, as varlen_backward's are.
    """

    num_heads: tuple[int, int]
    is_prefill: bool
    is_packed: bool
    max_seq_len: int
    tile_kv: int
    has_key_rows: bool = False


def why_not_kernel_mask(mask: Mask, tile_kv: int, *, rows: int = WARPGROUP_ROWS) -> str | None:
    """Why a kernel cannot compute a mask pair by pair; None if it can.

    Args:
        mask: The mask.
        tile_kv: Keys of a tile.
        rows: Queries of a tile.
    """
    for leaf in leaves(mask):
        if isinstance(leaf, BlockMask):
            if leaf.block_q is not None and max_blocks_per_tile(rows, leaf.block_q) > MAX_TOUCHED:
                few = f"{rows} touch more than {MAX_TOUCHED}"
                return f"there is no kernel for blocks of {leaf.block_q} queries ({few})"
            if max_blocks_per_tile(tile_kv, leaf.block_kv) > MAX_BLOCKS:
                few = f"{tile_kv} touch more than {MAX_BLOCKS}"
                return f"there is no kernel for blocks of {leaf.block_kv} keys ({few})"
        elif isinstance(leaf, ShardedMask):
            return "there is no kernel for patterns that differ from device to device"
        elif isinstance(leaf, InterleavedMask):
            if (reason := why_not_interleaved(leaf)) is not None:
                return reason
        elif isinstance(leaf, Document):
            if not has_contiguous_ids(leaf.ids):
                return "there is no kernel for a Document whose ids are not contiguous"
        elif isinstance(leaf, MaskFunction):
            if any(np.ndim(array) for array in mask_function_jaxpr(leaf).consts):
                return "there is no kernel for a mask function that closes over arrays"
        elif not leaf.is_static and not isinstance(leaf, Prefix | VerticalSlash | GatheredColumns):
            return f"there is no kernel for the arrays of a {type(leaf).__name__}"
    return None


def kernel_mask(mask: Mask, call: Call) -> KernelMask:
    """A mask for the kernel; why_not_kernel_mask is None. Traced."""
    if mask.is_static:
        return _formula(mask, call)
    match mask:
        case And() | Or():
            operands = [_window(operand) or kernel_mask(operand, call) for operand in mask.masks]
            return _joined(operator.and_ if isinstance(mask, And) else operator.or_, operands)
        case Not():
            return _inverted(kernel_mask(mask.masks[0], call))
        case Document():
            return _document(mask, call)
        case Prefix():
            return _prefix(mask)
        case InterleavedMask():
            return interleaved_mask(mask)
        case VerticalSlash():
            return slashes_of_keys(mask) if call.has_key_rows else slashes_of_queries(mask)
        case GatheredColumns():
            return gathered_keys(mask) if call.has_key_rows else gathered_of_queries(mask)
    assert isinstance(mask, BlockMask)
    return _blocks(mask, call)


def _formula(mask: Mask, call: Call) -> KernelMask:
    def visible(tile: PairTile, _: Any) -> Any:
        row = jnp.int32(0)  # no static mask looks at it
        pairs = _PairsOfTile(tile.head, row, None, None, call.num_heads, call.is_prefill)
        pairs.tile = tile
        return mask.visible(pairs)

    return KernelMask((), lambda *_: (), visible, is_words=False)


class _PairsOfTile(Pairs):
    """Pairs whose numbers are made where a mask asks for them: Pallas finds no layout for unused ones."""

    tile: PairTile

    @property
    def query(self) -> Any:
        return self.tile.query

    @property
    def key(self) -> Any:
        return self.tile.key


def _window(mask: Mask) -> KernelMask | None:
    """A formula as bits, as what it is joined with is; None where it has no end."""
    if isinstance(mask, Causal):
        mask = Window(right=0)
    if not isinstance(mask, Window) or mask == Window():
        return None
    left, right = normalize_window_side(mask.left), normalize_window_side(mask.right)

    def visible(tile: PairTile, _: Any) -> Words:
        own = tile.row_positions - tile.first_column
        before, behind = (right, left) if tile.has_key_rows else (left, right)
        high = tile.fill_rows(jnp.int32(tile.shape[1])) if behind is None else own + (behind + 1)
        return tile.words_in_range(None if before is None else own - before, high)

    return KernelMask((), lambda *_: (), visible, is_words=True)


def _joined(join: Callable[[Any, Any], Any], operands: list[KernelMask]) -> KernelMask:
    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        rest, loaded = list(refs), []
        for operand in operands:
            mine, rest = rest[: len(operand.arrays)], rest[len(operand.arrays) :]
            loaded.append(operand.load(tile, row, tuple(mine)))
        return tuple(loaded)

    def visible(tile: PairTile, loaded: Any) -> Any:
        words: list[Words] = []
        pairs: list[Any] = []
        for operand, x in zip(operands, loaded, strict=True):
            (words if operand.is_words else pairs).append(operand.visible(tile, x))
        if words:
            joined = tuple(functools.reduce(join, each) for each in zip(*words, strict=True))
            if not pairs:
                return joined
            pairs.append(tile.unpack_bit_mask(joined))
        return functools.reduce(join, pairs)

    arrays = tuple(x for operand in operands for x in operand.arrays)
    return KernelMask(arrays, load, visible, is_words=all(operand.is_words for operand in operands))


def _inverted(operand: KernelMask) -> KernelMask:
    def visible(tile: PairTile, loaded: Any) -> Any:
        seen = operand.visible(tile, loaded)
        return tuple(~word for word in seen) if operand.is_words else ~seen

    return operand._replace(visible=visible)


def _document(mask: Document, call: Call) -> KernelMask:
    """Of each position its document's first, and one past the last: for queries what for keys."""
    ids = jnp.atleast_2d(jnp.asarray(mask.ids))
    behind_all = call.max_seq_len + MAX_ROWS  # from which a tile's first key, if negative, is taken away
    position = jnp.arange(-MAX_ROWS, behind_all, dtype=jnp.int32)
    at = lambda position: ids[:, jnp.clip(position, 0, ids.shape[1] - 1)]
    begins, ends = at(position) != at(position - 1), at(position) != at(position + 1)
    first = lax.cummax(jnp.where(begins, position, BEFORE_ALL), axis=1)
    end = lax.cummin(jnp.where(ends, position + 1, behind_all), axis=1, reverse=True)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        index = (jnp.minimum(row, ids.shape[0] - 1),)
        place = jnp.maximum(tile.first_row, -MAX_ROWS) + MAX_ROWS  # before 0 all rows are alike
        return tuple(tile.load_rows(ref, index, place) for ref in refs)

    def visible(tile: PairTile, ends: tuple[Any, Any]) -> Words:
        return tile.words_in_range(*(x - tile.first_column for x in ends))

    return KernelMask((first, end), load, visible, is_words=True)


def _prefix(mask: Prefix) -> KernelMask:
    lengths = jnp.atleast_1d(jnp.asarray(mask.length)).astype(jnp.int32)

    def load(_: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        return refs[0][jnp.minimum(row, lengths.shape[0] - 1)]

    def visible(tile: PairTile, length: Any) -> Words:
        return tile.words_in_range(
            None, jnp.where(tile.row_positions < length, length - tile.first_column, 0)
        )

    return KernelMask((lengths,), load, visible, is_words=True)


def _blocks(mask: BlockMask, call: Call) -> KernelMask:
    """Of each block of queries, and of each 16th block of keys, 32 blocks of keys from it on."""
    blocks = jnp.asarray(mask.blocks)
    blocks = blocks.reshape(-1, *blocks.shape[-3:])
    reqs, heads, q_blocks, kv_blocks = blocks.shape
    num_halves = -(-kv_blocks // HALF)
    padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, (num_halves + 2) * HALF - kv_blocks)))
    bits = padded.reshape(reqs, heads, q_blocks, -1, HALF).astype(jnp.int32)
    halves = (bits << lax.broadcasted_iota(jnp.int32, bits.shape, 4)).sum(axis=-1, dtype=jnp.int32)
    words = halves[..., :-1] | (halves[..., 1:] << HALF)
    firsts = None if mask.first_q_block is None else jnp.asarray(mask.first_q_block).astype(jnp.int32)
    block_q, block_kv, group = mask.block_q, mask.block_kv, call.num_heads[0] // heads

    def first_block(tile: PairTile) -> Any:
        return quotient(jnp.maximum(tile.first_key, 0), block_kv)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        head, begin = quotient(tile.head, group), first_block(tile)
        half = jnp.minimum(quotient(begin, HALF), num_halves)

        def word(nth: Any) -> Any:
            is_in = (nth >= 0) & (nth < q_blocks)
            index = jnp.minimum(row, reqs - 1), head, jnp.clip(nth, 0, q_blocks - 1), half
            mine = lax.shift_right_logical(refs[0][index], remainder(begin, HALF))
            return jnp.where(is_in, mine, 0)

        if block_q is None:
            return tile.fill_queries(word(jnp.int32(0)))
        queries, first = tile.query_positions, floor_div(tile.first_query, block_q)
        ahead = jnp.int32(0) if firsts is None else refs[1][jnp.minimum(row, firsts.shape[0] - 1)]
        bits = tile.fill_queries(word(first - ahead))
        for nth in range(1, max_blocks_per_tile(tile.num_queries, block_q)):
            is_there = queries >= (first + nth) * block_q
            bits = jnp.where(is_there, word(first + nth - ahead), bits)
        return bits

    def visible(tile: PairTile, bits: Any) -> Any:
        nth = quotient(tile.key, block_kv) - first_block(tile)
        return lax.shift_right_logical(tile.broadcast_queries(bits), nth) & 1 != 0

    # Where tiles begin with a block or lie in one, which keys of a tile a bit stands for is static.
    is_aligned = not call.is_packed and (call.tile_kv % block_kv == 0 or block_kv % call.tile_kv == 0)
    arrays = (words,) if firsts is None else (words, firsts)
    as_words = functools.partial(_words_of_blocks, block_kv)
    return KernelMask(arrays, load, as_words if is_aligned else visible, is_words=is_aligned)


def _words_of_blocks(block_kv: int, tile: PairTile, bits: Any) -> Words:
    """Bits of keys out of those of blocks: a tile begins with the first of these, or lies in it."""
    words = [jnp.zeros_like(bits)] * (tile.shape[1] // WORD_BITS)
    for nth, begin in enumerate(range(0, tile.shape[1], block_kv)):
        is_seen = 0 - (lax.shift_right_logical(bits, jnp.int32(nth)) & 1)  # all bits or none
        for n in range(len(words)):
            low, high = (min(max(end - n * WORD_BITS, 0), WORD_BITS) for end in (begin, begin + block_kv))
            if low < high:
                its = (1 << high) - (1 << low)
                words[n] = words[n] | (is_seen & np.uint32(its).astype(np.int32))
    return tuple(words)
