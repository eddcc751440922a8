"""Kernel plans: schedules and tile lists, computed once per step and shared by layers."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.implementations.mosaic_gpu import block_lists, tile_lists
from jattn.implementations.mosaic_gpu.gathered_columns import gathered_columns_layer, gathered_kv_layout
from jattn.implementations.mosaic_gpu.kernel_config import (
    DecodeKernelConfig,
    KernelConfig,
    PrefillKernelConfig,
    score_of,
)
from jattn.implementations.mosaic_gpu.slash_masks import gathers
from jattn.masks import Mask, split_gathered
from jattn.pytree import pytree
from jattn.spec import AttentionSpec
from pallas_kernels import paged_decode as decode_kernel
from pallas_kernels import varlen_prefill as prefill_kernel


@pytree
class DecodeKernelPlan:
    """Schedule and block list of paged_decode.

    Attributes:
        schedule: Schedule of the thread blocks.
        block_list: Block list per KV head; None without a mask.
    """

    schedule: decode_kernel.DecodeSchedule
    block_list: decode_kernel.BlockList | None


@pytree
class PrefillKernelPlan:
    """Schedule, tile lists and mask arrays of varlen_prefill.

    Attributes:
        schedule: Query tiles.
        lists: KV tiles that each query tile visits; None without a mask.
        mask_arrays: What the kernel reads of the mask in tiles that are seen in part.
        of_columns: Of the gathered columns, where the rest alone is the mask here; None where none are.
    """

    schedule: prefill_kernel.PrefillSchedule
    lists: prefill_kernel.PrefillTileLists | None
    mask_arrays: tuple[Array, ...]
    of_columns: "PrefillKernelPlan | None" = None


type KernelPlan = DecodeKernelPlan | PrefillKernelPlan


def kernel_plan_key(kernel: KernelConfig, spec: AttentionSpec) -> tuple[Any, ...] | None:
    """Layers of equal keys share their work under one more mask; None: it depends on the layer's own keys."""
    mask = *score_of(spec).mask, spec.sparsity
    if isinstance(kernel, DecodeKernelConfig):
        heads = spec.num_kv_heads, spec.q_heads_per_kv_head, spec.head_dim
        return (
            "decode",
            *heads,
            spec.batch_invariant,
            *mask,
            kernel.sizes.schedule_sizes,
            kernel.list_block_size,
        )
    if kernel.is_packed or kernel.is_read_first:
        return None
    of_layer = spec.num_q_heads, spec.num_kv_heads, spec.batch_invariant
    of_lists = of_layer if kernel.has_lists else ()
    of_splits = (spec.num_q_heads,) if kernel.sizes.max_splits > 1 else ()
    return "prefill", of_lists, of_splits, *mask, kernel.sizes, kernel.has_lists


def plan_decode_kernel(
    kernel: DecodeKernelConfig,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    *,
    block_list: decode_kernel.BlockList | None = None,
) -> DecodeKernelPlan:
    """Build the kernel plan of paged_decode. Traced.

    Args:
        kernel: choose_kernel's.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: What it masks beyond the spec's numbers.
        block_list: Of these heads and this mask, where another kind of layer has one.
    """
    size, blocks = kernel.list_block_size, block_list
    if size is not None and blocks is None:
        assert mask is not None
        blocks = block_lists.block_list(mask, spec, metadata, size)
    schedule = decode_kernel.make_schedule(
        metadata.seq_lens,
        score=score_of(spec),
        sizes=kernel.sizes,
        kv_heads=spec.num_kv_heads,
        group=spec.q_heads_per_kv_head,
        decode_query_len=metadata.bucket.decode_query_len,
        block_list=blocks,
        list_block_size=size,
    )
    return DecodeKernelPlan(schedule=schedule, block_list=blocks)


def plan_prefill_kernel(
    kernel: PrefillKernelConfig,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    *,
    kv_start_loc: Int32[Array, " reqs"] | None = None,
    max_seq_len: int | None = None,
) -> PrefillKernelPlan:
    """Build the kernel plan of varlen_prefill. Traced.

    Args:
        kernel: choose_kernel's.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: What it masks beyond the spec's numbers.
        kv_start_loc: First key of each request where keys are not read from a paged cache.
        max_seq_len: Static bound of the requests' lengths; the block table's when None.
    """
    seq_lens = metadata.seq_lens
    if kv_start_loc is None:  # what the block table has no column for has no block
        seq_lens = jnp.minimum(seq_lens, metadata.block_table.shape[1] * metadata.block_size)
    schedule = prefill_kernel.make_schedule(
        metadata.query_start_loc,
        seq_lens,
        kv_start_loc,
        num_tokens=metadata.bucket.max_tokens,
        score=score_of(spec),
        sizes=kernel.sizes,
        q_heads=spec.num_q_heads,
        has_lists=kernel.has_lists,
    )
    if mask is None:
        return PrefillKernelPlan(schedule=schedule, lists=None, mask_arrays=())
    of_columns = None
    if gathers(mask, spec):
        columns, mask = split_gathered(mask)
        layer, where = gathered_columns_layer(spec, columns), gathered_kv_layout(columns, metadata)
        of_columns = plan_prefill_kernel(layer.kernel, metadata, layer.spec, columns, **where)
    call = lists_call(kernel, metadata, max_seq_len)
    lists = tile_lists.tile_lists(mask, spec, schedule, kernel.sizes, call)
    of_pairs = tile_lists.pair_mask(mask, spec, kernel.sizes, call)
    arrays = () if of_pairs is None else of_pairs.arrays
    return PrefillKernelPlan(schedule=schedule, lists=lists, mask_arrays=arrays, of_columns=of_columns)


def lists_call(
    kernel: PrefillKernelConfig, metadata: BatchMetadata, max_seq_len: int | None
) -> tile_lists.TileListConfig:
    """What is static of a call over lists."""
    return tile_lists.TileListConfig(
        max_seq_len=max_seq_len or metadata.block_table.shape[1] * metadata.block_size,
        is_packed=kernel.is_packed,
        is_prefill=metadata.bucket.max_decodes == 0,
    )
