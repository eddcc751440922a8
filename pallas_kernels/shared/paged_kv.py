"""Access to keys and values in a paged cache: layouts, TMA copies and block ids.

Every kernel that finds keys through a block table uses this module. In its arguments, `first_key` and
`end_key` are positions of keys in their request: the first key that any query attends to, and one past the
last such key. Kernels read block ids only through `VisibleBlocks`, which replaces blocks outside of this
range by a block inside it: blocks outside may not be allocated, and their entries of the table may hold
anything.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.shared.memory import HeadChunks
from pallas_kernels.shared.types import Index, Ref, Scalar


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
            token and head [blocks, kv_heads, copies, tokens_per_copy]; None for 1.
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
    """The division of a run of consecutive tokens of one KV head into the TMA copies that load it.

    Attributes:
        block_size: Number of tokens per block, a power of 2.
        run_length: Number of tokens of a run, a power of 2. A tile holds one or several runs.
        is_hnd: Whether blocks are [kv_heads, block_size, head_dim] instead of [block_size, kv_heads,
            head_dim].
        head: Division of a head into chunks.
        tokens_per_copy: Number of tokens that a TMA copy moves: the tokens of a block, or of a run if that
            is shorter.
        copies_per_run: Number of TMA copies that load one chunk of a run's heads.
    """

    block_size: int
    run_length: int
    is_hnd: bool
    head: HeadChunks
    tokens_per_copy: int = dataclasses.field(init=False)
    copies_per_run: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        tokens_per_copy = min(self.block_size, self.run_length)
        copies_per_run = self.run_length // tokens_per_copy
        vars(self).update(tokens_per_copy=tokens_per_copy, copies_per_run=copies_per_run)

    def tile_cache(self, cache: jax.Array) -> jax.Array:
        """Reshape a cache to [blocks, copies, tokens_per_copy, kv_heads, ...].

        HND becomes [blocks, kv_heads, copies, tokens_per_copy, ...]. The last axes are head_dim or, if TMA
        pads chunks, the chunks and their elements.
        """
        axis = 2 if self.is_hnd else 1
        return self.head.split(
            cache.reshape(*cache.shape[:axis], -1, self.tokens_per_copy, *cache.shape[axis + 1 :])
        )

    def tile_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """Return the scale of keys or values in the form of KvRefs.

        Args:
            scale: [], [kv_heads], per channel [kv_heads, head_dim], or per token and head [blocks, kv_heads,
                block_size]; None for 1.
        """
        if scale is None or scale.ndim == 1:
            return scale
        if scale.ndim == 0:
            return scale.reshape(1)
        if scale.ndim == 3:
            return scale.reshape(*scale.shape[:2], -1, self.tokens_per_copy)
        head = self.head
        chunks = scale.reshape(-1, head.num_chunks, head.chunk_dim)
        return jnp.pad(chunks, ((0, 0), (0, 0), (0, head.width - head.chunk_dim)))

    def locate(self, key: Scalar) -> tuple[Scalar, Scalar]:
        """Return the block-table column of a key's block, and which TMA copy of the block holds the key."""
        column, offset = lax.div(key, jnp.int32(self.block_size)), lax.rem(key, jnp.int32(self.block_size))
        return column, lax.div(offset, jnp.int32(self.tokens_per_copy))

    def gmem_index(self, block: Scalar, copy: Scalar, kv_head: Scalar) -> Index:
        """Return the leading indices that select a TMA copy in an array that `tile_cache` returned.

        `HeadChunks.gmem_index` returns the trailing indices.
        """
        rows = pl.ds(0, self.tokens_per_copy)
        return (block, kv_head, copy, rows) if self.is_hnd else (block, copy, rows, kv_head)


# ------------------------------------------------------------------------------------- blocks
@dataclasses.dataclass(frozen=True)
class BlockTableRef:
    """A block table in global memory; column i of a row is the block of keys `i * block_size` onward.

    The entries are only accessible through `VisibleBlocks`.
    """

    _table_g: Ref  # [reqs, max_blocks]
    _block_size: int

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


@dataclasses.dataclass(frozen=True)
class VisibleBlocks:
    """Block ids of row `_req` of the block table between columns `_first` and `_last`.

    Columns outside are clamped to this range. With `_first` None, only the upper bound is applied, and
    callers must not pass negative columns.
    """

    _table_g: Ref
    _req: Scalar
    _first: Scalar | None
    _last: Scalar

    def ids(self, column: Scalar, count: int) -> list[Scalar]:
        """Return the block ids of `count` columns from `column` on, each clamped."""
        table_g, req, first, last = self._table_g, self._req, self._first, self._last
        if first is None:
            return [table_g[req, jnp.minimum(column + j, last)] for j in range(count)]
        return [table_g[req, jnp.clip(column + j, first, last)] for j in range(count)]


def load_head_scale(scale_g: Ref, kv_head: Scalar) -> Scalar:
    """Load the scale of a KV head from a scale with one axis: one for all heads, or one per head."""
    return scale_g[kv_head if scale_g.shape[0] > 1 else 0]


def split_slot(slot: Scalar, block_size: int) -> tuple[Scalar, Scalar]:
    """Return the block id of a slot of vLLM's slot_mapping, and the slot's offset in the block."""
    return lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
