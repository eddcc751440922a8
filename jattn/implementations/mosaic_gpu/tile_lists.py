"""From a mask to the lists of tiles that varlen_prefill walks through, and which masks have such lists."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, UInt

from jattn.implementations.mosaic_gpu.kernel_masks import Call, kernel_mask, why_not_kernel_mask
from jattn.masks import (
    And,
    BigBird,
    BlockMask,
    Coverage,
    LocalStrided,
    Mask,
    tile_coverage,
)
from jattn.masks.base import leaves
from jattn.masks.documents import documents_to_runs
from jattn.spec import AttentionSpec
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS, MAX_TILES, encode_tiles
from pallas_kernels.varlen_prefill import (
    ALIGN,
    COLUMNS,
    KernelMask,
    PrefillSchedule,
    PrefillSizes,
    PrefillTileLists,
    make_tile_lists,
    num_query_blocks,
)


class TileListConfig(NamedTuple):
    """What is static of a call of varlen_prefill over lists.

    Attributes:
        max_seq_len: Bound of the requests' lengths.
        is_packed: Whether keys are not in a paged cache, so that tiles of keys may begin anywhere.
        is_prefill: Whether the queries stand in the prefill region.
    """

    max_seq_len: int
    is_packed: bool = False
    is_prefill: bool = True


class Factors(NamedTuple):
    """A mask as the kernel takes it: what all of these let a query see.

    Attributes:
        pairs: What is computed for each pair of a tile that is seen in part; None = all are seen.
        blocks: Block masks that are all or nothing for a block of queries and a tile of keys.
        block_q: Queries of such a block; None where all queries are one.
    """

    pairs: Mask | None
    blocks: tuple[BlockMask, ...]
    block_q: int | None


def split_mask_factors(mask: Mask, sizes: PrefillSizes, *, is_packed: bool) -> Factors:
    """Takes a mask apart.

    Args:
        mask: Beyond the spec's numbers.
        sizes: The kernel's sizes.
        is_packed: Keys are not in a paged cache, so that tiles of keys may begin anywhere.
    """
    pairs: list[Mask] = []
    blocks: list[BlockMask] = []
    block_q: int | None = None
    for factor in mask.masks if isinstance(mask, And) else (mask,):
        if (
            isinstance(factor, BlockMask)
            and not is_packed
            and factor.block_kv % sizes.tile_kv == 0
            and (block_q is None or factor.block_q in (None, block_q))
            and (factor.block_q is None or num_query_blocks(sizes.tile_q, factor.block_q) <= MAX_QUERY_BLOCKS)
        ):
            blocks.append(factor)
            block_q = block_q or factor.block_q
        else:
            pairs.append(factor)
    return Factors(functools.reduce(operator.and_, pairs) if pairs else None, tuple(blocks), block_q)


def why_not_lists(mask: Mask, sizes: PrefillSizes, *, is_packed: bool, max_seq_len: int = 0) -> str | None:
    """Why varlen_prefill cannot serve a mask; None if it can.

    For the arguments see split_mask_factors; `max_seq_len` bounds the requests' lengths, 0 = unknown.
    """
    num = max_kv_tiles(TileListConfig(max_seq_len, is_packed), sizes)
    if num > MAX_TILES:
        return f"there are no lists of {num} tiles of {sizes.tile_kv} keys (at most {MAX_TILES})"
    pairs = split_mask_factors(mask, sizes, is_packed=is_packed).pairs
    return None if pairs is None else why_not_kernel_mask(pairs, sizes.tile_kv)


def max_kv_tiles(call: TileListConfig, sizes: PrefillSizes) -> int:
    """Tiles of keys that a request may lie in."""
    return -(-(call.max_seq_len + (ALIGN - 1) * call.is_packed) // sizes.tile_kv)


def has_narrow_blocks(mask: Mask, tile_kv: int) -> bool:
    """Whether some blocks of the mask are narrower than a tile of keys, so that tiles would waste work."""
    sizes = {BlockMask: "block_kv", LocalStrided: "block_size", BigBird: "block_size"}
    return any(
        getattr(leaf, sizes[type(leaf)]) % tile_kv != 0 for leaf in leaves(mask) if type(leaf) in sizes
    )


def has_narrow_queries(mask: Mask, tile_q: int) -> bool:
    """Whether blocks of fewer queries than a tile has each see tiles of keys of their own."""
    sizes = [leaf.block_q for leaf in leaves(mask) if isinstance(leaf, BlockMask)]
    return any(size is not None and size % tile_q != 0 for size in sizes)


def pair_mask(
    mask: Mask, spec: AttentionSpec, sizes: PrefillSizes, call: TileListConfig
) -> KernelMask | None:
    """What varlen_prefill computes for each pair of a tile that is seen in part; None = nothing. Traced.

    Arguments are tile_lists'.
    """
    pairs = split_mask_factors(mask, sizes, is_packed=call.is_packed).pairs
    if pairs is None:
        return None
    num_heads = (spec.num_q_heads, spec.num_kv_heads)
    return kernel_mask(
        pairs, Call(num_heads, call.is_prefill, call.is_packed, call.max_seq_len, sizes.tile_kv)
    )


def tile_lists(
    mask: Mask, spec: AttentionSpec, schedule: PrefillSchedule, sizes: PrefillSizes, call: TileListConfig
) -> PrefillTileLists:
    """The lists of a step's tiles of queries under a mask and the spec's numbers. Traced.

    Args:
        mask: Beyond the spec's numbers; why_not_lists is None.
        spec: The layer.
        schedule: The tiles of queries.
        sizes: The kernel's sizes.
        call: What is static.
    """
    factors = split_mask_factors(documents_to_runs(mask), sizes, is_packed=call.is_packed)
    items = _Items(schedule, spec, sizes, call)
    numbers = spec.mask_of_numbers if factors.pairs is None else spec.mask_of_numbers & factors.pairs
    any_visible, all_visible = items.coverage(numbers, items.first, items.last)
    all_visible &= items.is_inside()[:, None, :]
    seen_by_block = []
    if factors.blocks:
        blocks = functools.reduce(operator.and_, factors.blocks)
        for ends in items.blocks_of_queries(factors.block_q):
            seen = items.coverage(blocks, *ends, is_inside_blocks=True).any_visible
            all_visible &= seen | (ends[1] < ends[0])[:, None, None]
            seen_by_block.append(seen)
        any_visible &= functools.reduce(operator.or_, seen_by_block)
    # Items that share keys follow each other, so that their keys stay in L2, if that leaves all SMs busy.
    per_kv_head = schedule.table.shape[0] * spec.q_heads_per_kv_head
    sets = spec.num_kv_heads if per_kv_head >= 2 * sizes.workers else 1
    return make_tile_lists(schedule, encode_tiles(any_visible, all_visible, seen_by_block), sets=sets)


def packed_codes(
    mask: Mask, spec: AttentionSpec, schedule: PrefillSchedule, sizes: PrefillSizes, call: TileListConfig
) -> UInt[Array, "q_tiles q_heads kv_tiles"]:
    """What is known of each tile of queries and tile of packed keys, pair by pair masks among it. Traced.

    Arguments are tile_lists'.
    """
    items = _Items(schedule, spec, sizes, call)
    any_visible, all_visible = items.coverage(
        spec.mask_of_numbers & documents_to_runs(mask), items.first, items.last
    )
    return encode_tiles(any_visible, all_visible & items.is_inside()[:, None, :])


class _Items:
    """A schedule's tiles of queries as masks look at them: positions of the first query and the last one.

    Both may be before 0, where there are more queries than keys.
    """

    def __init__(
        self, schedule: PrefillSchedule, spec: AttentionSpec, sizes: PrefillSizes, call: TileListConfig
    ) -> None:
        column = {name: schedule.table[:, i] for i, name in enumerate(COLUMNS)}
        self.first = column["position"] + column["begin"]
        self.last = column["position"] + column["end"] - 1
        self._rows, self._seq_lens = column["req"], column["seq_len"]
        self._skew = column["kv_start"] % ALIGN if call.is_packed else None
        self._max_kv_tiles = max_kv_tiles(call, sizes)
        self._spec, self._sizes, self._is_prefill = spec, sizes, call.is_prefill

    def coverage(self, mask: Mask, first: Any, last: Any, *, is_inside_blocks: bool = False) -> Coverage:
        """How much of each tile the queries from first to last see."""
        return tile_coverage(
            mask,
            rows=self._rows,
            first_query=first,
            num_queries=last - first + 1,
            seq_lens=self._seq_lens,
            num_heads=(self._spec.num_q_heads, self._spec.num_kv_heads),
            size=(self._sizes.tile_q, self._sizes.tile_kv),
            max_kv_tiles=self._max_kv_tiles,
            alignment_offset=self._skew,
            is_prefill=self._is_prefill,
            is_inside_blocks=is_inside_blocks,
        )

    def blocks_of_queries(self, block_q: int | None) -> list[tuple[Any, Any]]:
        """First query and last one of each block of them that a tile may touch; None: all are in one."""
        if block_q is None:
            return [(self.first, self.last)]
        begins = [
            (self.first // block_q + nth) * block_q
            for nth in range(num_query_blocks(self._sizes.tile_q, block_q))
        ]
        return [(jnp.maximum(x, self.first), jnp.minimum(x + (block_q - 1), self.last)) for x in begins]

    def is_inside(self) -> Any:
        """Which tiles of keys lie within the request's keys: [items, max_kv_tiles]."""
        tile_kv = self._sizes.tile_kv
        first_key = jnp.arange(self._max_kv_tiles, dtype=jnp.int32)[None, :] * tile_kv
        if self._skew is not None:
            first_key = first_key - self._skew[:, None]
        return (first_key >= 0) & (first_key + tile_kv <= self._seq_lens[:, None])
