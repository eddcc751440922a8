"""How much of what the decode kernel needs: types of its outputs, its shared memory and its barriers."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import (
    CacheRefs,
    Inputs,
    Outputs,
    Partials,
    Pipeline,
    Smem,
    has_token_scales,
)
from pallas_kernels.paged_decode.schedule import num_partials
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.warp_queries import WARPS
from pallas_kernels.shared.dequant import swizzled_smem

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
    outs = jax.ShapeDtypeStruct((partials, shape.head_tiles, cut.chunks, cut.width, n), f32)
    return Outputs(
        out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype),
        lse=jax.ShapeDtypeStruct((reqs, shape.head_tiles, n), f32),
        partials=Partials(outs, per_query, per_query),
    )


def smem_types(cache: CacheRefs, spec: DecodeSpec) -> Smem:
    """Of the shared memory that a cache of these dtypes and scales needs."""
    sizes, cut, n = spec.sizes, spec.shape.cut, spec.shape.tile_q
    stage = cut.chunks, sizes.tile_kv, cut.width
    # Interpret mode takes no operand from registers, so widened keys pass through shared memory there.
    is_widened = cache.v.dtype != spec.dtype or (spec.is_interpreted and cache.k.dtype != spec.dtype)
    scale_smem = plgpu.SMEM((sizes.stages, sizes.tile_kv), f32)
    together = cut.width if sizes.by_warp else 64
    return Smem(
        q=swizzled_smem((2, cut.chunks, n, cut.width), spec.dtype),
        k=swizzled_smem((sizes.stages, *stage), cache.k.dtype, width=together),
        v=swizzled_smem((sizes.stages, *stage), cache.v.dtype, width=together),
        k_scale=scale_smem if has_token_scales(cache.k_scale) else None,
        v_scale=scale_smem if has_token_scales(cache.v_scale) else None,
        wide=swizzled_smem(stage, spec.dtype) if is_widened and not sizes.by_warp else None,
        p=None if sizes.by_warp else swizzled_smem((n, sizes.tile_kv), spec.dtype),
        merge=plgpu.SMEM((WARPS, cut.padded_dim + 2, n), f32) if sizes.by_warp else None,
    )


def pipeline_types(cache: CacheRefs, spec: DecodeSpec) -> Pipeline:
    """Of the barriers; every copy into a buffer or stage is one arrival."""
    stages, chunks = spec.sizes.stages, spec.shape.cut.chunks
    copies = lambda scale: spec.sizes.tile_kv // spec.cache_cut.rows * (chunks + has_token_scales(scale))
    return Pipeline(
        q_full=plgpu.Barrier(num_arrivals=chunks, num_barriers=2),
        q_free=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=copies(cache.k_scale), num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies(cache.v_scale), num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )
