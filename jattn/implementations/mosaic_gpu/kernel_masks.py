"""Masks in the form that kernels evaluate: arrays in GPU memory, and functions that apply them to a tile."""

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
    gathered_columns_by_key,
    gathered_columns_by_query,
    vertical_slash_by_key,
    vertical_slash_by_query,
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
MAX_BLOCKS = HALF + 1  # block bits in a word from any position of its first half on
BEFORE_ALL = -(2**30)  # start of the first document: query positions may be negative
MAX_TOUCHED = 10  # maximum number of query blocks per tile, since one word is read for each


class KernelMaskConfig(NamedTuple):
    """Static configuration of a kernel that evaluates a mask.

    Attributes:
        num_heads: Number of query heads and of KV heads.
        is_prefill: Whether the queries are in the prefill region.
        is_packed: Whether keys are outside a paged cache, so that KV tiles may begin at any position.
        max_seq_len: Maximum number of tokens per request.
        tile_kv: Number of keys per tile.
        has_key_rows: Whether the rows of a tile are keys, as in varlen_backward, instead of queries.
    """

    num_heads: tuple[int, int]
    is_prefill: bool
    is_packed: bool
    max_seq_len: int
    tile_kv: int
    has_key_rows: bool = False


def why_not_kernel_mask(mask: Mask, tile_kv: int, *, rows: int = WARPGROUP_ROWS) -> str | None:
    """Return why a kernel cannot evaluate a mask pair by pair; None if it can.

    Args:
        mask: Mask to evaluate.
        tile_kv: Number of keys per tile.
        rows: Number of queries per tile.
    """
    for leaf in leaves(mask):
        if isinstance(leaf, BlockMask):
            if leaf.block_q is not None and max_blocks_per_tile(rows, leaf.block_q) > MAX_TOUCHED:
                limit = f"a tile of {rows} queries touches more than {MAX_TOUCHED}"
                return f"there is no kernel for blocks of {leaf.block_q} queries ({limit})"
            if max_blocks_per_tile(tile_kv, leaf.block_kv) > MAX_BLOCKS:
                limit = f"a tile of {tile_kv} keys touches more than {MAX_BLOCKS}"
                return f"there is no kernel for blocks of {leaf.block_kv} keys ({limit})"
        elif isinstance(leaf, ShardedMask):
            return "there is no kernel for masks that differ between devices"
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


def kernel_mask(mask: Mask, config: KernelMaskConfig) -> KernelMask:
    """Convert a mask to a KernelMask; why_not_kernel_mask must be None. Works inside jit."""
    if mask.is_static:
        return _formula(mask, config)
    match mask:
        case And() | Or():
            operands = [_window(operand) or kernel_mask(operand, config) for operand in mask.masks]
            return _join(operator.and_ if isinstance(mask, And) else operator.or_, operands)
        case Not():
            return _invert(kernel_mask(mask.masks[0], config))
        case Document():
            return _document(mask, config)
        case Prefix():
            return _prefix(mask)
        case InterleavedMask():
            return interleaved_mask(mask)
        case VerticalSlash():
            return vertical_slash_by_key(mask) if config.has_key_rows else vertical_slash_by_query(mask)
        case GatheredColumns():
            return gathered_columns_by_key(mask) if config.has_key_rows else gathered_columns_by_query(mask)
    assert isinstance(mask, BlockMask)
    return _blocks(mask, config)


def _formula(mask: Mask, config: KernelMaskConfig) -> KernelMask:
    """Convert a mask without arrays: the kernel evaluates its formula for each pair."""

    def visible(tile: PairTile, _: Any) -> Any:
        row = jnp.int32(0)  # static masks do not depend on it
        pairs = _PairsOfTile(tile.head, row, None, None, config.num_heads, config.is_prefill)
        pairs.tile = tile
        return mask.visible(pairs)

    return KernelMask((), lambda *_: (), visible, is_words=False)


class _PairsOfTile(Pairs):
    """Pairs that compute positions only when a mask reads them: Pallas has no layout for unused arrays."""

    tile: PairTile

    @property
    def query(self) -> Any:
        return self.tile.query

    @property
    def key(self) -> Any:
        return self.tile.key


