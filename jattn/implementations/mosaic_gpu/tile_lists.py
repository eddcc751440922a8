"""Tile lists of varlen_prefill: the KV tiles that each query tile visits under a mask."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, UInt

from jattn.implementations.mosaic_gpu.kernel_masks import KernelMaskConfig, kernel_mask, why_not_kernel_mask
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
    MaskBlocks,
    PrefillSchedule,
    PrefillSizes,
    PrefillTileLists,
    make_tile_lists,
    num_query_blocks,
)


class TileListConfig(NamedTuple):
    """Static configuration of a call of varlen_prefill over tile lists.

    Attributes:
        max_seq_len: Maximum number of tokens per request.
        is_packed: Whether keys are outside a paged cache, so that KV tiles may begin at any position.
        is_prefill: Whether the queries are in the prefill region.
    """

    max_seq_len: int
    is_packed: bool = False
    is_prefill: bool = True


class MaskFactors(NamedTuple):
    """A mask as the intersection of a part evaluated pair by pair and of block masks.

    Attributes:
        pairs: Mask that the kernel evaluates pair by pair in partial tiles; None if there is none.
        blocks: Block masks that are full or empty for each block of queries and KV tile.
        block_q: Queries per block of the block masks; None if one block holds all queries.
    """

    pairs: Mask | None
    blocks: tuple[BlockMask, ...]
    block_q: int | None


def split_mask_factors(mask: Mask, sizes: PrefillSizes, *, is_packed: bool) -> MaskFactors:
    """Split a mask into a part evaluated pair by pair and block masks.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        sizes: Sizes of the kernel.
        is_packed: Whether keys are outside a paged cache, so that KV tiles may begin at any position.
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
    return MaskFactors(functools.reduce(operator.and_, pairs) if pairs else None, tuple(blocks), block_q)


def why_not_lists(mask: Mask, sizes: PrefillSizes, *, is_packed: bool, max_seq_len: int = 0) -> str | None:
    """Return why varlen_prefill does not support a mask; None if it does.

    `max_seq_len` is the maximum number of tokens per request, 0 if unknown; see split_mask_factors for the
    other arguments.
    """
    num = max_kv_tiles(TileListConfig(max_seq_len, is_packed), sizes)
    if num > MAX_TILES:
        return f"tile lists of {num} tiles of {sizes.tile_kv} keys exceed the maximum of {MAX_TILES} tiles"
    pairs = split_mask_factors(mask, sizes, is_packed=is_packed).pairs
    return None if pairs is None else why_not_kernel_mask(pairs, sizes.tile_kv)


