"""The backward kernel: dK and dV of a tile of keys at a time, and dQ added up on the way.

A thread block works on an item (a tile of keys of one kv head), or through a share of them. An item's steps
are the tiles of queries that see its keys, of each query head of the group. Two warpgroups compute, each with
half of the keys; the third loads, by one warp. Both sides go through the same items and steps
(s = step % stages; b = step % 2):

    loading                              shared memory      computing: each of two warpgroups
    -------                              -------------      ---------------------------------
    for each item:                                          for each item:
      wait kv_free
      TMA: keys, values, the item -----> K, V                 wait kv_full
      for each step:                                          for each step:
        wait q_free[s]                                          wait q_full[s]
        TMA: queries ------------------> Q [stages]             wait do_full[s]; stats
        wait do_free[s]                                         issue S^T = K Q^T
        TMA: grad_out, stats ----------> dO [stages]            issue dP^T = V dO^T
                                         dQ ------------------> await that the last one has left
                                                                P^T = 2^(S^T - stats), beside dP^T
                                                                issue dV += P^T dO
                                                                dS^T = P^T (dP^T - stats), beside dV
                                                                wait ds_full[1 - b]
                                         dS [2] <-------------- dS^T
                                                                issue dQ = dS K of the step before
                                                                issue dK += dS^T Q
                                                                await dQ; arrive do_free[s], ds_full[b]
                                         dQ <------------------ dQ, in f32
                                           TMA: add --> out
                                                                await dK; arrive q_free[s]
                                         V, K <---------------- dV; arrive and wait kv_read; dK
                                           TMA: --> out
                                                                arrive kv_free when it has left

P and dS stay in registers as the left operands of dV and dK; for dQ, which sums over all keys, dS goes
through shared memory: ds_full says that both halves are there, and that step i - 1's have been multiplied,
so that step i + 1's may take their place. dQ is a step late, behind an item's last step at once: so no
warpgroup waits for the other unless that is more than about half a step behind, and one makes probabilities
while the other multiplies. Each item arrives once at ds_full before its first step, whose dQ is nobody's.

Heads of 64, whose tiles have 128 queries, have no registers for stats while S is made: they await do_full
behind S, and load stats where they need them.

Beginning a step's S before the last products of the step before are done leaves too few registers: it was 9 %
slower at 1 x 16k and 10 % at 8 x 2k (backward-variants in benchmarks/results).

With a kernel of their own for queries (query_kernel.py) there is no dQ here, no dS in shared memory, and the
warpgroups wait for each other at an item's end only. Heads wider than 128 leave no registers for dK and dV
together: then one kernel makes S, dP and dK, a second one S and dV (products_apart.py).

The rooms: loader (left), gradients (right), which calls products, scores and store; items says what is whose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Scalar
from pallas_kernels.varlen_backward.dkdv_loader import DkDvLoader
from pallas_kernels.varlen_backward.dkdv_mainloop import DkDvMainloop
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvOutputs, DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import DS_BUFFERS, BackwardSpec, ComputedGrads, f32
from pallas_kernels.varlen_backward.tile_scheduler import BackwardTileScheduler
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH

LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240


def run_dkdv(inputs: DkDvInputs, spec: BackwardSpec) -> DkDvOutputs:
    """Gradients of keys and values, by one kernel or by two; those of queries as `backward` has them."""
    if not spec.sizes.separate_dk_dv:
        return launch_dkdv(inputs, spec)
    of = lambda **makes: launch_dkdv(inputs, dataclasses.replace(spec, makes=ComputedGrads(**makes)))
    of_key, of_value = of(key=True, value=False), of(key=False, value=True)
    return DkDvOutputs(of_key.grad_key, of_value.grad_value)


def launch_dkdv(inputs: DkDvInputs, spec: BackwardSpec) -> DkDvOutputs:
    """The gradients that `spec.makes` names; those of queries are added to `inputs.grad_query`."""
    ctas = spec.sizes.ctas or len(inputs.schedule.order)
    kernel = plgpu.kernel(
        functools.partial(dkdv_body, ctas=ctas, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(spec), pipeline_types(spec)),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        # Pallas would have a warpgroup's threads wait for each other before and behind whatever they store;
        # here they do so in commit_smem alone, and nobody reads what a thread of another warp stores before.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=f"varlen_backward{spec.makes.suffix}",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def dkdv_body(
    inputs: DkDvInputs,
    outputs: DkDvOutputs,
    smem: DkDvSmem,
    pipeline: DkDvBarriers,
    *,
    ctas: int,
    spec: BackwardSpec,
) -> None:
    """What a thread block does: its last warpgroup loads, the others compute."""
    wg = lax.axis_index("warpgroup")
    work = BackwardTileScheduler(inputs.schedule, ctas, spec)

    @pl.when(wg == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(lambda: DkDvLoader(inputs, smem, pipeline, spec).load_share(work))

    @pl.when(wg < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        DkDvMainloop(inputs, outputs, smem, pipeline, spec).work_share(work)


def output_types(inputs: DkDvInputs, spec: BackwardSpec) -> DkDvOutputs:
    """Gradients of keys and values, or one of them."""
    grad = lambda x, is_made: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_made else None
    return DkDvOutputs(
        grad_key=grad(inputs.key, spec.makes.key), grad_value=grad(inputs.value, spec.makes.value)
    )


def smem_types(spec: BackwardSpec) -> DkDvSmem:
    """Shared memory: see refs.Smem."""
    sizes, dtype = spec.sizes, spec.dtype
    keys = WARPGROUPS, spec.units, UNIT, UNIT
    queries = lambda stages: swizzled_smem((stages, spec.units, sizes.tile_q, UNIT), dtype)
    scores = WARPGROUPS, spec.query_units, UNIT, UNIT
    pieces = WARPGROUPS, spec.pieces, UNIT, UNIT
    exchanges = spec.adds_grad_query or (spec.is_interpreted and spec.makes.key)
    both = lambda: plgpu.RefUnion((swizzled_smem(keys, dtype),), (plgpu.SMEM(keys, dtype),))
    return DkDvSmem(
        key_and_grad=both(),
        value_and_grad=both() if spec.makes.key else None,
        query=queries(sizes.stages),
        grad_out=queries(spec.grad_out_stages),
        stats_and_columns=plgpu.SMEM((spec.grad_out_stages + 1, WARPGROUPS, sizes.tile_q), f32),
        grad_scores=swizzled_smem((DS_BUFFERS, *scores), dtype) if exchanges else None,
        grad_query=swizzled_smem(pieces, f32) if spec.adds_grad_query else None,
        item=plgpu.SMEM((TABLE_WIDTH,), jnp.int32),
        p=swizzled_smem(scores, dtype) if spec.is_interpreted and spec.makes.value else None,
    )


def pipeline_types(spec: BackwardSpec) -> DkDvBarriers:
    """Barriers: see refs.Pipeline."""
    stages, of_grads = spec.sizes.stages, spec.grad_out_stages
    read = 2 if spec.makes.key else 1  # keys, and values
    by_warpgroups = lambda num: plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=num)
    return DkDvBarriers(
        kv_full=plgpu.Barrier(num_arrivals=read * WARPGROUPS * spec.units + 1),
        kv_free=by_warpgroups(1),
        kv_read=by_warpgroups(1),
        q_full=plgpu.Barrier(num_arrivals=spec.units, num_barriers=stages),
        q_free=by_warpgroups(stages),
        do_full=plgpu.Barrier(num_arrivals=spec.units + 1, num_barriers=of_grads),
        do_free=by_warpgroups(of_grads),
        ds_full=by_warpgroups(DS_BUFFERS),
    )
