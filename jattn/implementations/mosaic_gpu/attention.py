"""Attention with the Mosaic GPU kernels paged_decode and varlen_prefill, one region at a time."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.cache.quantization import round_token_head
from jattn.implementations.mosaic_gpu import tile_lists
from jattn.implementations.mosaic_gpu.dequantized_prefill import attend_dequantized
from jattn.implementations.mosaic_gpu.gathered_columns import gather_kv, gathered_columns_layer
from jattn.implementations.mosaic_gpu.kernel_config import (
    DecodeKernelConfig,
    KernelConfig,
    PrefillKernelConfig,
    score_of,
)
from jattn.implementations.mosaic_gpu.kernel_plans import (
    DecodeKernelPlan,
    KernelPlan,
    PrefillKernelPlan,
    plan_decode_kernel,
    plan_prefill_kernel,
    tile_list_config,
)
from jattn.implementations.mosaic_gpu.slash_masks import gathers_columns, without_gathering
from jattn.masks import Mask, split_gathered
from jattn.merge import merge_attention_outputs
from jattn.spec import QUERY_DTYPES, AttentionSpec
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.shared import Interpret
from pallas_kernels.varlen_prefill import varlen_prefill


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kernel: KernelConfig,
    kernel_plan: KernelPlan | None,
    *,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    return_lse: bool = True,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Return output and log-sum-exp of every token of a region, as `jattn.attend` defines them.

    Args:
        query: Queries of the region.
        kv: Keys and values.
        metadata: Metadata of the region as a separate step.
        spec: Attention of the layer.
        kernel: Kernel and its sizes, from choose_kernel.
        kernel_plan: Kernel plan of the step; None computes it here.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        sinks: Attention sinks per head.
        alibi_slopes: ALiBi slope per head.
        return_lse: Return the log-sum-exp; if False, None may be returned instead.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    if spec.query_quantization is not None:
        # The kernels multiply in 16 bits, so queries are dequantized again.
        query = round_token_head(query, QUERY_DTYPES[spec.query_quantization]).astype(query.dtype)
    options: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes, "interpret": interpret}
    if isinstance(kernel, PrefillKernelConfig):
        assert kernel_plan is None or isinstance(kernel_plan, PrefillKernelPlan)
        region = _Region(query, kv, metadata, spec, kernel, kernel_plan, mask)
        return _prefill(region, return_lse=return_lse, **options)
    assert isinstance(kv, PagedCache)
    kernel_plan = plan_decode_kernel(kernel, metadata, spec, mask) if kernel_plan is None else kernel_plan
    assert isinstance(kernel_plan, DecodeKernelPlan)
    return paged_decode(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.block_table,
        metadata.seq_lens,
        score=score_of(spec),
        **_decode_arguments(kernel, kernel_plan, kv, metadata),
        **options,
    )


def _decode_arguments(
    kernel: DecodeKernelConfig, kernel_plan: DecodeKernelPlan, cache: PagedCache, metadata: BatchMetadata
) -> dict[str, Any]:
    """Return paged_decode's arguments for the cache layout, the block lists and the schedule."""
    return {
        "layout": cache.layout,
        "decode_query_len": metadata.bucket.decode_query_len,
        **_scales_of(cache),
        "block_list": kernel_plan.block_list,
        "list_block_size": kernel.list_block_size,
        "lists_have_head_bits": kernel.lists_have_head_bits,
        "schedule": kernel_plan.schedule,
        "sizes": kernel.sizes,
    }


def _scales_of(cache: PagedCache) -> dict[str, Array | None]:
    """Return the scales of an 8-bit cache as kernel arguments."""
    scales = {"k_scale": cache.stored_k_scale, "v_scale": cache.stored_v_scale}
    return {name: None if scale is None else jnp.asarray(scale) for name, scale in scales.items()}


class _Region(NamedTuple):
    """Arguments of `attend` for varlen_prefill."""

    query: Array
    kv: PagedCache | PackedKV
    metadata: BatchMetadata
    spec: AttentionSpec
    kernel: PrefillKernelConfig
    kernel_plan: PrefillKernelPlan | None
    mask: Mask | None


def _prefill(region: _Region, **options: Any) -> tuple[Array, Array | None]:
    """Attend in a region with varlen_prefill."""
    query, kv, metadata, spec, kernel, kernel_plan, mask = region
    if kernel.uses_cache_read and isinstance(kv, PagedCache):

        def attend_packed(kv: PackedKV, metadata: BatchMetadata) -> tuple[Array, Array | None]:
            return _prefill(region._replace(kv=kv, metadata=metadata, kernel_plan=None), **options)

        return attend_dequantized(
            query,
            kv,
            metadata,
            spec,
            attend_packed,
            return_lse=options["return_lse"],
            interpret=options["interpret"],
        )
    if not gathers_columns(mask, spec):
        return _call_kernel(region, **options)
    if options["alibi_slopes"] is not None:
        return _call_kernel(region._replace(kernel_plan=None, mask=without_gathering(mask)), **options)
    columns, slashes = split_gathered(mask)
    layer, (gathered, _) = gathered_columns_layer(spec, columns), gather_kv(kv, metadata, columns)
    columns_plan = None if kernel_plan is None else kernel_plan.columns_plan
    columns_region = _Region(query, gathered, metadata, *layer, columns_plan, columns)
    options, return_lse = options | {"return_lse": True}, options["return_lse"]
    parts = [
        _call_kernel(region._replace(mask=slashes), **options),
        _call_kernel(columns_region, **options | {"sinks": None}),
    ]
    out, lse = merge_attention_outputs(
        [out for out, _ in parts], [lse for _, lse in parts if lse is not None]
    )
    return out, lse if return_lse else None


def _call_kernel(region: _Region, **options: Any) -> tuple[Array, Array | None]:
    """Call varlen_prefill once, over 16-bit keys or 8-bit keys that it dequantizes."""
    query, kv, metadata, spec, kernel, kernel_plan, mask = region
    starts, max_seq_len = None, None
    if isinstance(kv, PackedKV):
        starts, max_seq_len = kv.kv_start_loc, kv.max_keys_per_row if kernel.is_packed else None
    if kernel_plan is None:
        kernel_plan = plan_prefill_kernel(
            kernel, metadata, spec, mask, kv_start_loc=starts, max_seq_len=max_seq_len
        )
    arguments: dict[str, Any] = {"kv_start_loc": starts}
    if isinstance(kv, PagedCache):
        arguments = {"block_table": metadata.block_table, "layout": kv.layout}
        if kernel.dequantizes:
            arguments |= _scales_of(kv)
    if mask is not None:
        config = tile_list_config(kernel, metadata, max_seq_len)
        pair_mask = tile_lists.pair_mask(mask, spec, kernel.sizes, config)
        arguments |= {
            "lists": kernel_plan.lists,
            "block_q": tile_lists.split_mask_factors(mask, kernel.sizes, is_packed=kernel.is_packed).block_q,
            "mask": None if pair_mask is None else pair_mask._replace(arrays=kernel_plan.mask_arrays),
        }
    return varlen_prefill(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.query_start_loc,
        metadata.seq_lens,
        score=score_of(spec),
        schedule=kernel_plan.schedule,
        sizes=kernel.sizes,
        **arguments,
        **options,
    )
