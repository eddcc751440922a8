"""Block lists of paged_decode: the KV blocks that each KV head of a request visits under a mask."""

import functools
import math
import operator

import jax.numpy as jnp

from jattn.batch.metadata import BatchMetadata
from jattn.implementations.layer_config import RegionSizes
from jattn.masks import ListedBlocks, Mask, tile_coverage
from jattn.masks.base import factors
from jattn.spec import AttentionSpec
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS, MAX_TILES, encode_tiles, list_tiles
from pallas_kernels.paged_decode import LIST_BLOCK_SIZES, BlockList


def list_block_size(mask: Mask, spec: AttentionSpec, region: RegionSizes) -> int | str:
    """Return the number of keys per listed block, or why paged_decode does not support lists of this mask.

    A list serves all query heads of a KV head: it holds the blocks that one of them visits, with a bit per
    head where heads differ.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        spec: Attention of the layer.
        region: Static sizes of the decode region.
    """
    if region.bucket.decode_query_len > 1:
        return "block lists support one query per request"
    shapes = [factor.block_shape for factor in factors(mask)]
    sizes = [shape[1] for shape in shapes if shape is not None]
    if len(sizes) < len(shapes):
        return "block lists support masks of full blocks only"
    if needs_head_bits(mask, spec) and spec.q_heads_per_kv_head > MAX_QUERY_BLOCKS:
        return f"block lists support at most {MAX_QUERY_BLOCKS} query heads with different blocks per KV head"
    size = math.gcd(*sizes)
    if size == 1 and (not isinstance(mask, ListedBlocks) or needs_head_bits(mask, spec)):
        return "lists of single keys support one ListedBlocks whose lists all query heads of a group share"
    fits = size % region.block_size == 0 or region.block_size % size == 0
    if size not in LIST_BLOCK_SIZES or not fits:
        return f"block lists do not support blocks of {size} keys over cache blocks of {region.block_size}"
    num = num_blocks(region.max_blocks * region.block_size, size)
    if num > MAX_TILES and size > 1:
        return f"block lists of {num} blocks of {size} keys exceed the maximum of {MAX_TILES} blocks"
    return size


def num_blocks(max_kv: int, size: int) -> int:
    """Return the number of blocks of `size` keys that cover `max_kv` keys."""
    return -(-max_kv // size)


def needs_head_bits(mask: Mask, spec: AttentionSpec) -> bool:
    """Return whether query heads of a KV head visit different blocks, so that lists need a bit per head."""
    num_heads = spec.num_q_heads, spec.num_kv_heads
    return not all(factor.is_equal_within_groups(num_heads) for factor in factors(mask))


def block_list(mask: Mask, spec: AttentionSpec, metadata: BatchMetadata, size: int) -> BlockList:
    """Build the list of blocks of `size` keys that each request visits, per KV head. Works inside jit."""
    seq_lens, kv_heads = metadata.seq_lens, spec.num_kv_heads
    shapes = (seq_lens.shape[0], kv_heads), (seq_lens.shape[0], 1)
    if isinstance(mask, ListedBlocks) and mask.counts.shape in shapes[: 2 if size == 1 else 1]:
        ids, counts = jnp.asarray(mask.ids), jnp.asarray(mask.counts)
        ids = jnp.broadcast_to(ids, (*shapes[0], ids.shape[2]))
        return BlockList(ids=ids, counts=jnp.broadcast_to(counts, shapes[0]))
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
    if needs_head_bits(mask, spec):
        heads = [by_head[:, :, index] for index in range(spec.q_heads_per_kv_head)]
        any_visible = functools.reduce(operator.or_, heads)
    listed = list_tiles(encode_tiles(any_visible, any_visible, heads).reshape(-1, any_visible.shape[-1]))
    return BlockList(
        ids=listed.entries.reshape(any_visible.shape), counts=listed.num_full.reshape(any_visible.shape[:2])
    )
