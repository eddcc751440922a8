"""Attention of a region with the kernel varlen_prefill, over a paged cache or packed keys."""

import dataclasses

import jax.numpy as jnp

from jattn.cache import PackedKV
from jattn.implementations.mosaic_gpu.gathered_columns import gather_kv, gathered_columns_spec
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig, score_of
from jattn.implementations.mosaic_gpu.kernel_plans import PrefillKernelPlan, plan_prefill_kernel
from jattn.implementations.mosaic_gpu.kernel_selection import sparse_sizes
from jattn.implementations.mosaic_gpu.query_rows import heads_to_rows, rows_to_heads
from jattn.implementations.region_inputs import OutAndLse, RegionInputs
from jattn.merge import merge_attention_outputs
from pallas_kernels.shared import Interpret
from pallas_kernels.varlen_prefill import varlen_prefill


def attend_prefill(
    inputs: RegionInputs,
    kernel: PrefillKernelConfig,
    kernel_plan: PrefillKernelPlan | None,
    *,
    return_lse: bool,
    interpret: Interpret,
) -> OutAndLse:
    """Return output and log-sum-exp of a region; see `attend` of this package for the arguments.

    Keys are in 16 bits, or in 8 bits if the kernel dequantizes them.
    """
    kv, metadata, spec, alibi_slopes = inputs.kv, inputs.metadata, inputs.spec, inputs.alibi_slopes
    if kernel.columns_sizes is not None and alibi_slopes is not None:
        # The kernel adds ALiBi by the index of a key, which is not the position of a gathered key.
        kernel, kernel_plan = dataclasses.replace(kernel, columns_sizes=None), None
    has_tiles_of_blocks = kernel.list_block_size is not None or kernel.rows_per_token > 1
    if has_tiles_of_blocks and alibi_slopes is not None:
        # ALiBi needs the keys of a tile to be consecutive, and a row's head to be that of its tile.
        sizes = kernel.sizes
        if kernel.rows_per_token > 1:  # without rows per token, the same sizes would have tiles of one head
            assert inputs.mask is not None
            sizes = sparse_sizes(spec, inputs.mask, sizes.gpu)
        kernel = dataclasses.replace(kernel, sizes=sizes, list_block_size=None, rows_per_token=1)
        kernel_plan = None
    if kernel_plan is None:
        kernel_plan = plan_prefill(inputs, kernel)
    columns = kernel_plan.columns
    needs_lse = return_lse or columns is not None
    out, lse = _call_kernel(inputs, kernel, kernel_plan, return_lse=needs_lse, interpret=interpret)
    if columns is None:
        return out, lse
    gathered_kv, _ = gather_kv(kv, metadata, columns.mask)
    gathered_spec, query = gathered_columns_spec(spec), inputs.query
    gathered = RegionInputs(query=query, kv=gathered_kv, metadata=metadata, spec=gathered_spec)
    columns_out, columns_lse = _call_kernel(
        gathered, kernel.columns, columns.kernel_plan, return_lse=True, interpret=interpret
    )
    assert lse is not None
    assert columns_lse is not None
    out, lse = merge_attention_outputs([out, columns_out], [lse, columns_lse])
    return out, lse if return_lse else None


def plan_prefill(inputs: RegionInputs, kernel: PrefillKernelConfig) -> PrefillKernelPlan:
    """Build the kernel plan of a region. Works inside jit."""
    kv, starts, max_seq_len = inputs.kv, None, None
    if isinstance(kv, PackedKV):
        starts, max_seq_len = kv.kv_start_loc, kv.max_keys_per_row if kernel.is_packed else None
    return plan_prefill_kernel(
        kernel, inputs.metadata, inputs.spec, inputs.mask, kv_start_loc=starts, max_seq_len=max_seq_len
    )


def _call_kernel(
    inputs: RegionInputs,
    kernel: PrefillKernelConfig,
    kernel_plan: PrefillKernelPlan,
    *,
    return_lse: bool,
    interpret: Interpret,
) -> OutAndLse:
    """Call varlen_prefill once, with the mask of the kernel plan."""
    kv, metadata, score_mod, rows = inputs.kv, inputs.metadata, inputs.score_mod, kernel.rows_per_token
    kv_start_loc, block_table, layout, k_scale, v_scale = None, None, "NHD", None, None
    if isinstance(kv, PackedKV):
        kv_start_loc = kv.kv_start_loc
    else:
        block_table, layout = metadata.block_table, kv.layout
        if kernel.dequantizes:
            k_scale = None if kv.stored_k_scale is None else jnp.asarray(kv.stored_k_scale)
            v_scale = None if kv.stored_v_scale is None else jnp.asarray(kv.stored_v_scale)
    mask = kernel_plan.mask
    out, lse = varlen_prefill(
        heads_to_rows(inputs.query, rows),
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.query_start_loc * rows,
        metadata.seq_lens,
        score=score_of(inputs.spec, rows),
        kv_start_loc=kv_start_loc,
        has_aligned_keys=kernel.has_aligned_keys,
        block_table=block_table,
        layout=layout,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
        score_mod=None if score_mod is None else score_mod.for_kernels(),
        schedule=kernel_plan.schedule,
        lists=None if mask is None else mask.lists,
        mask=None if mask is None else mask.pair_mask,
        sizes=kernel.sizes,
        return_lse=return_lse,
        interpret=interpret,
    )
    return rows_to_heads(out, rows), None if lse is None else rows_to_heads(lse.T, rows).T
