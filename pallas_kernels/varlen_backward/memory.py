"""What the backward kernel takes of an SM: shared memory, barriers, registers; and what it writes."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import swizzled_smem
from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.varlen_backward.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec, f32
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH

LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240
BUFFERS = 2  # of gradients of scores: a warpgroup may be a step ahead of the other


def output_types(inputs: Inputs) -> Outputs:
    """Gradients of keys and values."""
    grad = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return Outputs(grad_key=grad(inputs.key), grad_value=grad(inputs.value))


def smem_types(spec: BackwardSpec) -> Smem:
    """Shared memory: see refs.Smem."""
    sizes, dtype = spec.sizes, spec.dtype
    keys = WARPGROUPS, spec.units, UNIT, UNIT
    queries = sizes.stages, spec.units, sizes.tile_q, UNIT
    scores = WARPGROUPS, spec.query_units, UNIT, UNIT
    has_arrays = spec.mask is not None and len(spec.mask.arrays) > 0
    pieces = WARPGROUPS, spec.pieces, UNIT, UNIT
    exchanges = spec.adds_grad_query or spec.is_interpreted
    both = lambda: plgpu.RefUnion((swizzled_smem(keys, dtype),), (plgpu.SMEM(keys, dtype),))
    return Smem(
        key_and_grad=both(),
        value_and_grad=both(),
        query=swizzled_smem(queries, dtype),
        grad_out=swizzled_smem(queries, dtype),
        stats=plgpu.SMEM((sizes.stages, 2, sizes.tile_q), f32),
        grad_scores=swizzled_smem((BUFFERS, *scores), dtype) if exchanges else None,
        grad_query=swizzled_smem(pieces, f32) if spec.adds_grad_query else None,
        item=plgpu.SMEM((TABLE_WIDTH,), jnp.int32),
        columns=plgpu.SMEM((WARPGROUPS, sizes.tile_q), f32),
        staged=plgpu.SMEM((WARPGROUPS, sizes.tile_q), jnp.int32) if has_arrays else None,
        p=swizzled_smem(scores, dtype) if spec.is_interpreted else None,
    )


def pipeline_types(spec: BackwardSpec) -> Pipeline:
    """Barriers: see refs.Pipeline."""
    stages = spec.sizes.stages
    by_warpgroups = lambda num: plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=num)
    return Pipeline(
        kv_full=plgpu.Barrier(num_arrivals=2 * WARPGROUPS * spec.units + 1),
        kv_free=by_warpgroups(1),
        kv_read=by_warpgroups(1),
        q_full=plgpu.Barrier(num_arrivals=spec.units + 1, num_barriers=stages),
        q_free=by_warpgroups(stages),
        do_full=plgpu.Barrier(num_arrivals=spec.units, num_barriers=stages),
        do_free=by_warpgroups(stages),
        ds_full=by_warpgroups(BUFFERS),
    )
