"""What the decode kernel works on, grouped by what it is: arrays outside of it, memory inside, types between.

The order of fields is the order of the kernel's arguments, and of its shared memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.schedule import num_partials
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.warp_query import WARPS
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Barriers, Ref


class CacheRefs(NamedTuple):
    """The paged cache, and what tells where a request's keys are.

    Attributes:
        k: [blocks, copies, rows, kv_heads, head_dim], [..., chunks, chunk] where the head is cut: blocks
            larger than a tile are cut into copies of `rows` tokens. HND: [blocks, kv_heads, copies, rows,
            head_dim].
        v: As k.
        block_table: [reqs, max_blocks]: blocks of each request.
        seq_lens: [reqs]: keys of each request.
        k_scale: f32: [1] or [kv_heads], or a scale per token and head [blocks, kv_heads, copies, rows]; or
            None.
        v_scale: As k_scale, or a scale per channel [kv_heads, chunks, width].
    """

    k: Ref
    v: Ref
    block_table: Ref
    seq_lens: Ref
    k_scale: Ref
    v_scale: Ref


class ListRefs(NamedTuple):
    """Lists of sparse blocks, or None and None; with them, `reqs` of the others are reqs * kv_heads.

    Attributes:
        ids: [reqs * kv_heads, max_listed].
        counts: [reqs * kv_heads].
    """

    ids: Ref
    counts: Ref


class Inputs(NamedTuple):
    """What the kernel reads.

    Attributes:
        query: [reqs, head_tiles, rows, head_dim], or [..., chunks, chunk] where the head is cut.
        cache: Keys and values.
        unit_ends: [reqs]: the schedule's.
        slopes: ALiBi slopes times log2(e), [head_tiles, tile_q] f32, or None.
        sinks: One more score of each query, times log2(e), likewise.
        lists: Which keys to visit.
    """

    query: Ref
    cache: CacheRefs
    unit_ends: Ref
    slopes: Ref
    sinks: Ref
    lists: ListRefs


class Partials(NamedTuple):
    """Partial results, all f32; what belongs to no request and span is not written.

    Attributes:
        out: O^T [partials, head_tiles, chunks, width, tile_q], not normalized.
        top: Each query's largest score, times log2(e): [partials, head_tiles, tile_q].
        total: Its sum of exponentials, likewise.
    """

    out: Ref
    top: Ref
    total: Ref


class Outputs(NamedTuple):
    """What the kernel writes.

    Attributes:
        out: As the query; of requests that lie in one span.
        lse: [reqs, head_tiles, tile_q] f32; likewise.
        partials: Of the others.
    """

    out: Ref
    lse: Ref
    partials: Partials


class Smem(NamedTuple):
    """Shared memory.

    Attributes:
        q: [2, chunks, tile_q, width]: of this request and the next.
        k: [stages, chunks, tile_kv, width].
        v: The same.
        k_scale: [stages, tile_kv] f32: a scale per token and head; or None.
        v_scale: The same.
        wide: [chunks, tile_kv, width], 16-bit: widened values (in interpret mode keys too); or None.
        p: [tile_q, tile_kv]: the probabilities; None where each warp keeps its own.
        merge: [warps, head_dim + 2, tile_q] f32: results of warps that work alone; or None.
    """

    q: Ref
    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref
    wide: Ref
    p: Ref
    merge: Ref


class Pipeline(NamedTuple):
    """Barriers between the loading warp and the consumer: a buffer of queries or a stage is full, or free."""

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


def has_token_scales(scale: Any) -> bool:
    """Whether a cache's scale is one per token and head."""
    return scale is not None and scale.ndim == 4


f32 = jnp.float32


def output_types(inputs: Inputs, spec: DecodeSpec) -> Outputs:
    """Of the kernel's outputs."""
    shape, cut, n = spec.shape, spec.shape.cut, spec.shape.tile_q
    reqs, ids = inputs.query.shape[0], inputs.lists.ids
    max_kv = inputs.cache.block_table.shape[1] * shape.block_size
    if ids is not None:
        max_kv = ids.shape[1] * (shape.list_block_size or 0)
    partials = num_partials(reqs, max_kv, sizes=spec.sizes, num_spans=spec.num_spans)
    per_query = jax.ShapeDtypeStruct((partials, shape.head_tiles, n), f32)
    outs = jax.ShapeDtypeStruct((partials, shape.head_tiles, cut.num_chunks, cut.width, n), f32)
    return Outputs(
        out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype),
        lse=jax.ShapeDtypeStruct((reqs, shape.head_tiles, n), f32),
        partials=Partials(outs, per_query, per_query),
    )


def smem_types(cache: CacheRefs, spec: DecodeSpec) -> Smem:
    """Of the shared memory that a cache of these dtypes and scales needs."""
    sizes, cut, n = spec.sizes, spec.shape.cut, spec.shape.tile_q
    stage = cut.num_chunks, sizes.tile_kv, cut.width
    # Interpret mode takes no operand from registers, so widened keys pass through shared memory there.
    is_widened = cache.v.dtype != spec.dtype or (spec.is_interpreted and cache.k.dtype != spec.dtype)
    scale_smem = plgpu.SMEM((sizes.stages, sizes.tile_kv), f32)
    together = cut.width if sizes.per_warp_mma else 64
    return Smem(
        q=swizzled_smem((2, cut.num_chunks, n, cut.width), spec.dtype),
        k=swizzled_smem((sizes.stages, *stage), cache.k.dtype, width=together),
        v=swizzled_smem((sizes.stages, *stage), cache.v.dtype, width=together),
        k_scale=scale_smem if has_token_scales(cache.k_scale) else None,
        v_scale=scale_smem if has_token_scales(cache.v_scale) else None,
        wide=swizzled_smem(stage, spec.dtype) if is_widened and not sizes.per_warp_mma else None,
        p=None if sizes.per_warp_mma else swizzled_smem((n, sizes.tile_kv), spec.dtype),
        merge=plgpu.SMEM((WARPS, cut.padded_dim + 2, n), f32) if sizes.per_warp_mma else None,
    )


def pipeline_types(cache: CacheRefs, spec: DecodeSpec) -> Pipeline:
    """Of the barriers; every copy into a buffer or stage is one arrival."""
    stages, chunks = spec.sizes.stages, spec.shape.cut.num_chunks
    copies = lambda scale: spec.sizes.tile_kv // spec.cache_tiling.rows * (chunks + has_token_scales(scale))
    return Pipeline(
        q_full=plgpu.Barrier(num_arrivals=chunks, num_barriers=2),
        q_free=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=copies(cache.k_scale), num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies(cache.v_scale), num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )
