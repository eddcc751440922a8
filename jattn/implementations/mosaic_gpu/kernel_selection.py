"""Selection of the kernel for a region of a step, from static facts."""

import dataclasses

from jattn.implementations.layer_config import LayerConfig, RegionSizes
from jattn.implementations.mosaic_gpu import block_lists, tile_lists
from jattn.implementations.mosaic_gpu.gathered_columns import gathers_columns
from jattn.implementations.mosaic_gpu.kernel_config import (
    DecodeKernelConfig,
    KernelConfig,
    PrefillKernelConfig,
    score_of,
)
from jattn.implementations.mosaic_gpu.query_rows import num_rows_per_token
from jattn.masks import Mask
from jattn.spec import AttentionSpec
from pallas_kernels import architectures, support
from pallas_kernels import paged_decode as decode_kernel
from pallas_kernels import varlen_prefill as prefill_kernel
from pallas_kernels.score_mod import looks_up_each_pair, why_no_kernel
from pallas_kernels.varlen_prefill import LIST_BLOCK_SIZES, PACK_GQA_CHOICES


def choose_kernel(
    layer: LayerConfig, region: RegionSizes, mask: Mask | None, gpu: str = "9.0"
) -> KernelConfig | str:
    """Return the kernel for a region on a supported GPU, or why there is none, from shapes alone.

    Args:
        layer: Layer configuration.
        region: Static sizes of the region.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        gpu: Compute capability that kernels are built for.
    """
    if layer.score_function is not None:
        reason = why_no_kernel(layer.score_function)
        if reason is not None:
            return reason
    declined = None
    if region.bucket.max_decodes and layer.cache is not None and region.max_blocks:
        decode = _choose_decode(layer, region, mask, gpu)
        if not isinstance(decode, str):
            return decode
        declined = decode
    prefill = support.why_not_architecture("varlen_prefill", gpu) or _choose_prefill(layer, region, mask, gpu)
    return declined if isinstance(prefill, str) and declined is not None else prefill


def _choose_decode(
    layer: LayerConfig, region: RegionSizes, mask: Mask | None, gpu: str
) -> DecodeKernelConfig | str:
    spec, cache = layer.spec, layer.cache
    assert cache is not None
    size, has_head_bits = None, False
    if mask is not None:
        found = block_lists.list_block_size(mask, spec, region)
        if isinstance(found, str):
            return found
        size, has_head_bits = found, block_lists.needs_head_bits(mask, spec)
    reason = support.why_not_architecture("paged_decode", gpu) or support.why_not_decode(
        dtype=layer.query_dtype,
        k_dtype=cache.dtypes[0],
        v_dtype=cache.dtypes[1],
        head_dim=spec.head_dim,
        block_size=region.block_size,
        group=spec.q_heads_per_kv_head,
        decode_query_len=region.bucket.decode_query_len,
        layout=cache.layout,
        has_token_scales=cache.has_token_scales,
        list_block_size=size,
    )
    if reason is not None:
        return reason
    sizes = decode_kernel.default_sizes(
        spec.head_dim,
        rows=spec.q_heads_per_kv_head * region.bucket.decode_query_len,
        kv_dtypes=cache.dtypes,
        batch_invariant=spec.batch_invariant,
        list_block_size=size,
        gpu=gpu,
    )
    return DecodeKernelConfig(sizes=sizes, list_block_size=size, lists_have_head_bits=has_head_bits)


def _choose_prefill(
    layer: LayerConfig, region: RegionSizes, mask: Mask | None, gpu: str
) -> PrefillKernelConfig | str:
    spec, cache, dtype = layer.spec, layer.cache, layer.query_dtype
    is_packed, is_quantized = cache is None, cache is not None and not cache.is_plain(dtype)
    if is_packed and spec.batch_invariant:
        return "there is no batch-invariant kernel for keys outside a paged cache"
    reasons = []
    if is_quantized:
        assert cache is not None
        reasons = [support.why_not_architecture("cache_read", gpu)]
        reasons += [
            support.why_not_read(
                dtype=dtype,
                cache_dtype=stored,
                head_dim=spec.head_dim,
                block_size=region.block_size,
                layout=cache.layout,
            )
            for stored in cache.dtypes
        ]
    reasons.append(
        support.why_not_prefill(
            dtype=dtype,
            kv_dtype=dtype,
            head_dim=spec.head_dim,
            block_size=None if is_packed else region.block_size,
            layout="NHD" if cache is None else cache.layout,
        )
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        return reason
    if mask is not None:
        # One packed request may have all tokens.
        max_seq_len = region.bucket.max_tokens if is_packed else region.max_blocks * region.block_size
        rows = _rows_per_token(layer, region, mask, gpu)
        list_bounds = tile_lists.MaskBounds(
            max_seq_len, is_aligned=layer.has_aligned_keys, rows_per_token=rows
        )
        columns_sizes, packed = None, None
        # A score function needs the positions of a tile's keys, which must be consecutive.
        if layer.score_function is None:
            if gathers_columns(mask, spec):
                columns_sizes = prefill_kernel.default_sizes(spec.head_dim, has_lists=True, gpu=gpu)
            if is_packed or region.block_size >= min(LIST_BLOCK_SIZES):
                packed = tile_lists.packed_sizes(mask, spec, list_bounds, gpu)
        if packed is not None:
            sizes, list_block_size = packed
        else:
            sizes, list_block_size = sparse_sizes(spec, mask, gpu, rows), None
            reason = tile_lists.why_not_lists(mask, spec, sizes, list_bounds)
            if reason is not None:
                return reason
        return PrefillKernelConfig(
            sizes=sizes,
            has_lists=True,
            list_block_size=list_block_size,
            rows_per_token=rows,
            is_packed=is_packed,
            has_aligned_keys=layer.has_aligned_keys,
            uses_cache_read=is_quantized,
            columns_sizes=columns_sizes,
        )
    bounds = None if is_packed else _bounds(spec, region)
    dequantizes = bounds is not None and is_quantized and _should_dequantize_in_kernel(layer, bounds, gpu)
    sizes = prefill_kernel.default_sizes(
        spec.head_dim, batch_invariant=spec.batch_invariant, bounds=bounds, is_quantized=dequantizes, gpu=gpu
    )
    if (
        sizes.warpgroups == 3
        and layer.score_function is not None
        and layer.score_function.tables
        and looks_up_each_pair(layer.score_function)
    ):
        # Lookups of a tile of pairs spill from the registers that three warpgroups leave.
        sizes = dataclasses.replace(sizes, warpgroups=2)
    return PrefillKernelConfig(
        sizes=sizes,
        is_packed=is_packed,
        has_aligned_keys=layer.has_aligned_keys,
        uses_cache_read=is_quantized and not dequantizes,
        dequantizes=dequantizes,
    )


def _bounds(spec: AttentionSpec, region: RegionSizes) -> prefill_kernel.CallBounds:
    """Return the static bounds of a region's queries and keys."""
    bounds = prefill_kernel.CallBounds(
        num_tokens=region.bucket.max_tokens,
        reqs=region.bucket.max_reqs,
        q_heads=spec.num_q_heads,
        kv_heads=spec.num_kv_heads,
        max_kv=region.max_blocks * region.block_size,
    )
    return bounds.limited_by(score_of(spec))


def _should_dequantize_in_kernel(layer: LayerConfig, bounds: prefill_kernel.CallBounds, gpu: str) -> bool:
    """Return whether the kernel dequantizes an 8-bit cache itself, which pays for few queries."""
    spec, cache = layer.spec, layer.cache
    assert cache is not None
    reason = support.why_not_dequantize(kv_dtypes=cache.dtypes, head_dim=spec.head_dim, gpu=gpu)
    is_faster = prefill_kernel.should_dequantize_in_kernel(
        spec.head_dim, bounds, kv_dtypes=cache.dtypes, has_token_scales=any(cache.has_token_scales)
    )
    return reason is None and is_faster and not spec.batch_invariant


def _rows_per_token(layer: LayerConfig, region: RegionSizes, mask: Mask, gpu: str) -> int:
    """Return how many query heads the prefill kernel takes as rows of one head under a mask."""
    if layer.score_function is not None or layer.spec.batch_invariant:
        return 1  # A row must tell its head, and its bits must not depend on the size of the batch.
    bucket = region.bucket
    rows = num_rows_per_token(mask, layer.spec, num_tokens=bucket.max_tokens, num_reqs=bucket.max_reqs)
    # A few heads are packed by TMA, without a copy of the queries.
    is_packed_by_tma = architectures.ARCHITECTURES[gpu].has_wgmma and rows <= max(PACK_GQA_CHOICES)
    return 1 if is_packed_by_tma else rows


def sparse_sizes(
    spec: AttentionSpec, mask: Mask, gpu: str = "9.0", rows_per_token: int = 1
) -> prefill_kernel.PrefillSizes:
    """Return the prefill kernel's sizes under a mask: tiles no larger than the mask's blocks if possible."""
    blocks = tile_lists.mask_blocks(mask, spec, rows_per_token)
    return prefill_kernel.default_sizes(
        spec.head_dim, has_lists=True, batch_invariant=spec.batch_invariant, blocks=blocks, gpu=gpu
    )
