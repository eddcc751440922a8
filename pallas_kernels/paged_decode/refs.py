"""Memory of the decode kernel: its arrays, outputs, shared memory and barriers.

The order of the fields is the order of the kernel's arguments and of its shared memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.schedule import num_split_outputs
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.warp_query import WARPS
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Barriers, Ref

f32 = jnp.float32


class DecodeCacheRefs(NamedTuple):
    """The paged KV cache and its block table, reshaped for TMA copies (see CacheTiling).

    Attributes:
        k: Keys [blocks, copies, tokens_per_copy, kv_heads, head_dim], or HND [blocks, kv_heads, copies,
            tokens_per_copy, head_dim]. With several chunks per head the last axes are [num_chunks,
            chunk_dim].
        v: Values, of the shape of k.
        block_table: Block ids of each request, [reqs, max_blocks].
        seq_lens: Number of keys of each request, [reqs].
        k_scale: Scale of the keys, f32: [1], [kv_heads], or per token and head [blocks, kv_heads, copies,
            tokens_per_copy]. None = 1.
        v_scale: Scale of the values, like k_scale, or per channel [kv_heads, num_chunks, width].
    """

    k: Ref
    v: Ref
    block_table: Ref
    seq_lens: Ref
    k_scale: Ref
    v_scale: Ref


class DecodeListRefs(NamedTuple):
    """Lists of sparse blocks, one per schedule row. Both fields are None if there are no lists.

    Attributes:
        ids: Sparse block ids of each list, [reqs * kv_heads, max_listed].
        counts: Length of each list, [reqs * kv_heads].
    """

    ids: Ref
    counts: Ref


class DecodeInputs(NamedTuple):
    """Arrays that the kernel reads.

    The axis `reqs` has one element per schedule row (with lists, reqs * kv_heads).

    Attributes:
        query: Queries [reqs, head_tiles, rows, head_dim], or [..., num_chunks, chunk_dim].
        cache: Keys and values.
        unit_ends: `DecodeSchedule.unit_ends`, [reqs].
        slopes: ALiBi slopes times log2(e), f32 [head_tiles, tile_q]; None without ALiBi.
        sinks: Attention sinks times log2(e), f32 [head_tiles, tile_q]; None without sinks.
        lists: Sparse blocks to visit.
    """

    query: Ref
    cache: DecodeCacheRefs
    unit_ends: Ref
    slopes: Ref
    sinks: Ref
    lists: DecodeListRefs


class DecodeSplitOutputs(NamedTuple):
    """Results of the segments of split requests, f32. Entries without a segment are not written.

    Attributes:
        out: O^T, not normalized: [splits, head_tiles, num_chunks, width, tile_q].
        row_max: Maximum score of each query, times log2(e): [splits, head_tiles, tile_q].
        row_sum: Sum of the exponentials of each query: [splits, head_tiles, tile_q].
    """

    out: Ref
    row_max: Ref
    row_sum: Ref


class DecodeOutputs(NamedTuple):
    """Arrays that the kernel writes.

    Attributes:
        out: Outputs of the requests that lie in one span, of the shape of the queries.
        lse: Log-sum-exps of these requests, f32 [reqs, head_tiles, tile_q].
        splits: Split outputs of the requests that lie in several spans.
    """

    out: Ref
    lse: Ref
    splits: DecodeSplitOutputs


class DecodeSmem(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
        q: Queries of the current and the next segment, [2, num_chunks, tile_q, width].
        k: Tiles of keys, [stages, num_chunks, tile_kv, width].
        v: Tiles of values, [stages, num_chunks, tile_kv, width].
        k_scale: Scales of the keys per token, f32 [stages, tile_kv]; None without scales per token.
        v_scale: Scales of the values per token, f32 [stages, tile_kv]; None without scales per token.
        dequantized: Values of one tile in 16 bits, [num_chunks, tile_kv, width]; in interpret mode also its
            keys. None if values are not dequantized here.
        p: Probabilities, [tile_q, tile_kv]; None with WarpMma, which keeps them in registers.
        warp_outputs: Results of the four warps of WarpMma, f32 [warps, head_dim + 2, tile_q]; else None.
    """

    q: Ref
    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref
    dequantized: Ref
    p: Ref
    warp_outputs: Ref


