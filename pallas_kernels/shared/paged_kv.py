"""Where keys and values stand in a paged cache: layouts, blocks cut into copies, block ids, what none sees.

Every kernel that finds keys by a block table does it through here. Block ids come out of VisibleBlocks alone,
which stays between the blocks of the first and the last key that somebody sees: the others may not be there,
and their entries of the table may hold anything.
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
COLUMNS_AT_ONCE = 64  # of values in registers


def cache_dims(cache: jax.Array, *, is_hnd: bool) -> tuple[int, int, int, int]:
    """Blocks, block_size, kv_heads and head_dim; HND is [blocks, kv_heads, block_size, head_dim]."""
    blocks, tokens, heads, head_dim = cache.shape
    return (blocks, heads, tokens, head_dim) if is_hnd else (blocks, tokens, heads, head_dim)


# ------------------------------------------------------------------------------------- copies
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheTiling:
    """How blocks are cut into copies: neighbours of one kv head, which TMA takes at once.

    Attributes:
        block_size: Tokens of a block.
        tile_kv: Neighbours that are wanted together: a power of 2, as is block_size.
        is_hnd: Blocks are [kv_heads, block_size, head_dim], not [block_size, kv_heads, head_dim].
        head: The cut of head_dim.
    """

    block_size: int
    tile_kv: int
    is_hnd: bool
    head: HeadChunks

    @property
    def rows(self) -> int:
        """Tokens of a copy: a block, or what of it is wanted together."""
        return min(self.block_size, self.tile_kv)

    @property
    def copies(self) -> int:
        """Copies that bring `tile_kv` neighbours, or a chunk of each where heads are cut."""
        return self.tile_kv // self.rows

    def tile_cache(self, cache: jax.Array) -> jax.Array:
        """[blocks, copies of a block, rows, kv_heads, ...], or HND [blocks, kv_heads, copies, rows, ...].

        Last come head_dim or, where TMA pads them, chunks and their elements.
        """
        axis = 2 if self.is_hnd else 1
        return self.head.split(cache.reshape(*cache.shape[:axis], -1, self.rows, *cache.shape[axis + 1 :]))

    def tile_scales(self, scales: jax.Array) -> jax.Array:
        """Scales per token and head, [blocks, kv_heads, block_size], as [blocks, kv_heads, copies, rows]."""
        return scales.reshape(*scales.shape[:2], -1, self.rows)

    def tile_channel_scales(self, scales: jax.Array) -> jax.Array:
        """Scales per channel, [kv_heads, head_dim], as [kv_heads, chunks, width], padded with zeros."""
        cut = self.head
        of_chunks = scales.reshape(-1, cut.num_chunks, cut.chunk_dim)
        return jnp.pad(of_chunks, ((0, 0), (0, 0), (0, cut.width - cut.chunk_dim)))

    def table_column(self, key: Scalar) -> Scalar:
        """Which column of the block table has the block of the key at a position."""
        return lax.div(key, jnp.int32(self.block_size))

    def copy_index(self, key: Scalar) -> Scalar:
        """Which copy of its block brings the key at a position."""
        return lax.div(lax.rem(key, jnp.int32(self.block_size)), jnp.int32(self.rows))

    def gmem_index(self, block: Scalar, copy: Scalar, kv_head: Scalar) -> Index:
        """Where in tile_cache's a copy is; `head.at` follows."""
        rows = pl.ds(0, self.rows)
        return (block, kv_head, copy, rows) if self.is_hnd else (block, copy, rows, kv_head)


# ------------------------------------------------------------------------------------- blocks
class BlockTable:
    """Which blocks hold a request's keys: column i of its row those from `i * block_size` on.

    The table itself is not to be had from here: only blocks between two that hold a key that somebody sees.
    """

    def __init__(self, table_g: Ref, block_size: int):
        """Of [reqs, max_blocks] in global memory."""
        self._table_g, self._block_size = table_g, block_size

    def visible(self, req: Scalar, low: Scalar, high: Scalar, *, is_checked: bool = False) -> "VisibleBlocks":
        """The blocks of a request from that of key `low` to that of key `high - 1`.

        Args:
            req: The request.
            low: First key that somebody sees.
            high: One past the last. If there is none, any block of the row stands in for all.
            is_checked: Static: low is not negative, high neither, and the row has room for so many keys.
                Otherwise both may be anything.
        """
        size = jnp.int32(self._block_size)
        if is_checked:
            return VisibleBlocks(self._table_g, req, lax.div(low, size), lax.div(high - 1, size))
        first = lax.div(jnp.maximum(low, 0), size)
        last = jnp.maximum(lax.div(high - 1, size), first)
        return VisibleBlocks(self._table_g, req, first, jnp.minimum(last, self._table_g.shape[1] - 1))

    def first(self, req: Scalar, num_blocks: Scalar) -> "VisibleBlocks":
        """The first blocks of a request, as many as its row has room for at most; columns ascend from 0."""
        return VisibleBlocks(self._table_g, req, None, jnp.maximum(num_blocks - 1, 0))


class VisibleBlocks:
    """Blocks of a request that are there. For those before the nearest stands in, and for those behind."""

    def __init__(self, table_g: Ref, req: Scalar, first: Scalar | None, last: Scalar):
        """Columns `first` (None: the 0th, and none before is asked for) to `last` of a row."""
        self._table_g, self._req, self._first, self._last = table_g, req, first, last

    def ids(self, column: Scalar, count: int) -> list[Scalar]:
        """The blocks of `count` columns from `column` on, which may be anywhere."""
        return [self._id(column + j) for j in range(count)]

    def _id(self, column: Scalar) -> Scalar:
        if self._first is None:
            return self._table_g[self._req, jnp.minimum(column, self._last)]
        return self._table_g[self._req, jnp.clip(column, self._first, self._last)]


def split_slot(slot: Scalar, block_size: int) -> tuple[Scalar, Scalar]:
    """The block of a slot of vLLM's slot_mapping, and where in the block it is."""
    return lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))


# ------------------------------------------------------------------------------------- what none may see
def where_visible(x: Tile, keys: Tile, low: Scalar, high: Scalar, otherwise: float = 0.0) -> Tile:
    """X where its row's key is in [low, high), elsewhere `otherwise`.

    Args:
        x: Numbers, a row a key.
        keys: int32 of the same shape: which key each row has.
        low: First key that somebody sees.
        high: One past the last.
        otherwise: Static.
    """
    return jnp.where((keys >= low) & (keys < high), x, jnp.full_like(x, otherwise))


def clear_masked_out(
    tile_s: Ref, rows: Slice, keys: Callable[[tuple[int, ...]], Tile], low: Scalar, high: Scalar
) -> None:
    """Zeros for values that nobody sees: a probability of 0 hides no NaN. To be followed by commit_smem.

    Args:
        tile_s: [chunks, tile_kv, width] in SMEM.
        rows: pl.ds(...): those to look at.
        keys: `keys(shape)`: int32 of a shape [rows, columns]: which key each row has.
        low: First key that somebody sees.
        high: One past the last.
    """
    chunks, _, width = tile_s.shape
    for chunk in range(chunks):
        for start in range(0, width, COLUMNS_AT_ONCE):
            here = tile_s.at[chunk, rows, pl.ds(start, COLUMNS_AT_ONCE)]
            v = plgpu.load(here, layout=W, optimized=False)
            here[...] = where_visible(v, keys(v.shape), low, high)
