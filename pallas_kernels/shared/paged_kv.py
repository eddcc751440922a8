"""Access to keys and values in a paged cache: layouts, TMA copies, block ids and masked-out tokens.

Every kernel that finds keys through a block table uses this module. In its arguments, `first_key` and
`end_key` are positions of keys in their request: the first key that any query attends to, and one past the
last such key. Kernels read block ids only through `VisibleBlocks`, which replaces blocks outside of this
range by a block inside it: blocks outside may not be allocated, and their entries of the table may hold
anything.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.types import Index, Ref, Scalar, Slice, Tile

W = plgpu.Layout.WGMMA
COLUMNS_AT_ONCE = 64  # columns of values that are held in registers together


def cache_dims(cache: jax.Array, *, is_hnd: bool) -> tuple[int, int, int, int]:
    """Return blocks, block_size, kv_heads and head_dim of a cache.

    NHD is [blocks, block_size, kv_heads, head_dim], HND is [blocks, kv_heads, block_size, head_dim].
    """
    blocks, tokens, heads, head_dim = cache.shape
    return (blocks, heads, tokens, head_dim) if is_hnd else (blocks, tokens, heads, head_dim)


class KvRefs(NamedTuple):
    """Keys and values in global memory.

    Attributes:
        k: Packed keys [tokens, kv_heads, head_dim], or [..., chunks, chunk] if the head is chunked. Paged
            keys as CacheTiling.tile_cache returns them.
        v: Values, of the shape of `k`.
        block_table: Block ids of each request [reqs, max_blocks]; None if keys are packed.
        k_scale: Scale of 8-bit keys, f32: [1], [kv_heads], per channel [kv_heads, chunks, width], or per
            token and head as CacheTiling.tile_scales returns them; None for 1.
        v_scale: Scale of 8-bit values, like `k_scale`.
        k_tail: Last rows of packed keys as `split_tail` returns them, or None.
        v_tail: Last rows of packed values, like `k_tail`.
    """

    k: Ref
    v: Ref
    block_table: Ref
    k_scale: Ref = None
    v_scale: Ref = None
    k_tail: Ref = None
    v_tail: Ref = None


# ------------------------------------------------------------------------------------- TMA copies
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheTiling:
    """The division of cache blocks into the runs of tokens that one TMA copy moves for one KV head.

    Attributes:
        block_size: Number of tokens per block, a power of 2.
        tile_kv: Number of consecutive tokens of a tile, a power of 2.
        is_hnd: Whether blocks are [kv_heads, block_size, head_dim] instead of [block_size, kv_heads,
            head_dim].
        head: Division of a head into chunks.
    """

    block_size: int
    tile_kv: int
    is_hnd: bool
    head: HeadChunks

    @property
    def tokens_per_copy(self) -> int:
        """Number of tokens that a TMA copy moves: the tokens of a block, or of a tile if that is smaller."""
        return min(self.block_size, self.tile_kv)

    @property
    def num_copies(self) -> int:
        """Number of TMA copies that load `tile_kv` tokens of one chunk of a head."""
        return self.tile_kv // self.tokens_per_copy

    def tile_cache(self, cache: jax.Array) -> jax.Array:
        """Reshape a cache to [blocks, copies, tokens_per_copy, kv_heads, ...].

        HND becomes [blocks, kv_heads, copies, tokens_per_copy, ...]. The last axes are head_dim or, if TMA
        pads chunks, the chunks and their elements.
        """
        axis = 2 if self.is_hnd else 1
        return self.head.split(
            cache.reshape(*cache.shape[:axis], -1, self.tokens_per_copy, *cache.shape[axis + 1 :])
        )

    def tile_scales(self, scales: jax.Array) -> jax.Array:
        """Reshape scales [blocks, kv_heads, block_size] to [blocks, kv_heads, copies, tokens_per_copy]."""
        return scales.reshape(*scales.shape[:2], -1, self.tokens_per_copy)

    def tile_channel_scales(self, scales: jax.Array) -> jax.Array:
        """Reshape scales [kv_heads, head_dim] to [kv_heads, num_chunks, width], padded with zeros."""
        head = self.head
        chunks = scales.reshape(-1, head.num_chunks, head.chunk_dim)
        return jnp.pad(chunks, ((0, 0), (0, 0), (0, head.width - head.chunk_dim)))

    def table_column(self, key: Scalar) -> Scalar:
        """Return the block-table column of the block that holds the key at position `key`."""
        return lax.div(key, jnp.int32(self.block_size))

    def tma_copy_index(self, key: Scalar) -> Scalar:
        """Return which TMA copy of its block holds the key at position `key`."""
        return lax.div(lax.rem(key, jnp.int32(self.block_size)), jnp.int32(self.tokens_per_copy))

    def gmem_index(self, block: Scalar, copy: Scalar, kv_head: Scalar) -> Index:
        """Return the leading indices that select a TMA copy in an array that `tile_cache` returned.

        `HeadChunks.gmem_index` returns the trailing indices.
        """
        rows = pl.ds(0, self.tokens_per_copy)
        return (block, kv_head, copy, rows) if self.is_hnd else (block, copy, rows, kv_head)


# ------------------------------------------------------------------------------------- blocks
class BlockTableRef:
    """A block table in global memory; column i of a row is the block of keys `i * block_size` onward.

    The entries are only accessible through `VisibleBlocks`.
    """

    def __init__(self, table_g: Ref, block_size: int):
        """Wrap a table [reqs, max_blocks]."""
        self._table_g, self._block_size = table_g, block_size

    def visible_blocks(
        self, req: Scalar, first_key: Scalar, end_key: Scalar, *, is_checked: bool = False
    ) -> "VisibleBlocks":
        """Return the blocks of a request that hold keys `first_key` to `end_key - 1`.

        Args:
            req: Index of the request.
            first_key: Position of the first key that any query attends to.
            end_key: One past the position of the last key that any query attends to. If there is no such key,
                an arbitrary block of the row replaces all blocks.
            is_checked: Static: whether the caller guarantees that both positions lie within the row.
                Otherwise, they are clamped.
        """
        size = jnp.int32(self._block_size)
        if is_checked:
            return VisibleBlocks(self._table_g, req, lax.div(first_key, size), lax.div(end_key - 1, size))
        first = lax.div(jnp.maximum(first_key, 0), size)
        last = jnp.maximum(lax.div(end_key - 1, size), first)
        return VisibleBlocks(self._table_g, req, first, jnp.minimum(last, self._table_g.shape[1] - 1))

    def first_blocks(self, req: Scalar, num_blocks: Scalar) -> "VisibleBlocks":
        """Return the first `num_blocks` blocks of a request.

        `num_blocks` must not exceed the table's number of columns.
        """
        return VisibleBlocks(self._table_g, req, None, jnp.maximum(num_blocks - 1, 0))


class VisibleBlocks:
    """Block ids of a request between two columns of the block table.

    Columns outside are clamped to this range.
    """

    def __init__(self, table_g: Ref, req: Scalar, first: Scalar | None, last: Scalar):
        """Restrict row `req` of a table to columns `first` to `last`.

        With `first` None, only the upper bound is applied, and callers must not pass negative columns.
        """
        self._table_g, self._req, self._first, self._last = table_g, req, first, last

    def ids(self, column: Scalar, count: int) -> list[Scalar]:
        """Return the block ids of `count` columns from `column` on, each clamped."""
        return [self._id(column + j) for j in range(count)]

    def _id(self, column: Scalar) -> Scalar:
        if self._first is None:
            return self._table_g[self._req, jnp.minimum(column, self._last)]
        return self._table_g[self._req, jnp.clip(column, self._first, self._last)]


def split_slot(slot: Scalar, block_size: int) -> tuple[Scalar, Scalar]:
    """Return the block id of a slot of vLLM's slot_mapping, and the slot's offset in the block."""
    return lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))


# ------------------------------------------------------------------------------------- masked-out tokens
def where_visible(x: Tile, keys: Tile, first_key: Scalar, end_key: Scalar, fill: float = 0.0) -> Tile:
    """Return `x` with `fill` in the rows of keys at positions outside of [first_key, end_key).

    Args:
        x: Tile with one row per key.
        keys: Key position of each element, int32, of the same shape.
        first_key: Position of the first key that any query attends to.
        end_key: One past the position of the last key that any query attends to.
        fill: Static value of the replaced rows.
    """
    return jnp.where((keys >= first_key) & (keys < end_key), x, jnp.full_like(x, fill))


def clear_masked_out(
    tile_s: Ref, rows: Slice, keys: Callable[[tuple[int, ...]], Tile], first_key: Scalar, end_key: Scalar
) -> None:
    """Overwrite the values of keys outside of [first_key, end_key) with zeros.

    The caller must call commit_smem.

    Masking these keys is not enough, because 0 times NaN is NaN.

    Args:
        tile_s: Tile of values in SMEM, [num_chunks, tile_kv, width].
        rows: Rows to check, a pl.ds(...).
        keys: Function that returns the key position of each element of a tile of a given shape, int32.
        first_key: Position of the first key that any query attends to.
        end_key: One past the position of the last key that any query attends to.
    """
    num_chunks, _, width = tile_s.shape
    for chunk in range(num_chunks):
        for start in range(0, width, COLUMNS_AT_ONCE):
            part_s = tile_s.at[chunk, rows, pl.ds(start, COLUMNS_AT_ONCE)]
            v = plgpu.load(part_s, layout=W, optimized=False)
            part_s[...] = where_visible(v, keys(v.shape), first_key, end_key)