def _window(mask: Mask) -> KernelMask | None:
    """Convert a causal mask or a window to bit words; None for other masks and a window without bounds."""
    if isinstance(mask, Causal):
        mask = Window(right=0)
    if not isinstance(mask, Window) or mask == Window():
        return None
    left, right = normalize_window_side(mask.left), normalize_window_side(mask.right)

    def visible(tile: PairTile, _: Any) -> Words:
        diagonal = tile.row_positions - tile.first_column
        before, after = (right, left) if tile.has_key_rows else (left, right)
        high = tile.fill_rows(jnp.int32(tile.shape[1])) if after is None else diagonal + (after + 1)
        return tile.words_in_range(None if before is None else diagonal - before, high)

    return KernelMask((), lambda *_: (), visible, is_words=True)


def _join(join: Callable[[Any, Any], Any], operands: list[KernelMask]) -> KernelMask:
    """Combine masks with `join`, as bit words where all operands have them."""

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        loaded, start = [], 0
        for operand in operands:
            end = start + len(operand.arrays)
            loaded.append(operand.load(tile, row, tuple(refs[start:end])))
            start = end
        return tuple(loaded)

    def visible(tile: PairTile, loaded: Any) -> Any:
        words: list[Words] = []
        pairs: list[Any] = []
        for operand, x in zip(operands, loaded, strict=True):
            (words if operand.is_words else pairs).append(operand.visible(tile, x))
        if words:
            joined = tuple(functools.reduce(join, column) for column in zip(*words, strict=True))
            if not pairs:
                return joined
            pairs.append(tile.unpack_bit_mask(joined))
        return functools.reduce(join, pairs)

    arrays = tuple(x for operand in operands for x in operand.arrays)
    return KernelMask(arrays, load, visible, is_words=all(operand.is_words for operand in operands))


def _invert(operand: KernelMask) -> KernelMask:
    def visible(tile: PairTile, loaded: Any) -> Any:
        inverse = operand.visible(tile, loaded)
        return tuple(~word for word in inverse) if operand.is_words else ~inverse

    return operand._replace(visible=visible)


def _document(mask: Document, config: KernelMaskConfig) -> KernelMask:
    """Convert a Document mask: store the first position of each position's document, and one past the last.

    The same arrays serve rows that are queries and rows that are keys.
    """
    ids = jnp.atleast_2d(jnp.asarray(mask.ids))
    past_end = config.max_seq_len + MAX_ROWS  # a tile's first key may be as low as -MAX_ROWS
    position = jnp.arange(-MAX_ROWS, past_end, dtype=jnp.int32)

    def id_at(position: Any) -> Any:
        return ids[:, jnp.clip(position, 0, ids.shape[1] - 1)]

    begins, ends = id_at(position) != id_at(position - 1), id_at(position) != id_at(position + 1)
    first = lax.cummax(jnp.where(begins, position, BEFORE_ALL), axis=1)
    end = lax.cummin(jnp.where(ends, position + 1, past_end), axis=1, reverse=True)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        index = (jnp.minimum(row, ids.shape[0] - 1),)
        start = jnp.maximum(tile.first_row, -MAX_ROWS) + MAX_ROWS  # all rows before position 0 are equal
        return tuple(tile.load_rows(ref, index, start) for ref in refs)

    def visible(tile: PairTile, ends: tuple[Any, Any]) -> Words:
        return tile.words_in_range(*(x - tile.first_column for x in ends))

    return KernelMask((first, end), load, visible, is_words=True)


def _prefix(mask: Prefix) -> KernelMask:
    """Convert a Prefix mask: store the length per request."""
    lengths = jnp.atleast_1d(jnp.asarray(mask.length)).astype(jnp.int32)

    def load(_: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        return refs[0][jnp.minimum(row, lengths.shape[0] - 1)]

    def visible(tile: PairTile, length: Any) -> Words:
        return tile.words_in_range(
            None, jnp.where(tile.row_positions < length, length - tile.first_column, 0)
        )

    return KernelMask((lengths,), load, visible, is_words=True)


def _blocks(mask: BlockMask, config: KernelMaskConfig) -> KernelMask:
    """Convert a BlockMask: store bit words per query block.

    A word starts at every 16th KV block and has the bits of 32 KV blocks, so that one word holds the 17
    blocks from any position on.
    """
    blocks = jnp.asarray(mask.blocks)
    blocks = blocks.reshape(-1, *blocks.shape[-3:])
    reqs, heads, q_blocks, kv_blocks = blocks.shape
    num_halves = -(-kv_blocks // HALF)
    padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, (num_halves + 2) * HALF - kv_blocks)))
    bits = padded.reshape(reqs, heads, q_blocks, -1, HALF).astype(jnp.int32)
    halves = (bits << lax.broadcasted_iota(jnp.int32, bits.shape, 4)).sum(axis=-1, dtype=jnp.int32)
    words = halves[..., :-1] | (halves[..., 1:] << HALF)
    firsts = None if mask.first_q_block is None else jnp.asarray(mask.first_q_block).astype(jnp.int32)
    block_q, block_kv, group = mask.block_q, mask.block_kv, config.num_heads[0] // heads

    def first_block(tile: PairTile) -> Any:
        return quotient(jnp.maximum(tile.first_key, 0), block_kv)

    def load(tile: PairTile, row: Any, refs: tuple[Any, ...]) -> Any:
        head, begin = quotient(tile.head, group), first_block(tile)
        half = jnp.minimum(quotient(begin, HALF), num_halves)

        def word(q_block: Any) -> Any:
            is_inside = (q_block >= 0) & (q_block < q_blocks)
            index = jnp.minimum(row, reqs - 1), head, jnp.clip(q_block, 0, q_blocks - 1), half
            bits_from_begin = lax.shift_right_logical(refs[0][index], remainder(begin, HALF))
            return jnp.where(is_inside, bits_from_begin, 0)

        if block_q is None:
            return tile.fill_queries(word(jnp.int32(0)))
        queries, first = tile.query_positions, floor_div(tile.first_query, block_q)
        ahead = jnp.int32(0) if firsts is None else refs[1][jnp.minimum(row, firsts.shape[0] - 1)]
        bits = tile.fill_queries(word(first - ahead))
        for index in range(1, max_blocks_per_tile(tile.num_queries, block_q)):
            is_reached = queries >= (first + index) * block_q
            bits = jnp.where(is_reached, word(first + index - ahead), bits)
        return bits

    def visible(tile: PairTile, bits: Any) -> Any:
        index = quotient(tile.key, block_kv) - first_block(tile)
        return lax.shift_right_logical(tile.broadcast_queries(bits), index) & 1 != 0

    # If tiles begin with a block or lie within one, the keys of a tile that a bit covers are static.
    is_aligned = not config.is_packed and (config.tile_kv % block_kv == 0 or block_kv % config.tile_kv == 0)
    arrays = (words,) if firsts is None else (words, firsts)
    as_words = functools.partial(_words_of_blocks, block_kv)
    return KernelMask(arrays, load, as_words if is_aligned else visible, is_words=is_aligned)


def _words_of_blocks(block_kv: int, tile: PairTile, bits: Any) -> Words:
    """Expand bits of KV blocks to bits of keys; the tile begins with the first block or lies within it."""
    words = [jnp.zeros_like(bits)] * (tile.shape[1] // WORD_BITS)
    for index, begin in enumerate(range(0, tile.shape[1], block_kv)):
        is_visible = 0 - (lax.shift_right_logical(bits, jnp.int32(index)) & 1)  # all bits or none
        for n in range(len(words)):
            low, high = (min(max(end - n * WORD_BITS, 0), WORD_BITS) for end in (begin, begin + block_kv))
            if low < high:
                key_bits = (1 << high) - (1 << low)
                words[n] = words[n] | (is_visible & np.uint32(key_bits).astype(np.int32))
    return tuple(words)
