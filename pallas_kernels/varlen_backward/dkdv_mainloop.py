"""The main loop of a warpgroup of the dk/dv kernel: dk and dv of 64 of a work tile's 128 keys.

If there is no dq kernel, each warpgroup also adds its blocks of each step's dQ to global memory.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import PANEL
from pallas_kernels.shared.paged_kv import clear_masked_out
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_epilogue import store_valid_rows
from pallas_kernels.varlen_backward.dkdv_mma import (
    DkDvCallbacks,
    DkDvSums,
    DqTarget,
    Panels,
    mma_class,
    store_panels,
)
from pallas_kernels.varlen_backward.dkdv_scores import DkDvScores, QueryTile
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvOutputs, DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import DS_BUFFERS, BackwardSpec, W
from pallas_kernels.varlen_backward.tile_scheduler import BackwardTileScheduler, BackwardWorkTile, entry_tile


class DkDvState(NamedTuple):
    """State of a work tile between two steps.

    Attributes:
        sums: Accumulated dk and dv.
        last: Destination of the last step's dq, which the next step computes; its row is negative before the
            first step. None if the dq kernel computes dq.
    """

    sums: DkDvSums
    last: DqTarget | None


class DkDvMainloop:
    """Main loop of one warpgroup."""

    def __init__(
        self,
        inputs: DkDvInputs,
        outputs: DkDvOutputs,
        smem: DkDvSmem,
        barriers: DkDvBarriers,
        spec: BackwardSpec,
    ):
        self.wg = wg = lax.axis_index("warpgroup")
        self.inputs, self.outputs, self.smem, self.barriers = inputs, outputs, smem, barriers
        self.spec = spec
        columns_s = smem.stats_and_columns.at[wg * 0 + spec.dout_stages, wg]
        self.scores = DkDvScores(inputs.mask, columns_s, wg, spec)
        self.mma = mma_class(spec)(smem, wg, spec)

    def run(self, scheduler: BackwardTileScheduler) -> None:
        """Compute all work tiles of the thread block."""
        rounds, number_of = scheduler.assignment()
        self.scores.store_columns()

        def compute(iteration: Scalar, step: Scalar) -> Scalar:
            # Wait for the keys and values, with which the work tile's columns arrive.
            plgpu.barrier_wait(self.barriers.kv_full)
            work_tile = scheduler.work_tile(number_of(iteration), self.smem.tile_columns)
            self._clear_keys(work_tile)
            step, sums = self.compute_work_tile(work_tile, step)
            self.store(work_tile, sums)
            # Release the keys' memory only when the gradients that replaced them have left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.barriers.kv_free)
            return step

        lax.fori_loop(0, rounds, compute, rounds * 0)
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(self, work_tile: BackwardWorkTile, step: Scalar) -> tuple[Scalar, DkDvSums]:
        """Compute dk and dv of a work tile.

        Args:
            work_tile: Keys of the work tile, and the query tiles that attend to them.
            step: Number of steps that the thread block has computed for earlier work tiles.

        Returns:
            `step` plus the steps of this work tile, and dk and dv.
        """

        def compute_head(index: Scalar, carry: tuple[Scalar, DkDvState]) -> tuple[Scalar, DkDvState]:
            step, state = carry
            head, steps = work_tile.head(index), work_tile.steps(index)
            slope = self.slope(head)

            def compute_tile(is_masked: bool) -> Callable[[Scalar, DkDvState], DkDvState]:
                def compute(i: Scalar, state: DkDvState) -> DkDvState:
                    entry = steps.entry(i)
                    tile_index = entry_tile(entry) if self.spec.has_warpgroup_bits else entry
                    tile = QueryTile(work_tile, head, tile_index, slope, is_masked)
                    if not self.spec.has_warpgroup_bits:
                        return self.compute_step(tile, step + i, state)
                    is_needed = lax.shift_right_logical(entry, QUERY_BLOCK_SHIFT + self.wg) & 1 != 0
                    return lax.cond(
                        is_needed,
                        lambda: self.compute_step(tile, step + i, state),
                        lambda: self.skip_step(step + i, state),
                    )

                return compute

            # Partial tiles come first; full ones are computed without any mask.
            state = lax.fori_loop(0, steps.num_masked, compute_tile(True), state)
            state = lax.fori_loop(steps.num_masked, steps.num_steps, compute_tile(False), state)
            return step + steps.num_steps, state

        no_target = None
        if self.spec.adds_dq:
            no_target = DqTarget(work_tile.head(step * 0), step * 0 - 1)
            # The first step waits for the dS of a step before it; there is none, so arrive in its place.
            plgpu.barrier_arrive(self.barriers.ds_full.at[previous_buffer(step)])
        start = DkDvState(self.mma.zeros(), no_target)
        step, (sums, last) = lax.fori_loop(0, self.spec.group, compute_head, (step, start))
        if last is not None:
            self.add_last_dq(work_tile, last, step)
        return step, sums

    def slope(self, head: Scalar) -> Scalar | None:
        """Return the ALiBi slope of a query head times log2(e), or None."""
        return None if self.inputs.slopes is None else self.inputs.slopes[head]

    def skip_step(self, step: Scalar, state: DkDvState) -> DkDvState:
        """Release the stages of a query tile whose queries attend to none of the warpgroup's keys."""
        stages, barriers = self.spec.step_stages(step), self.barriers
        plgpu.barrier_wait(barriers.q_full.at[stages.query])
        plgpu.barrier_wait(barriers.dout_full.at[stages.dout])
        plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return state

    def compute_step(self, tile: QueryTile, step: Scalar, state: DkDvState) -> DkDvState:
        """Add the contribution of a query tile to dk and dv, and compute the dq of the previous step."""
        stages = self.spec.step_stages(step)
        buffer = lax.rem(step, jnp.int32(DS_BUFFERS))
        smem, barriers = self.smem, self.barriers
        # The mask's data comes from global memory, so load it before anything is awaited.
        stats_s, loaded = smem.stats_and_columns.at[stages.dout], self.scores.load_mask(tile)
        last = state.last

        def wait_and_clear(full: Ref, tile_s: Ref, stage: Scalar) -> None:
            plgpu.barrier_wait(full.at[stage])
            if tile.is_masked:
                self.clear_queries(tile, tile_s.at[stage])

        def wait_for_dq_buffer() -> None:
            if self.spec.adds_dq:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def exchange_ds(ds: Tile) -> None:
            # The other warpgroup has then stored the previous dS, and multiplied the one that this replaces.
            if last is not None:
                plgpu.barrier_wait(barriers.ds_full.at[1 - buffer])
            if smem.ds is not None:
                store_panels(smem.ds.at[buffer, self.wg], ds, self.spec)
                plgpu.commit_smem()

        def add_dq(dq: Panels) -> None:
            assert last is not None
            # This step's dS is stored, and the previous step's has been multiplied.
            plgpu.barrier_arrive(barriers.ds_full.at[buffer])
            self.add_dq(last, dq)

        callbacks = DkDvCallbacks(
            zero=tile.work_tile["zero"],
            wait_for_queries=lambda: wait_and_clear(barriers.q_full, smem.query, stages.query),
            wait_for_dout=lambda: wait_and_clear(barriers.dout_full, smem.dout, stages.dout),
            wait_for_dq_buffer=wait_for_dq_buffer,
            row_stats=lambda index: self.scores.row_stats(stats_s, index, tile),
            probabilities=lambda s, lse: self.scores.probabilities(s, lse, tile, loaded),
            score_grads=self.scores.gradients,
            exchange_ds=exchange_ds,
            release_dout=lambda: plgpu.barrier_arrive(barriers.dout_free.at[stages.dout]),
            add_dq=add_dq,
        )
        sums = self.mma.step(state.sums, stages, buffer, callbacks)
        # dK is complete, so the queries have been read for the last time.
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return DkDvState(
            sums, None if last is None else DqTarget(tile.head, tile.work_tile.query_row(tile.tile_index))
        )

    def add_last_dq(self, work_tile: BackwardWorkTile, last: DqTarget, step: Scalar) -> None:
        """Add the dq of a work tile's last step to global memory; `step` is one past that step."""
        buffer = previous_buffer(step)
        plgpu.barrier_wait(self.barriers.ds_full.at[buffer])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.add_dq(last, self.mma.dq(buffer, work_tile["zero"]))

    def add_dq(self, target: DqTarget, dq: Panels) -> None:
        """Add the warpgroup's dQ blocks to global memory; rows outside of the request are 0."""
        if not self.spec.is_interpreted:
            for index, dq_block in enumerate(dq):
                self.smem.dq[self.wg, index] = dq_block
            plgpu.commit_smem()

        @pl.when(target.row >= 0)
        def _() -> None:
            for index, dq_block in enumerate(dq):
                query_panel, panel = self.mma.dq_block_indices(index)
                rows = pl.ds(pl.multiple_of(target.row + query_panel * PANEL, 8), PANEL)
                to = self.inputs.dq.at[target.head, panel, rows]
                if self.spec.is_interpreted:
                    to[...] = plgpu.load(to, layout=W, optimized=False) + dq_block
                else:
                    plgpu.copy_smem_to_gmem(self.smem.dq.at[self.wg, index], to, reduction_op="add")

    def store(self, work_tile: BackwardWorkTile, sums: DkDvSums) -> None:
        """Store dk and dv to global memory through shared memory.

        dk replaces the keys in shared memory, and dv the values. A kernel that computes only dv has no values
        there, so dv replaces the keys.
        """
        scale, dtype = self.spec.score.scale, self.spec.dtype
        dk = tuple((acc * scale).astype(dtype) for acc in sums.dk)
        dv = tuple(acc.astype(dtype) for acc in sums.dv)

        def store(grad_g: Ref, both_views: Ref, tiles: Panels) -> None:
            (swizzled,), (plain,) = both_views
            store_valid_rows(
                grad_g, work_tile, self.wg, swizzled.at[self.wg], plain.at[self.wg], tiles, spec=self.spec
            )

        computes, outputs = self.spec.computes, self.outputs
        if computes.dk and computes.dv:
            store(outputs.dv, self.smem.value_and_dv, dv)
        # For dq, the other warpgroup also multiplies this warpgroup's keys: wait until it has done so.
        plgpu.barrier_arrive(self.barriers.kv_products_issued)
        plgpu.barrier_wait(self.barriers.kv_products_issued)
        last = (outputs.dk, dk) if computes.dk else (outputs.dv, dv)
        store(last[0], self.smem.key_and_dk, last[1])

    def _clear_keys(self, work_tile: BackwardWorkTile) -> None:
        """Zero keys outside of the request in shared memory; a NaN there would spread, as 0 * NaN is NaN."""
        begin, end = work_tile["begin"], work_tile["end"]

        @pl.when((begin > 0) | (end < WARPGROUPS * PANEL))
        def _() -> None:
            for wg in range(WARPGROUPS):
                self._clear(self.smem.key.at[wg], begin - wg * PANEL, end - wg * PANEL)
            plgpu.commit_smem()

    def clear_queries(self, tile: QueryTile, *tiles_s: Ref) -> None:
        """Zero rows of queries or dO outside of the request; both warpgroups zero the same rows."""
        begin, end = tile.valid_rows()

        @pl.when((begin > 0) | (end < self.spec.sizes.tile_q))
        def _() -> None:
            for tile_s, index in itertools.product(tiles_s, range(self.spec.num_query_panels)):
                panel_s = tile_s.at[slice(None), pl.ds(index * PANEL, PANEL)]
                self._clear(panel_s, begin - index * PANEL, end - index * PANEL)
            plgpu.commit_smem()

    def _clear(self, panel_s: Ref, begin: Scalar, end: Scalar) -> None:
        def row(shape: tuple[int, ...]) -> Tile:
            return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=W)

        clear_masked_out(panel_s, pl.ds(0, PANEL), row, begin, end)


def previous_buffer(step: Scalar) -> Scalar:
    """Return the index of the dS buffer of step `step - 1`."""
    return lax.rem(step + 1, jnp.int32(DS_BUFFERS))