class DecodeBarriers(NamedTuple):
    """Barriers that say when a query buffer or a stage of keys or values is full, and when it is free."""

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


def has_token_scales(scale: Any) -> bool:
    """Return whether a scale of DecodeCacheRefs has one element per token and head."""
    return scale is not None and scale.ndim == 4


def output_types(inputs: DecodeInputs, spec: DecodeSpec) -> DecodeOutputs:
    """Return the shapes and dtypes of the kernel's outputs."""
    shape, head, tile_q = spec.shape, spec.shape.head, spec.shape.tile_q
    reqs, ids = inputs.query.shape[0], inputs.lists.ids
    max_kv = inputs.cache.block_table.shape[1] * shape.block_size
    if ids is not None:
        max_kv = ids.shape[1] * (shape.list_block_size or 0)
    splits = num_split_outputs(reqs, max_kv, sizes=spec.sizes, num_spans=spec.num_spans)
    per_query = jax.ShapeDtypeStruct((splits, shape.head_tiles, tile_q), f32)
    split_out = jax.ShapeDtypeStruct((splits, shape.head_tiles, head.num_chunks, head.width, tile_q), f32)
    return DecodeOutputs(
        out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype),
        lse=jax.ShapeDtypeStruct((reqs, shape.head_tiles, tile_q), f32),
        splits=DecodeSplitOutputs(split_out, per_query, per_query),
    )


def smem_types(cache: DecodeCacheRefs, spec: DecodeSpec) -> DecodeSmem:
    """Return the scratch shapes in shared memory for a cache of these dtypes and scales."""
    sizes, head, tile_q = spec.sizes, spec.shape.head, spec.shape.tile_q
    stage = head.num_chunks, sizes.tile_kv, head.width
    # Interpret mode takes no operand from registers, so dequantized keys pass through shared memory there.
    is_dequantized = cache.v.dtype != spec.dtype or (spec.is_interpreted and cache.k.dtype != spec.dtype)
    scale_smem = plgpu.SMEM((sizes.stages, sizes.tile_kv), f32)
    swizzle_width = head.width if sizes.per_warp_mma else 64
    dequantized = swizzled_smem(stage, spec.dtype) if is_dequantized and not sizes.per_warp_mma else None
    warp_outputs = plgpu.SMEM((WARPS, head.padded_dim + 2, tile_q), f32) if sizes.per_warp_mma else None
    return DecodeSmem(
        q=swizzled_smem((2, head.num_chunks, tile_q, head.width), spec.dtype),
        k=swizzled_smem((sizes.stages, *stage), cache.k.dtype, width=swizzle_width),
        v=swizzled_smem((sizes.stages, *stage), cache.v.dtype, width=swizzle_width),
        k_scale=scale_smem if has_token_scales(cache.k_scale) else None,
        v_scale=scale_smem if has_token_scales(cache.v_scale) else None,
        dequantized=dequantized,
        p=None if sizes.per_warp_mma else swizzled_smem((tile_q, sizes.tile_kv), spec.dtype),
        warp_outputs=warp_outputs,
    )


def barrier_types(cache: DecodeCacheRefs, spec: DecodeSpec) -> DecodeBarriers:
    """Return the scratch shapes of the barriers.

    Each TMA copy arrives once at the full barrier of its buffer.
    """
    stages, num_chunks = spec.sizes.stages, spec.shape.head.num_chunks
    tokens_per_copy = spec.cache_tiling.tokens_per_copy

    def num_copies(scale: Any) -> int:
        return spec.sizes.tile_kv // tokens_per_copy * (num_chunks + has_token_scales(scale))

    return DecodeBarriers(
        q_full=plgpu.Barrier(num_arrivals=num_chunks, num_barriers=2),
        q_free=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=num_copies(cache.k_scale), num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=num_copies(cache.v_scale), num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )
