"""What the backward kernel takes of an SM: shared memory, barriers, registers; and what it writes."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.varlen_backward.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec, f32
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH

LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240
BUFFERS = 2  # of gradients of scores: a warpgroup may be a step ahead of the other


def output_types(inputs: Inputs, spec: BackwardSpec) -> Outputs:
    """Gradients of keys and values, or one of them."""
    grad = lambda x, is_made: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_made else None
    return Outputs(grad_key=grad(inputs.key, spec.makes.key), grad_value=grad(inputs.value, spec.makes.value))


def smem_types(spec: BackwardSpec) -> Smem:
    """Shared memory: see refs.Smem."""
    sizes, dtype = spec.sizes, spec.dtype
    keys = WARPGROUPS, spec.units, UNIT, UNIT
    queries = lambda stages: swizzled_smem((stages, spec.units, sizes.tile_q, UNIT), dtype)
    scores = WARPGROUPS, spec.query_units, UNIT, UNIT
    pieces = WARPGROUPS, spec.pieces, UNIT, UNIT
    exchanges = spec.adds_grad_query or (spec.is_interpreted and spec.makes.key)
    both = lambda: plgpu.RefUnion((swizzled_smem(keys, dtype),), (plgpu.SMEM(keys, dtype),))
    return Smem(
        key_and_grad=both(),
        value_and_grad=both() if spec.makes.key else None,
        query=queries(sizes.stages),
        grad_out=queries(spec.grad_out_stages),
        stats_and_columns=plgpu.SMEM((spec.grad_out_stages + 1, WARPGROUPS, sizes.tile_q), f32),
        grad_scores=swizzled_smem((BUFFERS, *scores), dtype) if exchanges else None,
        grad_query=swizzled_smem(pieces, f32) if spec.adds_grad_query else None,
        item=plgpu.SMEM((TABLE_WIDTH,), jnp.int32),
        p=swizzled_smem(scores, dtype) if spec.is_interpreted and spec.makes.value else None,
    )


def pipeline_types(spec: BackwardSpec) -> Pipeline:
    """Barriers: see refs.Pipeline."""
    stages, of_grads = spec.sizes.stages, spec.grad_out_stages
    read = 2 if spec.makes.key else 1  # keys, and values
    by_warpgroups = lambda num: plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=num)
    return Pipeline(
        kv_full=plgpu.Barrier(num_arrivals=read * WARPGROUPS * spec.units + 1),
        kv_free=by_warpgroups(1),
        kv_read=by_warpgroups(1),
        q_full=plgpu.Barrier(num_arrivals=spec.units, num_barriers=stages),
        q_free=by_warpgroups(stages),
        do_full=plgpu.Barrier(num_arrivals=spec.units + 1, num_barriers=of_grads),
        do_free=by_warpgroups(of_grads),
        ds_full=by_warpgroups(BUFFERS),
    )
