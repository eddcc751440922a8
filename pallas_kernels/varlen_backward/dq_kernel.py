"""The dq kernel: dQ of 64 query rows per warpgroup, bitwise reproducible.

It iterates over work tiles as varlen_prefill does, and shares its schedule, loading warp, masks and epilogue.
A work tile's dO is loaded together with its queries. For each KV tile (i; s = i % stages) each of the two
computing warpgroups does:

    wait k_full[s]
    issue S = Q K(i)^T
    wait v_full[s] (heads of 256 have one stage of values: v_full[0])
    issue dP = dO V(i)^T
    issue dQ += dS(i-1) K(i-1)
    await S; P = 2^(S - LSE), during dP and dQ
    await dP; arrive v_free[s]
    dS(i) = P (dP - delta), during dQ
    await dQ; arrive k_free[s'], s' of tile i - 1

Under a mask of small blocks, each warpgroup is a team with its own work tiles of 64 rows, pipeline stages and
loading warp, so that it visits only the keys that its own rows attend to.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Ref, Scalar, ScratchType
from pallas_kernels.varlen_backward.dq_loader import DqLoader, num_value_stages
from pallas_kernels.varlen_backward.dq_mainloop import DqMainloop
from pallas_kernels.varlen_backward.refs import DqInputs, DqSmem, WarpDqSmem
from pallas_kernels.varlen_backward.warp_dq_kernel import warp_dq_body
from pallas_kernels.varlen_prefill.spec import (
    PrefillBarriers,
    PrefillSpec,
    barrier_types,
    smem_types,
    warp_barrier_types,
    warp_smem_types,
)
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler


def run_dq(inputs: DqInputs, spec: PrefillSpec, num_tokens: int) -> jax.Array:
    """Launch the dq kernel, and return dq [tokens, ...]; `num_tokens` is the number without padding."""
    body: Callable[..., None]
    scratch_types: tuple[ScratchType, ScratchType]
    if spec.sizes.per_warp_mma:
        body, num_warpgroups = warp_dq_body, spec.sizes.warpgroups
        barrier = warp_barrier_types(num_warpgroups, is_interpreted=spec.is_interpreted)
        attention_smem = warp_smem_types(spec)
        scratch_types = WarpDqSmem(attention_smem, dout=attention_smem.query), barrier
    else:
        body, num_warpgroups = dq_body, spec.sizes.warpgroups + 1
        scratch_types = smem_and_barrier_types(spec)
    kernel = plgpu.kernel(
        functools.partial(body, spec=spec),
        out_type=jax.ShapeDtypeStruct((num_tokens, *inputs.attention.query.rows.shape[1:]), spec.dtype),
        scratch_types=scratch_types,
        grid=(spec.sizes.ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        # Sums are over a warp's registers; no shared memory is left for other reductions.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="varlen_backward_queries",
        interpret=spec.interpret,
    )
    return kernel(inputs)


def smem_and_barrier_types(spec: PrefillSpec) -> tuple[DqSmem, PrefillBarriers]:
    """Return the types of the arrays in shared memory and of the barriers."""
    head, sizes, num_values = spec.shape.head, spec.sizes, num_value_stages(spec)
    num_chunks = head.num_chunks
    # Shared memory and barriers of varlen_prefill, except for the values' stages and the dO that comes with
    # queries.
    values = swizzled_smem((sizes.teams * num_values, num_chunks, sizes.tile_kv, head.width), spec.dtype)
    attention_smem = smem_types(spec)._replace(alibi=None, v=values)
    dout = swizzled_smem(
        (sizes.warpgroups, sizes.query_buffers, num_chunks, WARPGROUP_ROWS, head.width), spec.dtype
    )
    barriers = barrier_types(spec)._replace(
        v_full=plgpu.Barrier(num_arrivals=spec.copies_per_stage, num_barriers=sizes.teams * num_values),
        v_free=plgpu.Barrier(num_arrivals=sizes.team_size, num_barriers=sizes.teams * num_values),
        q_full=plgpu.Barrier(
            num_arrivals=2 * num_chunks + 1, num_barriers=sizes.warpgroups * sizes.query_buffers
        ),
    )
    return DqSmem(attention_smem, dout), barriers


def dq_body(inputs: DqInputs, dq: Ref, smem: DqSmem, barriers: PrefillBarriers, *, spec: PrefillSpec) -> None:
    """Run one thread block: its last warpgroup loads, the others compute."""
    wg, num_computing = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    scheduler = PrefillTileScheduler(inputs.attention.schedule, spec)

    @pl.when(wg == num_computing)
    def _() -> None:
        # The computing warpgroups wait for these registers before they can take more.
        plgpu.set_max_registers(spec.load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            for team in range(spec.sizes.teams):
                loader = DqLoader(inputs, smem, barriers, spec, team)
                pl.when(warp == team)(functools.partial(loader.load_all, scheduler))

    @pl.when(wg < num_computing)
    def _() -> None:
        plgpu.set_max_registers(spec.compute_registers, action="increase")
        DqMainloop(inputs, dq, smem, barriers, spec).run(scheduler)
