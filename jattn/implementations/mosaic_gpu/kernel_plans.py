"""Kernel plans: schedules and tile lists, computed once per step and shared by layers."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.implementations.mosaic_gpu import block_lists, tile_lists
from jattn.implementations.mosaic_gpu.gathered_columns import gathered_columns_spec, gathered_kv_layout
from jattn.implementations.mosaic_gpu.kernel_config import (
    DecodeKernelConfig,
    KernelConfig,
    PrefillKernelConfig,
    score_of,
)
from jattn.masks import GatheredColumns, Mask
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
        mask: Tile lists, and the mask of the pairs in partial tiles; None without a mask.
        columns: Gathered keys, which `mask` then excludes; None without them.
    """

    schedule: prefill_kernel.PrefillSchedule
    mask: tile_lists.MaskPlan | None
    columns: "ColumnsPlan | None"


@pytree
class ColumnsPlan:
    """Plan of a mask whose columns are gathered.

    Attributes:
        mask: Mask of the gathered keys.
        kernel_plan: Kernel plan over the gathered keys.
    """

    mask: GatheredColumns
    kernel_plan: PrefillKernelPlan


type KernelPlan = DecodeKernelPlan | PrefillKernelPlan


def kernel_plan_key(kernel: KernelConfig, spec: AttentionSpec) -> tuple[Any, ...] | None:
    """Return a key that is equal for layers that can share a kernel plan under the same step mask.

    None if the plan depends on the location of the layer's keys.
    """
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
    if kernel.is_packed or kernel.uses_cache_read:
        return None
    layer_key = spec.num_q_heads, spec.num_kv_heads, spec.batch_invariant
    list_key = layer_key if kernel.has_lists else ()
    split_key = (spec.num_q_heads,) if kernel.sizes.max_splits > 1 else ()
    list_options = kernel.has_lists, kernel.list_block_size, kernel.rows_per_token
    return "prefill", list_key, split_key, *mask, kernel.sizes, *list_options


def plan_decode_kernel(
    kernel: DecodeKernelConfig,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    *,
    block_list: decode_kernel.BlockList | None = None,
) -> DecodeKernelPlan:
    """Build the kernel plan of paged_decode. Works inside jit.

    Args:
        kernel: Kernel and its sizes, from choose_kernel.
        metadata: Metadata of the region as a separate step.
        spec: Attention of the layer.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        block_list: Block list for this mask and these heads if another kernel plan has built it; else None.
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
    """Build the kernel plan of varlen_prefill. Works inside jit.

    Args:
        kernel: Kernel and its sizes, from choose_kernel.
        metadata: Metadata of the region as a separate step.
        spec: Attention of the layer.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        kv_start_loc: Index of the first packed key of each request; None with a paged cache.
        max_seq_len: Maximum number of tokens per request (static); None uses the block table's capacity.
    """
    seq_lens = metadata.seq_lens
    if kv_start_loc is None:  # tokens past the last column of the block table have no block
        seq_lens = jnp.minimum(seq_lens, metadata.block_table.shape[1] * metadata.block_size)
    rows_per_token = kernel.rows_per_token
    schedule = prefill_kernel.make_schedule(
        metadata.query_start_loc * rows_per_token,
        seq_lens,
        kv_start_loc,
        num_tokens=metadata.bucket.max_tokens * rows_per_token,
        score=score_of(spec, rows_per_token),
        sizes=kernel.sizes,
        q_heads=spec.num_q_heads,
        has_lists=kernel.has_lists,
    )
    columns, mask_plan = None, None
    if kernel.columns_sizes is not None:
        assert mask is not None
        gathered, mask = mask.split_gathered()
        starts, room = gathered_kv_layout(gathered, metadata)
        columns_plan = plan_prefill_kernel(
            kernel.columns,
            metadata,
            gathered_columns_spec(spec),
            gathered,
            kv_start_loc=starts,
            max_seq_len=room,
        )
        columns = ColumnsPlan(mask=gathered, kernel_plan=columns_plan)
    if mask is not None:
        bounds = tile_lists.MaskBounds(
            max_seq_len=max_seq_len or metadata.block_table.shape[1] * metadata.block_size,
            is_aligned=kernel.has_aligned_keys,
            is_prefill=metadata.bucket.max_decodes == 0,
            rows_per_token=rows_per_token,
        )
        mask_plan = tile_lists.plan_mask(mask, spec, schedule, kernel.sizes, bounds, kernel.list_block_size)
    return PrefillKernelPlan(schedule=schedule, mask=mask_plan, columns=columns)
