"""Block-sparse masks: BlockMask, given by an array of blocks, and BigBird."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jattn.masks.base import Mask
from jattn.masks.checks import normalize_ints, require_array
from jattn.masks.in_kernel import KernelTiling
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles, floor_div, quotient, remainder
from jattn.pytree import pytree, static
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_int
from pallas_kernels.varlen_prefill import (
    ALL_COLUMNS,
    MAX_COLUMN_BLOCKS,
    BlockBits,
    KernelMask,
    PairBits,
)

NUM_HASHES = 32749  # A prime: number of values of the hash that draws random blocks.
MAX_FLAT_INDEX = 2**31 - 1  # Largest int32 index.
CELL = 16  # Number of queries or keys that coverage tells apart in tiles of many blocks, for few lookups.


def coverage_of_blocks(
    visible: Callable[[Any, Any], Any],
    query_blocks: tuple[Any, ...],
    key_blocks: tuple[Any, ...],
    max_blocks: tuple[int, ...],
) -> Coverage:
    """Return the coverage of tiles from `visible(query_block, key_block)`, evaluated for each block.

    Args:
        visible: Function of a query block and a key block.
        query_blocks: First and last query block of each tile.
        key_blocks: First and last key block of each tile.
        max_blocks: Static: maximum number of query blocks and of key blocks per tile.
    """
    any_visible: Any = False
    all_visible: Any = True
    for i in range(max_blocks[0]):
        for j in range(max_blocks[1]):
            a, b = query_blocks[0] + i, key_blocks[0] + j
            is_inside = (a <= query_blocks[1]) & (b <= key_blocks[1])
            block_visible = visible(a, b)
            any_visible = any_visible | (block_visible & is_inside)
            all_visible = all_visible & (block_visible | ~is_inside)
    return Coverage(any_visible, all_visible)


def max_blocks_per_tile(tile_size: int, block_size: int) -> int:
    """Return the maximum number of blocks that a tile of consecutive positions overlaps."""
    return (tile_size + block_size - 2) // block_size + 1


@pytree
class BlockMask(Mask):
    """A bool array of the pairs of a query block and a key block that are visible.

    May be combined with causal attention. Pairs outside the array are not visible. `attend` therefore refuses
    a mask that is smaller than the static bounds of the batch (the width of the block table). If only traced
    lengths bound the batch, as for keys outside a paged cache, queries beyond the mask come out as zeros.

    Attributes:
        blocks: [heads, q_blocks, kv_blocks] for all requests, or [reqs, heads, q_blocks, kv_blocks]. The
            number of heads divides the number of query heads; consecutive query heads share an entry.
        first_q_block: Index in the request of the first query block of the array, [reqs]; None = 0.
        block_q: Static: number of queries per block; None = all queries share one block.
        block_kv: Static: number of keys per block, counted from the start of the request.
    """

    blocks: Bool[Array, "*reqs heads q_blocks kv_blocks"] | Bool[np.ndarray, "*reqs heads q_blocks kv_blocks"]
    first_q_block: Int[Array, " reqs"] | Int[np.ndarray, " reqs"] | None = None
    block_q: int | None = static()
    block_kv: int = static()

    row_axes: ClassVar[dict[str, int]] = {"blocks": 4, "first_q_block": 1}

    def __post_init__(self) -> None:
        axes = "[heads, q_blocks, kv_blocks]"
        require_array("blocks", self.blocks, "bool", {3: axes, 4: f"[reqs, *{axes}]"})
        if self.first_q_block is not None:
            require_array("first_q_block", self.first_q_block, "integer", {1: "[reqs]"})
        normalize_ints(self, 1, "block_kv")
        shape = self.blocks.shape
        if self.block_q is None:
            require(shape[-2] == 1, "blocks", "have one query block if block_q is None", shape)
        else:
            normalize_ints(self, 1, "block_q")
        require(0 not in shape[-3:], "blocks", "have at least one head and one block", shape)

    skips_most_tiles = True

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.blocks.shape[-3], 1

    @property
    @override
    def block_shape(self) -> tuple[int | None, int] | None:
        return self.block_q, self.block_kv

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        _, q_blocks, kv_blocks = self.blocks.shape[-3:]
        self._check_heads(sizes.num_q_heads)
        query_end = sizes.max_seq_len if sizes.max_query_end is None else sizes.max_query_end
        max_query = query_end if self.first_q_block is None else sizes.max_query_len
        for axis, num_blocks, size, num_positions in (
            ("kv_blocks", kv_blocks, self.block_kv, sizes.max_seq_len),
            ("q_blocks", q_blocks, self.block_q, max_query),
        ):
            if size is not None and num_positions is not None and num_blocks * size < num_positions:
                needed = f"Pass at least {-(-num_positions // size)} {axis}"
                if axis == "q_blocks" and self.first_q_block is None:
                    needed += ", or for decode block_q=None (one row per request) or first_q_block"
                raise ValueError(
                    f"BlockMask has {num_blocks} {axis} of {size} positions, but a request may have "
                    f"{num_positions} positions. {needed}."
                )
        self._check_rows_cover_queries(sizes)

    def _check_rows_cover_queries(self, sizes: BatchSizes) -> None:
        """Check that the query blocks from first_q_block on cover each row's queries, if these are concrete.

        Skipped if the array has room for queries that start anywhere in a block, as then it always covers
        them and the lengths need not be computed yet.
        """
        first, size, q_blocks = self.first_q_block, self.block_q, self.blocks.shape[-2]
        query_ends, max_query_len = sizes.query_ends, sizes.max_query_len
        if first is None or size is None or query_ends is None or not architectures.is_concrete(first):
            return
        if max_query_len is not None and q_blocks >= max_blocks_per_tile(max_query_len, size):
            return
        ends = query_ends()
        num_needed = int(np.max(np.where(ends > 0, -(-ends // size) - np.asarray(first), 0), initial=0))
        if q_blocks < num_needed:
            raise ValueError(
                f"BlockMask has {q_blocks} q_blocks of {size} positions, but the queries of a request extend "
                f"over {num_needed} from first_q_block on. Pass at least {num_needed} q_blocks."
            )

    def _check_heads(self, num_q_heads: int) -> None:
        heads = self.blocks.shape[-3]
        is_divisor = num_q_heads % heads == 0
        require(is_divisor, "BlockMask's number of heads", f"divide the {num_q_heads} query heads", heads)

    def _query_block(self, row: Any, query: Any) -> Any:
        """Return the index in `blocks` of the query's block, which may be out of range."""
        if self.block_q is None:
            return query * 0
        if self.first_q_block is None:
            return floor_div(query, self.block_q)
        first = jnp.asarray(self.first_q_block)
        return floor_div(query, self.block_q) - first[jnp.minimum(row, first.shape[0] - 1)]

    def _block_lookup(
        self, blocks: Array, head: Any, row: Any, num_q_heads: int
    ) -> Callable[[Any, Any], Any]:
        """Return the function of query and key block that reads `blocks`, or cells, for a head and a row."""
        heads, q_blocks, kv_blocks = blocks.shape[-3:]
        self._check_heads(num_q_heads)
        head = quotient(jnp.asarray(head), num_q_heads // heads)

        row = jnp.minimum(row, blocks.shape[0] - 1) if blocks.ndim == 4 else 0
        first = (row * heads + head) * q_blocks

        def visible(a: Any, b: Any) -> Any:
            is_inside = (a >= 0) & (a < q_blocks) & (b < kv_blocks)
            q_index, kv_index = first + jnp.clip(a, 0, q_blocks - 1), jnp.minimum(b, kv_blocks - 1)
            if blocks.size > MAX_FLAT_INDEX:
                entry = blocks.reshape(-1, kv_blocks).at[q_index, kv_index]
            else:
                # XLA:GPU materializes multi-axis gather indices in memory, but not a single flat index.
                entry = blocks.reshape(-1).at[q_index * kv_blocks + kv_index]
            return entry.get(mode="promise_in_bounds") & is_inside

        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        lookup = self._block_lookup(jnp.asarray(self.blocks), pairs.head, pairs.row, pairs.num_heads[0])
        return lookup(self._query_block(pairs.row, pairs.query), quotient(pairs.key, self.block_kv))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """Return the coverage of tiles. In tiles of many blocks, a part of a cell counts as all of it."""
        sizes, blocks = (self.block_q, self.block_kv), jnp.asarray(self.blocks)
        cells = tuple(
            1 if size is None or max_blocks_per_tile(tile, size) <= MAX_COLUMN_BLOCKS else -(-CELL // size)
            for tile, size in zip(tiles.size, sizes, strict=True)
        )
        queries = tuple(self._query_block(tiles.row, q) for q in (tiles.first_query, tiles.last_query))
        ends = (
            tuple(floor_div(block, cells[0]) for block in queries),
            tuple(quotient(key, self.block_kv * cells[1]) for key in (tiles.first_key, tiles.last_key)),
        )
        most = tuple(
            1 if size is None else max_blocks_per_tile(tile, size * cell)
            for tile, size, cell in zip(tiles.size, sizes, cells, strict=True)
        )

        def covered(cell_values: Array) -> Coverage:
            lookup = self._block_lookup(cell_values, tiles.head, tiles.row, tiles.num_heads[0])
            return coverage_of_blocks(lookup, *ends, most)

        if cells == (1, 1):
            return covered(blocks)
        padding = [(0, 0)] * (blocks.ndim - 2)
        padding += [(0, -size % cell) for size, cell in zip(blocks.shape[-2:], cells, strict=True)]
        split = jnp.pad(blocks, padding)
        split = split.reshape(*blocks.shape[:-2], -1, cells[0], split.shape[-1] // cells[1], cells[1])
        any_visible = covered(split.any(axis=(-3, -1))).any_visible
        return Coverage(any_visible, covered(split.all(axis=(-3, -1))).all_visible)

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        return None

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        blocks, first = jnp.asarray(self.blocks), self.first_q_block
        blocks = blocks.reshape(-1, *blocks.shape[-3:])
        first = None if first is None else jnp.asarray(first).astype(jnp.int32)
        num_q_heads = tiling.num_heads[0]
        tiles_and_blocks = (tiling.queries, self.block_q), (tiling.keys, self.block_kv)
        rows, columns = tiles_and_blocks[::-1] if tiling.has_key_rows else tiles_and_blocks
        num_columns, column_block = columns
        # Columns of queries are numbered from the array's first block.
        is_aligned = tiling.is_aligned and not (tiling.has_key_rows and first is not None)
        if column_block and max_blocks_per_tile(num_columns, column_block) > MAX_COLUMN_BLOCKS:
            pairs = jnp.repeat(jnp.repeat(blocks, self.block_q or 1, axis=2), self.block_kv, axis=3)
            return PairBits.make(
                pairs,
                first_query=first if first is None or self.block_q is None else first * self.block_q,
                shares_queries=self.block_q is None,
                num_q_heads=num_q_heads,
                is_aligned=is_aligned,
                has_key_rows=tiling.has_key_rows,
            )
        fits = column_block is None or num_columns % column_block == 0 or column_block % num_columns == 0
        return BlockBits(
            words=BlockBits.pack(jnp.swapaxes(blocks, 2, 3) if tiling.has_key_rows else blocks),
            first_q_block=None if self.block_q is None else first,
            row_block=rows[1],
            column_block=column_block or ALL_COLUMNS,
            group=num_q_heads // blocks.shape[1],
            is_aligned=is_aligned and fits,
        )


@pytree
class ListedBlocks(BlockMask):
    """A BlockMask of one query per request that also holds the lists of its blocks.

    The kernels use the lists as they are, if no other mask applies, instead of computing them. XLA reads only
    the listed keys if blocks are single keys and all heads share the lists.

    Attributes:
        ids: Indices of the True blocks in ascending order; entries beyond `counts` are arbitrary.
        counts: Number of True blocks.
    """

    ids: Int32[Array, "reqs heads max_listed"] | Int32[np.ndarray, "reqs heads max_listed"]
    counts: Int32[Array, "reqs heads"] | Int32[np.ndarray, "reqs heads"]
    row_axes: ClassVar[dict[str, int]] = BlockMask.row_axes | {"ids": 3, "counts": 2}

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        if self.block_kv == 1 and self.counts.shape[1] == 1:
            return "there is no kernel for lists of single keys, of which XLA reads only the listed ones"
        return super().why_no_kernel(tiling)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBird(Mask):
    """Local blocks, global blocks at the start, and random blocks per head.

    Attributes:
        block_size: Number of tokens per block.
        local_blocks: A query in block a attends to block b if `|a - b| < local_blocks`.
        global_blocks: Number of blocks at the start that all queries attend to and that attend to all blocks.
        random_blocks: Number of draws, with replacement, per head and query block among the blocks up to it.
        seed: Seed of the draws, at least 0.

    Source: BigBird.
    """

    block_size: int = 64
    local_blocks: int = 3
    global_blocks: int = 1
    random_blocks: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        normalize_ints(self, 1, "block_size")
        normalize_ints(self, 0, "local_blocks", "global_blocks", "random_blocks")
        require_int(seed=self.seed)
        require(self.seed >= 0, "seed", "be at least 0", self.seed)

    skips_most_tiles = True

    @property
    @override
    def has_common_keys(self) -> bool:
        return self.global_blocks > 0

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return (None if self.random_blocks else 1), 1

    @property
    @override
    def block_shape(self) -> tuple[int | None, int] | None:
        return self.block_size, self.block_size

    def _block_visible(self, head: Any, a: Any, b: Any) -> Any:
        is_global = (b < self.global_blocks) | ((a >= 0) & (a < self.global_blocks))
        visible = (jnp.abs(a - b) < self.local_blocks) | is_global
        seed_offset = int(self.seed) * 7919 % NUM_HASHES  # Fits int32 for any seed.
        for draw in range(self.random_blocks):
            random_number = _hash(_hash(a * 64 + draw + seed_offset) + head * 977)
            visible = visible | ((a >= 0) & (jax.lax.rem(random_number, a + 1) == b))
        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        a, b = floor_div(pairs.query, self.block_size), quotient(pairs.key, self.block_size)
        return self._block_visible(pairs.head, a, b)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        query_blocks = tuple(floor_div(x, self.block_size) for x in (tiles.first_query, tiles.last_query))
        key_blocks = tuple(quotient(x, self.block_size) for x in (tiles.first_key, tiles.last_key))
        max_blocks = tuple(max_blocks_per_tile(size, self.block_size) for size in tiles.size)

        def block_visible(query_block: Any, key_block: Any) -> Any:
            return self._block_visible(tiles.head, query_block, key_block)

        return coverage_of_blocks(block_visible, query_blocks, key_blocks, max_blocks)


def _hash(x: Any) -> Any:
    """Return a pseudorandom number below NUM_HASHES; products stay within int32."""
    x = remainder(x, NUM_HASHES) * 31337 + 12345
    x = x ^ quotient(x, 4096)
    return remainder(x, NUM_HASHES)