def max_kv_tiles(config: TileListConfig, sizes: PrefillSizes) -> int:
    """Return the maximum number of KV tiles per request."""
    return -(-(config.max_seq_len + (ALIGN - 1) * config.is_packed) // sizes.tile_kv)


def mask_blocks(mask: Mask) -> MaskBlocks:
    """Return the blocks of queries and of keys of a mask, which tiles should not cut."""
    names = {BlockMask: "block_kv", LocalStrided: "block_size", BigBird: "block_size"}
    keys = tuple(getattr(leaf, names[type(leaf)]) for leaf in leaves(mask) if type(leaf) in names)
    queries = [leaf.block_q for leaf in leaves(mask) if isinstance(leaf, BlockMask)]
    return MaskBlocks(queries=tuple(size for size in queries if size is not None), keys=keys)


def pair_mask(
    mask: Mask, spec: AttentionSpec, sizes: PrefillSizes, config: TileListConfig
) -> KernelMask | None:
    """Return the mask that varlen_prefill evaluates pair by pair in partial tiles; None if none.

    Works inside jit. See tile_lists for the arguments.
    """
    pairs = split_mask_factors(mask, sizes, is_packed=config.is_packed).pairs
    if pairs is None:
        return None
    num_heads = (spec.num_q_heads, spec.num_kv_heads)
    mask_config = KernelMaskConfig(
        num_heads, config.is_prefill, config.is_packed, config.max_seq_len, sizes.tile_kv
    )
    return kernel_mask(pairs, mask_config)


def tile_lists(
    mask: Mask, spec: AttentionSpec, schedule: PrefillSchedule, sizes: PrefillSizes, config: TileListConfig
) -> PrefillTileLists:
    """Build the KV tile lists of a step's query tiles under a mask and the spec. Works inside jit.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality; why_not_lists must be None.
        spec: Attention of the layer.
        schedule: Schedule with the query tiles.
        sizes: Sizes of the kernel.
        config: Static configuration of the call.
    """
    factors = split_mask_factors(documents_to_runs(mask), sizes, is_packed=config.is_packed)
    query_tiles = _QueryTilePositions(schedule, spec, sizes, config)
    numbers = spec.mask_of_numbers if factors.pairs is None else spec.mask_of_numbers & factors.pairs
    any_visible, all_visible = query_tiles.coverage(numbers, query_tiles.first, query_tiles.last)
    all_visible &= query_tiles.is_inside()[:, None, :]
    visible_by_block = []
    if factors.blocks:
        blocks = functools.reduce(operator.and_, factors.blocks)
        for ends in query_tiles.blocks_of_queries(factors.block_q):
            block_visible = query_tiles.coverage(blocks, *ends, is_inside_blocks=True).any_visible
            all_visible &= block_visible | (ends[1] < ends[0])[:, None, None]
            visible_by_block.append(block_visible)
        any_visible &= functools.reduce(operator.or_, visible_by_block)
    # Query tiles that share keys are processed one after another, so that the keys stay in L2, if enough
    # query tiles remain to keep all SMs busy.
    per_kv_head = schedule.table.shape[0] * spec.q_heads_per_kv_head
    sets = spec.num_kv_heads if per_kv_head >= 2 * sizes.workers else 1
    return make_tile_lists(schedule, encode_tiles(any_visible, all_visible, visible_by_block), sets=sets)


def packed_codes(
    mask: Mask, spec: AttentionSpec, schedule: PrefillSchedule, sizes: PrefillSizes, config: TileListConfig
) -> UInt[Array, "q_tiles q_heads kv_tiles"]:
    """Return the bits of `encode_tiles` for each query tile and packed KV tile. Works inside jit.

    See tile_lists for the arguments; here the whole mask may be evaluated pair by pair.
    """
    query_tiles = _QueryTilePositions(schedule, spec, sizes, config)
    any_visible, all_visible = query_tiles.coverage(
        spec.mask_of_numbers & documents_to_runs(mask), query_tiles.first, query_tiles.last
    )
    return encode_tiles(any_visible, all_visible & query_tiles.is_inside()[:, None, :])


class _QueryTilePositions:
    """Positions of the first and last query of each query tile of a schedule.

    Positions are negative where a request has more queries than keys.
    """

    def __init__(
        self, schedule: PrefillSchedule, spec: AttentionSpec, sizes: PrefillSizes, config: TileListConfig
    ) -> None:
        column = {name: schedule.table[:, i] for i, name in enumerate(COLUMNS)}
        self.first = column["position"] + column["begin"]
        self.last = column["position"] + column["end"] - 1
        self._rows, self._seq_lens = column["req"], column["seq_len"]
        self._alignment_offset = column["kv_start"] % ALIGN if config.is_packed else None
        self._max_kv_tiles = max_kv_tiles(config, sizes)
        self._spec, self._sizes, self._is_prefill = spec, sizes, config.is_prefill

    def coverage(self, mask: Mask, first: Any, last: Any, *, is_inside_blocks: bool = False) -> Coverage:
        """Return how much of each KV tile is visible to the queries from first to last."""
        return tile_coverage(
            mask,
            rows=self._rows,
            first_query=first,
            num_queries=last - first + 1,
            seq_lens=self._seq_lens,
            num_heads=(self._spec.num_q_heads, self._spec.num_kv_heads),
            size=(self._sizes.tile_q, self._sizes.tile_kv),
            max_kv_tiles=self._max_kv_tiles,
            alignment_offset=self._alignment_offset,
            is_prefill=self._is_prefill,
            is_inside_blocks=is_inside_blocks,
        )

    def blocks_of_queries(self, block_q: int | None) -> list[tuple[Any, Any]]:
        """Return the first and last query of each query block that a tile may touch; one block if None."""
        if block_q is None:
            return [(self.first, self.last)]
        begins = [
            (self.first // block_q + index) * block_q
            for index in range(num_query_blocks(self._sizes.tile_q, block_q))
        ]
        return [(jnp.maximum(x, self.first), jnp.minimum(x + (block_q - 1), self.last)) for x in begins]

    def is_inside(self) -> Any:
        """Return which KV tiles lie entirely within the request's keys: [query tiles, max_kv_tiles]."""
        tile_kv = self._sizes.tile_kv
        first_key = jnp.arange(self._max_kv_tiles, dtype=jnp.int32)[None, :] * tile_kv
        if self._alignment_offset is not None:
            first_key = first_key - self._alignment_offset[:, None]
        return (first_key >= 0) & (first_key + tile_kv <= self._seq_lens[:, None])
