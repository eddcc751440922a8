"""Access to keys and values in a paged cache: layouts, copies of blocks, block ids and masked-out tokens.

Every kernel that finds keys through a block table uses this module. Block ids come from `VisibleBlocks`
alone, which clamps to the blocks between the first and the last key that some query attends to: blocks
outside may not be allocated, and their entries of the table may hold anything.
"""

import dataclasses
from collections.abc import Callable

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


# ------------------------------------------------------------------------------------- copies
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheTiling:
    """The division of cache blocks into copies: consecutive tokens of one KV head that TMA copies at once.

    Attributes:
        block_size: Tokens per block, a power of 2.
        tile_kv: Consecutive tokens that a tile needs, a power of 2.
        is_hnd: Whether blocks are [kv_heads, block_size, head_dim] instead of [block_size, kv_heads,
            head_dim].
        head: Chunks of a head.
    """

    block_size: int
    tile_kv: int
    is_hnd: bool
    head: HeadChunks

    @property
    def rows(self) -> int:
        """Tokens per copy: a block, or a tile if that is smaller."""
        return min(self.block_size, self.tile_kv)

    @property
    def num_copies(self) -> int:
        """Copies that fetch `tile_kv` tokens (of each chunk, if heads have several)."""
        return self.tile_kv // self.rows

    def tile_cache(self, cache: jax.Array) -> jax.Array:
        """Reshape a cache to [blocks, copies per block, rows, kv_heads, ...].

        HND becomes [blocks, kv_heads, copies per block, rows, ...]. The last axes are head_dim or, if TMA
        pads chunks, the chunks and their elements.
        """
        axis = 2 if self.is_hnd else 1
        return self.head.split(cache.reshape(*cache.shape[:axis], -1, self.rows, *cache.shape[axis + 1 :]))

    def tile_scales(self, scales: jax.Array) -> jax.Array:
        """Reshape scales [blocks, kv_heads, block_size] to [blocks, kv_heads, copies per block, rows]."""
        return scales.reshape(*scales.shape[:2], -1, self.rows)

    def tile_channel_scales(self, scales: jax.Array) -> jax.Array:
        """Reshape scales [kv_heads, head_dim] to [kv_heads, num_chunks, width], padded with zeros."""
        head = self.head
        chunks = scales.reshape(-1, head.num_chunks, head.chunk_dim)
        return jnp.pad(chunks, ((0, 0), (0, 0), (0, head.width - head.chunk_dim)))

    def table_column(self, key: Scalar) -> Scalar:
        """Return the column of the block table for the key at a position."""
        return lax.div(key, jnp.int32(self.block_size))

    def copy_index(self, key: Scalar) -> Scalar:
        """Return the index, in its block, of the copy that holds the key at a position."""
        return lax.div(lax.rem(key, jnp.int32(self.block_size)), jnp.int32(self.rows))

    def gmem_index(self, block: Scalar, copy: Scalar, kv_head: Scalar) -> Index:
        """Return the first indices of a copy in an array that `tile_cache` returned.

        `HeadChunks.gmem_index` returns the last ones.
        """
        rows = pl.ds(0, self.rows)
        return (block, kv_head, copy, rows) if self.is_hnd else (block, copy, rows, kv_head)


# ------------------------------------------------------------------------------------- blocks
class BlockTableRef:
    """A block table in global memory; column i of a row is the block of keys `i * block_size` onward.

    The entries are only accessible through `VisibleBlocks`.
    """

    def __init__(self, table_g: Ref, block_size: int):
        """Wrap a table [reqs, max_blocks]."""
        self._table_g, self._block_size = table_g, block_size

    def visible(self, req: Scalar, low: Scalar, high: Scalar, *, is_checked: bool = False) -> "VisibleBlocks":
        """Return the blocks of a request from that of key `low` to that of key `high - 1`.

        Args:
            req: Index of the request.
            low: First key that some query attends to.
            high: One past the last. If there are no such keys, any block of the row replaces all.
            is_checked: Static: `low` and `high` are known to be non-negative and within the row. Otherwise
                both may have any value.
        """
        size = jnp.int32(self._block_size)
        if is_checked:
            return VisibleBlocks(self._table_g, req, lax.div(low, size), lax.div(high - 1, size))
        first = lax.div(jnp.maximum(low, 0), size)
        last = jnp.maximum(lax.div(high - 1, size), first)
        return VisibleBlocks(self._table_g, req, first, jnp.minimum(last, self._table_g.shape[1] - 1))

    def first(self, req: Scalar, num_blocks: Scalar) -> "VisibleBlocks":
        """Return the first `num_blocks` blocks of a request, at most as many as its row has columns."""
        return VisibleBlocks(self._table_g, req, None, jnp.maximum(num_blocks - 1, 0))


class VisibleBlocks:
    """The allocated blocks of a request; a column outside of them is clamped to the nearest one."""

    def __init__(self, table_g: Ref, req: Scalar, first: Scalar | None, last: Scalar):
        """Restrict a row to columns `first` to `last`; with `first` None no caller asks for negative ones."""
        self._table_g, self._req, self._first, self._last = table_g, req, first, last

    def ids(self, column: Scalar, count: int) -> list[Scalar]:
        """Return the block ids of `count` columns from `column` on, each clamped."""
        return [self._id(column + j) for j in range(count)]

    def _id(self, column: Scalar) -> Scalar:
        if self._first is None:
            return self._table_g[self._req, jnp.minimum(column, self._last)]
        return self._table_g[self._req, jnp.clip(column, self._first, self._last)]


def split_slot(slot: Scalar, block_size: int) -> tuple[Scalar, Scalar]:
    """Return the block of a slot of vLLM's slot_mapping, and the offset in the block."""
    return lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))


# ------------------------------------------------------------------------------------- masked-out tokens
def where_visible(x: Tile, keys: Tile, low: Scalar, high: Scalar, fill: float = 0.0) -> Tile:
    """Return `x` with `fill` in the rows of keys outside [low, high).

    Args:
        x: Tile with one row per key.
        keys: Key of each row, int32, of the same shape.
        low: First key that some query attends to.
        high: One past the last.
        fill: Static value of the other rows.
    """
    return jnp.where((keys >= low) & (keys < high), x, jnp.full_like(x, fill))


def clear_masked_out(
    tile_s: Ref, rows: Slice, keys: Callable[[tuple[int, ...]], Tile], low: Scalar, high: Scalar
) -> None:
    """Overwrite values of keys outside [low, high) with zeros; follow with commit_smem.

    A probability of 0 does not remove a NaN.

    Args:
        tile_s: [num_chunks, tile_kv, width] in SMEM.
        rows: Rows to check, a pl.ds(...).
        keys: Function of a shape [rows, columns] that returns the key of each row, int32 of that shape.
        low: First key that some query attends to.
        high: One past the last.
    """
    num_chunks, _, width = tile_s.shape
    for chunk in range(num_chunks):
        for start in range(0, width, COLUMNS_AT_ONCE):
            part_s = tile_s.at[chunk, rows, pl.ds(start, COLUMNS_AT_ONCE)]
            v = plgpu.load(part_s, layout=W, optimized=False)
            part_s[...] = where_visible(v, keys(v.shape), low, high)
