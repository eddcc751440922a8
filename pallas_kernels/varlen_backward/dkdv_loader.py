"""The loading warp: an item's keys and values, then queries and gradients of the output, a tile a step."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec
from pallas_kernels.varlen_backward.tile_scheduler import BackwardTileScheduler, BackwardWorkTile, align_row


class DkDvLoader:
    """Loads what the warpgroups compute with."""

    def __init__(self, inputs: DkDvInputs, smem: DkDvSmem, pipeline: DkDvBarriers, spec: BackwardSpec):
        self.inputs, self.smem, self.pipeline, self.spec = inputs, smem, pipeline, spec

    def load_share(self, work: BackwardTileScheduler) -> None:
        """All items of the thread block."""
        rounds, number_of = work.rounds()

        def load(nth: Scalar, step: Scalar) -> Scalar:
            item = work.item(number_of(nth))
            pl.when(nth >= 1)(lambda: plgpu.barrier_wait(self.pipeline.kv_free))
            self.load_keys(item)
            return lax.fori_loop(0, self.spec.group, functools.partial(self.load_head, item), step)

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        # Interpret mode insists that every completion is awaited; to the hardware it is all one.
        if self.spec.is_interpreted:
            pl.when(rounds >= 1)(lambda: plgpu.barrier_wait(self.pipeline.kv_free))

            @pl.loop(jnp.maximum(steps - self.spec.sizes.stages, 0), steps)
            def _(step: Scalar) -> None:
                plgpu.barrier_wait(self.pipeline.q_free.at[self.spec.stages_of(step).query])

            @pl.loop(jnp.maximum(steps - self.spec.grad_out_stages, 0), steps)
            def _(step: Scalar) -> None:
                plgpu.barrier_wait(self.pipeline.do_free.at[self.spec.stages_of(step).grad_out])

    def load_keys(self, item: BackwardWorkTile) -> None:
        """An item's keys, columns and, where keys have a gradient, values."""
        full = self.pipeline.kv_full
        for wg in range(WARPGROUPS):
            rows = pl.ds(align_row(item["first_key_row"] + wg * UNIT), UNIT)
            for unit in range(self.spec.units):
                at = (rows, item.kv_head, *self.spec.at_unit(unit, item.row * 0))
                plgpu.copy_gmem_to_smem(self.inputs.key.at[at], self.smem.key.at[wg, unit], full)
                if self.spec.makes.key:
                    plgpu.copy_gmem_to_smem(self.inputs.value.at[at], self.smem.value.at[wg, unit], full)
        plgpu.copy_gmem_to_smem(self.inputs.schedule.table.at[item.row], self.smem.item, full)

    def load_head(self, item: BackwardWorkTile, nth: Scalar, step: Scalar) -> Scalar:
        """All steps of an item's n-th query head, from `step` on; returns the one behind."""
        head, steps = item.head(nth), item.steps(nth)

        def load_next(i: Scalar, tile: Scalar) -> Scalar:
            following = steps.tile(jnp.minimum(i + 1, steps.num - 1))
            self.load_tile(item, head, tile, step + i)
            return following

        if self.spec.has_lists:  # read a step ahead: a list is in global memory
            lax.fori_loop(0, steps.num, load_next, steps.tile(jnp.int32(0)))
        else:
            pl.loop(0, steps.num)(lambda i: self.load_tile(item, head, steps.tile(i), step + i))
        return step + steps.num

    def load_tile(self, item: BackwardWorkTile, head: Scalar, tile: Scalar, step: Scalar) -> None:
        """A tile of queries, and the gradients of its outputs with its stats."""
        stages, pipeline, smem = self.spec.stages_of(step), self.pipeline, self.smem
        rows = pl.ds(item.query_row(tile), self.spec.sizes.tile_q)

        def copy_units(source_g: Ref, to_s: Ref, full: Barriers) -> None:
            for unit in range(self.spec.units):
                source = source_g.at[(rows, head, *self.spec.at_unit(unit, step * 0))]
                plgpu.copy_gmem_to_smem(source, to_s.at[unit], full)

        def await_free(free: Barriers, num: int, stage: Scalar) -> None:
            pl.when(step >= num)(functools.partial(plgpu.barrier_wait, free.at[stage]))

        stage, full = stages.query, pipeline.q_full.at[stages.query]
        await_free(pipeline.q_free, self.spec.sizes.stages, stage)
        copy_units(self.inputs.query, smem.query.at[stage], full)
        stage, full = stages.grad_out, pipeline.do_full.at[stages.grad_out]
        await_free(pipeline.do_free, self.spec.grad_out_stages, stage)
        copy_units(self.inputs.grad_out, smem.grad_out.at[stage], full)
        plgpu.copy_gmem_to_smem(
            self.inputs.stats.at[head, pl.ds(0, 2), rows], smem.stats_and_columns.at[stage], full
        )
