"""From a mask to the lists of blocks that paged_decode walks through, and which masks have such lists."""

import functools
import math
import operator

import jax.numpy as jnp

from jattn.batch.metadata import BatchMetadata
from jattn.implementations.layer_config import RegionSizes
from jattn.masks import And, BlockMask, ListedBlocks, LocalStrided, Mask, ShardedMask, tile_coverage
from jattn.spec import AttentionSpec
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS, MAX_TILES, encode_tiles, list_tiles
from pallas_kernels.paged_decode import LIST_BLOCK_SIZES, BlockList


def list_block_size(mask: Mask, spec: AttentionSpec, region: RegionSizes) -> int | str:
    """Keys of a listed block, or why paged_decode cannot walk through lists of this mask.

    A list serves all query heads of a kv head: it names what one of them sees, and who does.

    Args:
        mask: Beyond the spec's numbers.
        spec: The layer.
        region: The decode region.
    """
    if region.bucket.decode_query_len > 1:
        return "block lists are for one query of each request"
    sizes = []
    for factor in _factors(mask):
        if isinstance(factor, BlockMask):
            sizes.append(factor.block_kv)
        elif isinstance(factor, LocalStrided):
            sizes.append(factor.block_size)
        elif isinstance(factor, ShardedMask):
            return "there are no block lists for patterns that differ from device to device"
        else:
            return "block lists are for whole blocks"
    if tells_heads(mask, spec) and spec.q_heads_per_kv_head > MAX_QUERY_BLOCKS:
        return f"block lists tell at most {MAX_QUERY_BLOCKS} query heads of a kv head apart"
    size = math.gcd(*sizes)
    fits = size % region.block_size == 0 or region.block_size % size == 0
    if size not in LIST_BLOCK_SIZES or not fits:
        return f"there are no block lists for blocks of {size} keys over cache blocks of {region.block_size}"
    num = num_blocks(region.max_blocks * region.block_size, size)
    if num > MAX_TILES:
        return f"there are no lists of {num} blocks of {size} keys (at most {MAX_TILES})"
    return size


def num_blocks(max_kv: int, size: int) -> int:
    """Blocks of a list, at most, before so many keys."""
    return -(-max_kv // size)


def tells_heads(mask: Mask, spec: AttentionSpec) -> bool:
    """Whether the query heads of a kv head see different blocks."""
    return not all(_is_alike_in_groups(factor, spec) for factor in _factors(mask))


def _factors(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)


def _is_alike_in_groups(mask: Mask, spec: AttentionSpec) -> bool:
    if isinstance(mask, BlockMask):
        return spec.num_kv_heads % mask.blocks.shape[-3] == 0
    assert isinstance(mask, LocalStrided)
    return mask.homo_head or mask.homo_head_group or spec.q_heads_per_kv_head == 1


def block_list(mask: Mask, spec: AttentionSpec, metadata: BatchMetadata, size: int) -> BlockList:
    """The blocks of `size` keys that each request's query sees, for each kv head. Traced."""
    seq_lens, kv_heads = metadata.seq_lens, spec.num_kv_heads
    if isinstance(mask, ListedBlocks) and mask.counts.shape == (seq_lens.shape[0], kv_heads):
        return BlockList(ids=mask.ids, counts=mask.counts)
    coverage = tile_coverage(
        mask,
        rows=jnp.arange(seq_lens.shape[0], dtype=jnp.int32),
        first_query=jnp.maximum(seq_lens - 1, 0),
        num_queries=jnp.minimum(seq_lens, 1),
        seq_lens=seq_lens,
        num_heads=(spec.num_q_heads, kv_heads),
        size=(1, size),
        max_kv_tiles=num_blocks(metadata.block_table.shape[1] * metadata.block_size, size),
        is_prefill=False,
        is_inside_blocks=True,
    )
    by_head = coverage.any_visible.reshape(seq_lens.shape[0], kv_heads, spec.q_heads_per_kv_head, -1)
    any_visible, heads = by_head[:, :, 0], []
    if tells_heads(mask, spec):
        heads = [by_head[:, :, nth] for nth in range(spec.q_heads_per_kv_head)]
        any_visible = functools.reduce(operator.or_, heads)
    listed = list_tiles(encode_tiles(any_visible, any_visible, heads).reshape(-1, any_visible.shape[-1]))
    return BlockList(
        ids=listed.entries.reshape(any_visible.shape), counts=listed.num_full.reshape(any_visible.shape[:2])
    )
