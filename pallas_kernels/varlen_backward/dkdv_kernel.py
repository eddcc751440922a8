"""The dk/dv kernel: dK and dV of a tile of keys at a time, with dQ added up on the way.

A thread block processes one work tile (a tile of keys of one KV head) or several. The steps of a work tile
are the query tiles that attend to its keys, for each query head of the group. Two warpgroups compute, each
with half of the keys; the third loads, with one warp. Both sides iterate over the same work tiles and steps
(s = step % stages; b = step % 2):

    loading                              shared memory      computing: each of two warpgroups
    -------                              -------------      ---------------------------------
    for each work tile:                                     for each work tile:
      wait kv_free
      TMA: keys, values, table row ----> K, V                 wait kv_full
      for each step:                                          for each step:
        wait q_free[s]                                          wait q_full[s]
        TMA: queries ------------------> Q [stages]             wait dout_full[s]; row statistics
        wait dout_free[s]                                       issue S^T = K Q^T
        TMA: dO, row statistics -------> dO [stages]            issue dP^T = V dO^T
                                         dQ ------------------> wait until the last dQ has left
                                                                P^T = 2^(S^T - LSE), during dP^T
                                                                issue dV += P^T dO
                                                                dS^T = P^T (dP^T - delta), during dV
                                                                wait ds_full[1 - b]
                                         dS [2] <-------------- dS^T
                                                                issue dQ = dS K of the previous step
                                                                issue dK += dS^T Q
                                                                await dQ; arrive dout_free[s], ds_full[b]
                                         dQ <------------------ dQ, in f32
                                           TMA: add --> out
                                                                await dK; arrive q_free[s]
                                         V, K <---------------- dV; arrive and wait kv_products_issued; dK
                                           TMA: --> out
                                                                arrive kv_free when it has left

P and dS stay in registers as the left operands of dV and dK. For dQ, which sums over all keys, dS goes
through shared memory: ds_full says that both halves have been stored, and that the dS of step i - 1 has been
multiplied, so that the dS of step i + 1 may replace it. dQ is one step late, except for that of a work tile's
last step. So a warpgroup waits for the other only if that is more than about half a step behind, and one
computes probabilities while the other multiplies. Each work tile arrives once at ds_full before its first
step, which has no previous dS.

Heads of 64, whose tiles have 128 queries, have no registers for the row statistics while S is computed: they
wait for dout_full after S, and load the statistics where they are used.

Starting a step's S before the last products of the previous step are complete leaves too few registers: on
an H200 it was 9 % slower at 1 x 16k and 10 % at 8 x 2k.

With a dq kernel (dq_kernel.py) there is no dQ here and no dS in shared memory, and the warpgroups wait for
each other only at the end of a work tile. Heads wider than 128 leave no registers for both dK and dV: then
one kernel computes S, dP and dK, and another S and dV (`compute_dk_step` and `compute_dv_step`).

Under a mask of small blocks, each computing warpgroup is a team with its own work tiles of 64 keys, stages,
barriers and loading warp. Its lists do not contain query tiles that attend only to the other team's keys.
They may contain blocks of 16 or 32 queries: then a tile of 64 queries holds any listed blocks.

Modules: dkdv_loader (left) and dkdv_mainloop (right), which calls dkdv_scores;
dkdv_tile_scheduler assigns work tiles to thread blocks, or to their teams.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import PANEL, swizzled_smem
from pallas_kernels.shared.types import Scalar, ScratchType, f32
from pallas_kernels.varlen_backward.dkdv_loader import DkDvLoader
from pallas_kernels.varlen_backward.dkdv_mainloop import DkDvMainloop
from pallas_kernels.varlen_backward.dkdv_spec import DS_BUFFERS, ComputedGrads, DkDvSpec
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import DkDvTileScheduler
from pallas_kernels.varlen_backward.refs import (
    NUM_ROW_STATS,
    DkDvBarriers,
    DkDvInputs,
    DkDvOutputs,
    DkDvSmem,
    WarpDkDvSmem,
)
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.warp_dkdv_kernel import warp_dkdv_body
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH
from pallas_kernels.varlen_prefill.spec import warp_barrier_types

LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240


def run_dkdv(inputs: DkDvInputs, spec: DkDvSpec, kv_tokens: int) -> DkDvOutputs:
    """Compute dk and dv with one kernel, or with two if `spec.sizes.separate_dk_dv` is True.

    Args:
        inputs: Arrays that the kernels read.
        spec: Static description of the call.
        kv_tokens: Number of keys without padding.
    """
    if not spec.sizes.separate_dk_dv:
        return launch_dkdv(inputs, spec, kv_tokens)
    only_dk = dataclasses.replace(spec, computes=ComputedGrads(dk=True, dv=False))
    only_dv = dataclasses.replace(spec, computes=ComputedGrads(dk=False, dv=True))
    return DkDvOutputs(
        dk=launch_dkdv(inputs, only_dk, kv_tokens).dk, dv=launch_dkdv(inputs, only_dv, kv_tokens).dv
    )


def launch_dkdv(inputs: DkDvInputs, spec: DkDvSpec, kv_tokens: int) -> DkDvOutputs:
    """Launch one kernel that computes the gradients in `spec.computes` and, without a dq kernel, adds dq."""
    sizes = spec.sizes
    ctas = sizes.ctas or -(-len(inputs.schedule.order) // sizes.teams)
    body: Callable[..., None]
    scratch_types: tuple[ScratchType, ScratchType]
    if sizes.per_warp_mma:
        body, num_warpgroups = warp_dkdv_body, sizes.warpgroups
        barrier = warp_barrier_types(num_warpgroups, is_interpreted=spec.is_interpreted)
        scratch_types = warp_smem_types(spec), barrier
        compiler_params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
    else:
        body, num_warpgroups = dkdv_body, WARPGROUPS + 1
        scratch_types = smem_types(spec), barrier_types(spec)
        # Pallas would make the threads of a warpgroup wait for each other before and after each store. Here
        # they do so only in commit_smem, and nothing reads what a thread of another warp stores before that.
        compiler_params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
    kernel = plgpu.kernel(
        functools.partial(body, ctas=ctas, spec=spec),
        out_type=(output_types(inputs, spec, kv_tokens),),
        scratch_types=scratch_types,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        compiler_params=compiler_params,
        kernel_name=f"varlen_backward{spec.computes.suffix}",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def dkdv_body(
    inputs: DkDvInputs,
    outputs: DkDvOutputs,
    smem: DkDvSmem,
    barriers: DkDvBarriers,
    *,
    ctas: int,
    spec: DkDvSpec,
) -> None:
    """Run one thread block: its last warpgroup loads, the others compute."""
    wg = lax.axis_index("warpgroup")
    scheduler = DkDvTileScheduler(inputs.schedule, ctas, spec)

    @pl.when(wg == WARPGROUPS)
    def _() -> None:
        # The computing warpgroups wait for these registers before they can take more.
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            # One loading warp per team, so that no team waits for another's stages.
            for team in range(spec.sizes.teams):
                loader = DkDvLoader(inputs, smem, barriers, spec, team)
                pl.when(warp == team)(functools.partial(loader.load_all, scheduler))

    @pl.when(wg < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        DkDvMainloop(inputs, outputs, smem, barriers, spec).run(scheduler)


def output_types(inputs: DkDvInputs, spec: DkDvSpec, kv_tokens: int) -> DkDvOutputs:
    """Return the types of dk and dv."""
    grad_type = jax.ShapeDtypeStruct((kv_tokens, spec.grad_heads, *inputs.key.rows.shape[2:]), spec.dtype)
    return DkDvOutputs(*(grad_type if is_computed else None for is_computed in spec.computes))


def smem_types(spec: DkDvSpec) -> DkDvSmem:
    """Return the shapes and dtypes of the arrays in shared memory; see DkDvSmem."""
    sizes, dtype = spec.sizes, spec.dtype
    keys = WARPGROUPS, spec.num_head_panels, PANEL, PANEL
    scores = WARPGROUPS, spec.num_query_panels, PANEL, PANEL
    dq_shape = WARPGROUPS, spec.num_dq_blocks, PANEL, PANEL
    has_ds = spec.adds_dq or (spec.is_interpreted and spec.computes.dk)

    def queries(stages: int) -> ScratchType:
        return swizzled_smem((stages, spec.num_head_panels, sizes.tile_q, PANEL), dtype)

    def both_views() -> ScratchType:
        return plgpu.RefUnion((swizzled_smem(keys, dtype),), (plgpu.SMEM(keys, dtype),))

    return DkDvSmem(
        key_and_dk=both_views(),
        value_and_dv=both_views() if spec.computes.dk else None,
        query=queries(sizes.teams * sizes.stages),
        dout=queries(sizes.teams * spec.dout_stages),
        stats_and_columns=plgpu.SMEM((sizes.teams * spec.dout_stages + 1, NUM_ROW_STATS, sizes.tile_q), f32),
        ds=swizzled_smem((DS_BUFFERS, *scores), dtype) if has_ds else None,
        dq=swizzled_smem(dq_shape, f32) if spec.adds_dq else None,
        table_row=plgpu.SMEM((sizes.teams, TABLE_WIDTH), jnp.int32),
        p=swizzled_smem(scores, dtype) if spec.is_interpreted and spec.computes.dv else None,
    )


def warp_smem_types(spec: DkDvSpec) -> WarpDkDvSmem:
    """Return the shapes and dtypes of the arrays in shared memory; see WarpDkDvSmem."""
    sizes, head, dtype = spec.sizes, spec.head, spec.dtype
    keys = swizzled_smem((sizes.warpgroups, head.num_chunks, PANEL, head.width), dtype)
    queries = swizzled_smem((sizes.stages, head.num_chunks, sizes.tile_q, head.width), dtype)
    return WarpDkDvSmem(
        key=keys,
        value=keys if spec.computes.dk else None,
        query=queries,
        dout=queries,
        stats_and_columns=plgpu.SMEM((sizes.stages + 1, NUM_ROW_STATS, sizes.tile_q), f32),
        table_row=plgpu.SMEM((TABLE_WIDTH,), jnp.int32),
    )


def barrier_types(spec: DkDvSpec) -> DkDvBarriers:
    """Return the barriers with their numbers of arrivals; see DkDvBarriers."""
    sizes = spec.sizes
    stages, dout_stages = sizes.teams * sizes.stages, sizes.teams * spec.dout_stages
    num_loaded = 2 if spec.computes.dk else 1  # keys, and values for dk
    dout_copies = spec.copies_per_tile + len(spec.row_stats_copies)

    def warpgroup_barriers(num: int) -> ScratchType:
        return plgpu.Barrier(num_arrivals=sizes.team_size, num_barriers=num)

    return DkDvBarriers(
        kv_full=plgpu.Barrier(
            num_arrivals=num_loaded * sizes.team_size * spec.num_head_panels + 1, num_barriers=sizes.teams
        ),
        kv_free=warpgroup_barriers(sizes.teams),
        kv_products_issued=warpgroup_barriers(1),
        q_full=plgpu.Barrier(num_arrivals=spec.copies_per_tile, num_barriers=stages),
        q_free=warpgroup_barriers(stages),
        dout_full=plgpu.Barrier(num_arrivals=dout_copies, num_barriers=dout_stages),
        dout_free=warpgroup_barriers(dout_stages),
        ds_full=warpgroup_barriers(DS_BUFFERS),
    )
