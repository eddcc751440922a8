"""The kernel of the queries' gradient alone: dQ of 64 rows a warpgroup, the same bits twice.

It goes through items as varlen_prefill does and takes its rooms: the schedule, the loading warp's ring of
keys and values, masks and the way out. Beside an item's queries stand the gradients of their outputs. Of a
tile of keys (i; s = i % stages) each of the two warpgroups that compute does:

    wait k_full[s]
    issue S = Q K(i)^T
    wait v_full[s] (of heads of 256 there is one tile of values at a time: v_full[0])
    issue dP = dO V(i)^T
    issue dQ += dS(i-1) K(i-1)
    await S; P = 2^(S - stats), beside dP and dQ
    await dP; arrive v_free[s]
    dS(i) = P (dP - stats), beside dQ
    await dQ; arrive k_free[s'], s' of tile i - 1
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Ref, Scalar
from pallas_kernels.varlen_backward.dq_loader import DqKvPipeline, num_value_stages
from pallas_kernels.varlen_backward.dq_mainloop import DqMainloop
from pallas_kernels.varlen_backward.refs import DqInputs, DqSmem
from pallas_kernels.varlen_prefill.kernel import pipeline_types, register_counts, smem_types
from pallas_kernels.varlen_prefill.loader import PrefillLoader
from pallas_kernels.varlen_prefill.refs import PrefillBarriers
from pallas_kernels.varlen_prefill.spec import M, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler, PrefillWorkTile, align_row


def run_dq(inputs: DqInputs, spec: PrefillSpec) -> jax.Array:
    """The gradient of queries, as these."""
    chunks = spec.shape.cut.num_chunks
    cut, num_values = spec.shape.cut, num_value_stages(spec)
    values = swizzled_smem((num_values, chunks, spec.sizes.tile_kv, cut.width), spec.dtype)
    in_smem = smem_types(spec)._replace(alibi=None, v=values)
    rows = (spec.sizes.warpgroups, spec.sizes.query_buffers, chunks, M, cut.width)
    v_full = plgpu.Barrier(num_arrivals=spec.copies, num_barriers=num_values)
    v_free = plgpu.Barrier(num_arrivals=spec.sizes.team_size, num_barriers=num_values)
    barriers = pipeline_types(spec)._replace(v_full=v_full, v_free=v_free)
    both = plgpu.Barrier(
        num_arrivals=2 * chunks + 1, num_barriers=spec.sizes.warpgroups * spec.sizes.query_buffers
    )
    query = inputs.attention.query
    kernel = plgpu.kernel(
        functools.partial(dq_body, spec=spec),
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_types=(DqSmem(in_smem, swizzled_smem(rows, spec.dtype)), barriers._replace(q_full=both)),
        grid=(spec.sizes.ctas,),
        grid_names=("cta",),
        num_threads=spec.sizes.warpgroups + 1,
        thread_name="warpgroup",
        # Sums are over a warp's registers; there is no shared memory left for others.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="varlen_backward_queries",
        interpret=spec.interpret,
    )
    return kernel(inputs)


def dq_body(
    inputs: DqInputs, grad_query: Ref, smem: DqSmem, pipeline: PrefillBarriers, *, spec: PrefillSpec
) -> None:
    """What a thread block does: its last warpgroup loads, the others compute."""
    wg, loads = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    work = PrefillTileScheduler(inputs.attention.schedule, spec)
    load_registers, compute_registers = register_counts(spec)

    @pl.when(wg == loads)
    def _() -> None:
        plgpu.set_max_registers(load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            loader = DqLoader(inputs, smem, pipeline, spec)
            pl.when(warp == 0)(functools.partial(loader.load_share, work))

    @pl.when(wg < loads)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        DqMainloop(inputs, grad_query, smem, pipeline, spec).work_share(work)


class DqLoader(PrefillLoader):
    """Loads what the warpgroups compute with."""

    ring: DqKvPipeline

    def __init__(self, inputs: DqInputs, smem: DqSmem, pipeline: PrefillBarriers, spec: PrefillSpec):
        super().__init__(inputs.attention, smem.attention, pipeline, spec, 0)
        self.ring = DqKvPipeline(smem.attention, pipeline, spec)
        self.arrays = inputs.attention.cache.k, inputs.attention.cache.v
        self.grad_out_g, self.grad_out_s = inputs.grad_out, smem.grad_out
        self.out_g, self.steps_before = inputs.out, inputs.steps_before

    def load_share(self, work: PrefillTileScheduler) -> None:
        """See Loader; an item's outputs come before its keys."""
        rounds, number_of = work.rounds_of(self.team)

        def load(nth: Scalar, step: Scalar) -> Scalar:
            item, row = work.in_registers(number_of(nth))
            if self.out_g is not None:
                self.load_outputs(item, step)
            self.load_item(item, row, nth, step + self.steps_before)
            return step + self.steps_before + item.num

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        if self.spec.is_interpreted:
            self.ring.wait_until_read(steps)
            self.wait_for_queries(rounds)

    def load_outputs(self, item: PrefillWorkTile, step: Scalar) -> None:
        """The first warpgroup's in the place of keys, the second one's in that of values."""
        cut = self.spec.shape.cut
        for rank, (stream, stage, num) in enumerate(self.ring.stages(step)):
            pl.when(step >= num)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            rows = pl.ds(align_row(jnp.maximum(item["first_row"] + rank * M, 0)), M)
            for chunk in range(cut.num_chunks):
                source = self.out_g.at[(rows, item.head, *cut.gmem_index(chunk, step * 0))]
                plgpu.copy_gmem_to_smem(source, stream.tiles.at[stage, chunk], stream.full.at[stage])

    def load_tile(
        self, item: PrefillWorkTile, tile: Scalar, step: Scalar, between: Callable[[], None] | None = None
    ) -> None:
        """A tile's keys, then what is to be done between, then its values: see Loader."""
        kv_head = lax.div(item.head, jnp.int32(self.spec.shape.group))
        windows = self.windows.of(item, tile, kv_head, 0, 1)
        for nth, (stream, stage, num) in enumerate(self.ring.stages(step)):
            pl.when(step >= num)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            self.copy(self.arrays[nth], stream, stage, windows)
            if between is not None and nth == 0:
                between()

    def load_queries(self, item: PrefillWorkTile, row: Scalar, nth: Scalar) -> None:
        """Each warpgroup's queries, the item's columns, and the gradients of the queries' outputs."""
        super().load_queries(item, row, nth)
        cut, buffer = self.spec.shape.cut, self.queries[0].buffer(nth)
        for rank, queries in enumerate(self.queries):
            rows = pl.ds(align_row(jnp.maximum(item["first_row"] + rank * M, 0)), M)
            for chunk in range(cut.num_chunks):
                source = self.grad_out_g.at[(rows, item.head, *cut.gmem_index(chunk, nth * 0))]
                to = self.grad_out_s.at[rank, buffer, chunk]
                plgpu.copy_gmem_to_smem(source, to, queries.full.at[queries.barrier(buffer)])
