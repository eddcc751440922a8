"""Masks of blocks: arrays that say which block of queries sees which block of keys, and BigBird's."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jattn.masks.base import Mask
from jattn.masks.checks import normalize_ints, require_array
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles, floor_div, quotient, remainder
from jattn.pytree import pytree, static
from pallas_kernels import support
from pallas_kernels.checks import require, require_int

DRAWS = 32749  # numbers that a draw may give; a prime
MAX_PLACES = 2**31 - 1  # that a number in 32 bits tells apart


def coverage_of_blocks(
    visible: Callable[[Any, Any], Any], query_blocks: tuple[Any, Any], key_blocks: tuple[Any, Any], count: Any
) -> Coverage:
    """Return the coverage of tiles from `visible(query_block, key_block)`, evaluated for each block.

    Args:
        visible: Of block numbers.
        query_blocks: First and last block of queries of each tile.
        key_blocks: First and last block of keys.
        count: Static: how many blocks of queries and of keys a tile has at most.
    """
    any_visible: Any = False
    all_visible: Any = True
    for i in range(count[0]):
        for j in range(count[1]):
            a, b = query_blocks[0] + i, key_blocks[0] + j
            is_in = (a <= query_blocks[1]) & (b <= key_blocks[1])
            seen = visible(a, b)
            any_visible, all_visible = any_visible | (seen & is_in), all_visible & (seen | ~is_in)
    return Coverage(any_visible, all_visible)


def max_blocks_per_tile(tile: int, block: int) -> int:
    """How many blocks a tile of so many positions touches at most."""
    return (tile + block - 2) // block + 1


@pytree
class BlockMask(Mask):
    """Which block of queries sees which block of keys, as an array.

    It is a filter: causal attention may be put on top. What lies outside the array sees nothing and is not
    seen. So a step refuses a mask that is smaller than its static bounds (`attend`: the block table's width);
    where only the traced lengths know, as for keys outside a paged cache, such queries come out as zeros.

    Attributes:
        blocks: For all rows [heads, q_blocks, kv_blocks] or for each [reqs, heads, q_blocks, kv_blocks]. The
            number of heads divides that of the query heads: neighbours share an entry, as with kv heads.
        first_q_block: Which of the request's blocks of queries stands first, for each row; 0 when None.
        block_q: Static: queries of a block; None = all queries share the only block of queries.
        block_kv: Static: keys of a block. Blocks of keys are counted from the request's start.
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
            require(shape[-2] == 1, "blocks", "have one block of queries where block_q is None", shape)
        else:
            normalize_ints(self, 1, "block_q")
        require(0 not in shape[-3:], "blocks", "have at least one block and one head", shape)

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.blocks.shape[-3], 1

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        _, q_blocks, kv_blocks = self.blocks.shape[-3:]
        self._check_heads(sizes.num_q_heads)
        query_end = sizes.max_seq_len if sizes.max_query_end is None else sizes.max_query_end
        max_query = query_end if self.first_q_block is None else sizes.max_query_len
        for axis, got, size, positions in (
            ("kv_blocks", kv_blocks, self.block_kv, sizes.max_seq_len),
            ("q_blocks", q_blocks, self.block_q, max_query),
        ):
            if size is not None and positions is not None:
                need = -(-positions // size)
                wanted = f"be at least {need}, to reach over the {positions} positions that a row may have"
                require(got >= need, f"BlockMask's {axis} of {size}", wanted, got)
        self._check_rows_reach(sizes)

    def _check_rows_reach(self, sizes: BatchSizes) -> None:
        """What first_q_block leaves of each row must reach over its queries, where both can be seen.

        Queries may begin anywhere in a block and so touch one more than as many whole ones are. Where the
        array has room for that, nothing is looked at: it may still be computed.
        """
        first, size, q_blocks = self.first_q_block, self.block_q, self.blocks.shape[-2]
        ends, longest = sizes.query_ends, sizes.max_query_len
        if first is None or size is None or ends is None or not support.is_concrete(first):
            return
        if longest is not None and q_blocks >= max_blocks_per_tile(longest, size):
            return
        last = ends()
        need = int(np.max(np.where(last > 0, -(-last // size) - np.asarray(first), 0), initial=0))
        wanted = f"be at least {need}, to reach from first_q_block over a row's last query"
        require(q_blocks >= need, f"BlockMask's q_blocks of {size}", wanted, q_blocks)

    def _check_heads(self, num_q_heads: int) -> None:
        heads = self.blocks.shape[-3]
        require(num_q_heads % heads == 0, "blocks' heads", f"divide the query heads ({num_q_heads})", heads)

    def _query_block(self, row: Any, query: Any) -> Any:
        """Where in `blocks` the query's block stands; may lie outside."""
        if self.block_q is None:
            return query * 0
        if self.first_q_block is None:
            return floor_div(query, self.block_q)
        first = jnp.asarray(self.first_q_block)
        return floor_div(query, self.block_q) - first[jnp.minimum(row, first.shape[0] - 1)]

    def _at(self, head: Any, row: Any, num_q_heads: int) -> Callable[[Any, Any], Any]:
        blocks = jnp.asarray(self.blocks)
        heads, q_blocks, kv_blocks = blocks.shape[-3:]
        self._check_heads(num_q_heads)
        head = quotient(jnp.asarray(head), num_q_heads // heads)

        row = jnp.minimum(row, blocks.shape[0] - 1) if blocks.ndim == 4 else 0
        first = (row * heads + head) * q_blocks

        def visible(a: Any, b: Any) -> Any:
            is_in = (a >= 0) & (a < q_blocks) & (b < kv_blocks)
            places = first + jnp.clip(a, 0, q_blocks - 1), jnp.minimum(b, kv_blocks - 1)
            if blocks.size > MAX_PLACES:
                seen = blocks.reshape(-1, kv_blocks).at[places]
            else:
                # XLA for GPUs writes down the numbers of several axes before it looks, but not one number.
                seen = blocks.reshape(-1).at[places[0] * kv_blocks + places[1]]
            return seen.get(mode="promise_in_bounds") & is_in

        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        at = self._at(pairs.head, pairs.row, pairs.num_heads[0])
        return at(self._query_block(pairs.row, pairs.query), quotient(pairs.key, self.block_kv))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        at = self._at(tiles.head, tiles.row, tiles.num_heads[0])
        queries = tuple(self._query_block(tiles.row, q) for q in (tiles.first_query, tiles.last_query))
        keys = quotient(tiles.first_key, self.block_kv), quotient(tiles.last_key, self.block_kv)
        num_q = 1 if self.block_q is None else max_blocks_per_tile(tiles.size[0], self.block_q)
        return coverage_of_blocks(
            at, queries, keys, (num_q, max_blocks_per_tile(tiles.size[1], self.block_kv))
        )


@pytree
class ListedBlocks(BlockMask):
    """What one query of each request sees, as lists, too: alone, it spares attend their making.

    Attributes:
        ids: The blocks that are True, ascending. What follows is garbage.
        counts: How many they are.
    """

    ids: Int32[Array, "reqs heads kv_blocks"]
    counts: Int32[Array, "reqs heads"]
    row_axes: ClassVar[dict[str, int]] = BlockMask.row_axes | {"ids": 3, "counts": 2}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBird(Mask):
    """Blocks nearby, the first blocks (which also see everything), and random blocks of each head's own.

    Attributes:
        block_size: Tokens of a block.
        local_blocks: A query of block a sees block b if `|a - b| < local_blocks`.
        global_blocks: Blocks at the start that every query sees and whose queries see every block.
        random_blocks: Draws, for each head and block of queries, among the blocks up to it.
        seed: Of the draws.

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

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return (None if self.random_blocks else 1), 1

    def _sees_block(self, head: Any, a: Any, b: Any) -> Any:
        is_global = (b < self.global_blocks) | ((a >= 0) & (a < self.global_blocks))
        visible = (jnp.abs(a - b) < self.local_blocks) | is_global
        of_seed = int(self.seed) * 7919 % DRAWS  # of any seed, within int32
        for nth in range(self.random_blocks):
            drawn = _mixed(_mixed(a * 64 + nth + of_seed) + head * 977)
            visible = visible | ((a >= 0) & (jax.lax.rem(drawn, a + 1) == b))
        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        a, b = floor_div(pairs.query, self.block_size), quotient(pairs.key, self.block_size)
        return self._sees_block(pairs.head, a, b)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        query_block = lambda position: floor_div(position, self.block_size)
        key_block = lambda position: quotient(position, self.block_size)
        return coverage_of_blocks(
            lambda a, b: self._sees_block(tiles.head, a, b),
            (query_block(tiles.first_query), query_block(tiles.last_query)),
            (key_block(tiles.first_key), key_block(tiles.last_key)),
            tuple(max_blocks_per_tile(size, self.block_size) for size in tiles.size),
        )


def _mixed(x: Any) -> Any:
    """A number below DRAWS that looks drawn; products stay within int32."""
    x = remainder(x, DRAWS) * 31337 + 12345
    x = x ^ quotient(x, 4096)
    return remainder(x, DRAWS)
