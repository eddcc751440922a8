"""The main loop of a warpgroup of the dk/dv kernel: dk and dv of 64 of a work tile's keys.

If there is no dq kernel, each warpgroup also adds its blocks of each step's dQ to global memory.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.memory import PANEL
from pallas_kernels.shared.tile_rows import clear_masked_out, run_offsets
from pallas_kernels.shared.types import Index, Ref, Scalar, Slice, Tile, f32
from pallas_kernels.varlen_backward.dkdv_scores import DkDvScores, QueryTile
from pallas_kernels.varlen_backward.dkdv_spec import DS_BUFFERS, DkDvSpec, QueryStages
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import (
    DkDvTileScheduler,
    DkDvWorkTile,
    entry_tile,
    is_needed_by,
)
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvOutputs, DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_prefill.epilogue import ValidRows, store_valid_rows
from pallas_kernels.varlen_prefill.tile_scheduler import PackedHead, team_and_rank


class DkDvSums(NamedTuple):
    """Accumulated gradients of a warpgroup's keys and values, one f32 [64, width] tile per chunk of the head.

    Attributes:
        dk: Gradient of the keys without the softmax scale, dS^T Q, summed over the steps so far.
        dv: Gradient of the values, P^T dO, summed over the steps so far.
    """

    dk: tuple[Tile, ...]
    dv: tuple[Tile, ...]


def zero_sums(spec: DkDvSpec) -> DkDvSums:
    """Return accumulators of zeros for the gradients that the kernel computes."""
    zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, spec.head.width), f32), WGMMA)
    return DkDvSums(*((zeros,) * spec.head.num_chunks if x else () for x in spec.computes))


class PendingDq(NamedTuple):
    """Destination of the previous step's dq, which is computed and added one step late.

    Attributes:
        head: Query head.
        row: First row of the query tile; negative if there was no previous step.
    """

    head: Scalar
    row: Scalar


class DkDvState(NamedTuple):
    """State of a work tile between two steps.

    Attributes:
        sums: Accumulated dk and dv.
        pending_dq: The dq that the next step computes; None if the dq kernel computes dq.
    """

    sums: DkDvSums
    pending_dq: PendingDq | None


class DkDvMainloop:
    """Main loop of one warpgroup."""

    def __init__(
        self,
        inputs: DkDvInputs,
        outputs: DkDvOutputs,
        smem: DkDvSmem,
        barriers: DkDvBarriers,
        spec: DkDvSpec,
    ):
        self.wg = wg = lax.axis_index("warpgroup")
        # The warpgroups of a team share a work tile: 64 keys each, from rank * 64 on.
        self.team, self.rank = team_and_rank(wg, spec.sizes.teams)
        self.inputs, self.outputs, self.smem, self.barriers = inputs, outputs, smem, barriers
        self.spec = spec
        columns_s = smem.stats_and_columns.at[wg * 0 + spec.sizes.teams * spec.dout_stages, wg]
        self.scores = DkDvScores(inputs.mask, inputs.score_mod, columns_s, self.rank, spec)

    def run(self, scheduler: DkDvTileScheduler) -> None:
        """Compute all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)
        self.scores.store_column_indices()
        plgpu.commit_smem()

        def compute(iteration: Scalar, step: Scalar) -> Scalar:
            # Wait for the keys and values, with which the work tile's table row arrives.
            plgpu.barrier_wait(self.barriers.kv_full.at[self.team])
            work_tile = scheduler.work_tile(tile_index(iteration), self.smem.table_row.at[self.team])
            self._clear_keys(work_tile)
            step, sums = self.compute_work_tile(work_tile, step)
            self.store(work_tile, sums)
            # Release the keys' memory only when the gradients that replaced them have left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.barriers.kv_free.at[self.team])
            return step

        lax.fori_loop(0, rounds, compute, rounds * 0)
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(self, work_tile: DkDvWorkTile, step: Scalar) -> tuple[Scalar, DkDvSums]:
        """Compute dk and dv of a work tile.

        Args:
            work_tile: Keys of the work tile, and the query tiles that attend to them.
            step: Number of steps that the team has computed for earlier work tiles.

        Returns:
            `step` plus the steps of this work tile, and dk and dv.
        """
        computes, compute_step = self.spec.computes, self.compute_step
        if self.spec.is_interpreted:
            compute_step = self.compute_step_in_order
        elif not (computes.dk and computes.dv):
            compute_step = self.compute_dk_step if computes.dk else self.compute_dv_step

        def compute_head(index: Scalar, carry: tuple[Scalar, DkDvState]) -> tuple[Scalar, DkDvState]:
            step, state = carry
            head, steps = work_tile.head(index), work_tile.steps(index)
            slope = self.slope(head)

            def compute_tile(is_masked: bool) -> Callable[[Scalar, DkDvState], DkDvState]:
                def compute(i: Scalar, state: DkDvState) -> DkDvState:
                    if not self.spec.has_warpgroup_bits:
                        num_missing = steps.num_missing - i * steps.runs_per_tile
                        tile = QueryTile(work_tile, head, steps.runs(i), slope, is_masked, num_missing)
                        return compute_step(tile, step + i, state)
                    entry = steps.entry(i)
                    tile = QueryTile(work_tile, head, (entry_tile(entry),), slope, is_masked)
                    return lax.cond(
                        is_needed_by(self.wg, entry),
                        lambda: compute_step(tile, step + i, state),
                        lambda: self.skip_step(step + i, state),
                    )

                return compute

            # Partial tiles come first; full ones are computed without any mask.
            state = lax.fori_loop(0, steps.num_masked, compute_tile(True), state)
            state = lax.fori_loop(steps.num_masked, steps.num_steps, compute_tile(False), state)
            return step + steps.num_steps, state

        pending_dq = None
        if self.spec.adds_dq:
            pending_dq = PendingDq(work_tile.head(step * 0), step * 0 - 1)
            # The first step waits for the dS of a step before it; there is none, so arrive in its place.
            plgpu.barrier_arrive(self.barriers.ds_full.at[previous_buffer(step)])
        start = DkDvState(zero_sums(self.spec), pending_dq)
        step, (sums, pending_dq) = lax.fori_loop(0, self.spec.group, compute_head, (step, start))
        if pending_dq is not None:
            self.add_last_dq(work_tile, pending_dq, step)
        return step, sums

    def slope(self, head: Scalar) -> Scalar | None:
        """Return the ALiBi slope of a query head times log2(e), or None."""
        return None if self.inputs.slopes is None else self.inputs.slopes[head]

    def skip_step(self, step: Scalar, state: DkDvState) -> DkDvState:
        """Release the stages of a query tile whose queries attend to none of the warpgroup's keys."""
        stages, barriers = self.spec.step_stages(step, self.team), self.barriers
        plgpu.barrier_wait(barriers.q_full.at[stages.query])
        plgpu.barrier_wait(barriers.dout_full.at[stages.dout])
        plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return state

    def compute_step(self, tile: QueryTile, step: Scalar, state: DkDvState) -> DkDvState:
        """Add a query tile to dk and dv, and the dq of the previous step to global memory: the main loop.

        P is computed while dP is in flight, and dS while dV is. dQ belongs to the previous step and leaves
        while dK is in flight.

        Args:
            tile: The query tile.
            step: Its step.
            state: State after the previous step.
        """
        spec, smem, barriers, scores = self.spec, self.smem, self.barriers, self.scores
        num_panels = spec.num_head_panels
        stages, buffer = spec.step_stages(step, self.team), lax.rem(step, jnp.int32(DS_BUFFERS))
        # The mask's data and lookups come from global memory: load them before anything is awaited.
        stats_s, loaded = smem.stats_and_columns.at[stages.dout], scores.load(tile)
        # A 0 that is read from memory in each step, so that the compiler cannot treat it as a constant.
        # Otherwise it would keep 24 addresses of keys and values in registers, and there are not enough.
        zero = tile.work_tile["zero"]
        wg = self.wg + zero
        queries, dout = smem.query.at[stages.query], smem.dout.at[stages.dout]
        # Load the row statistics early, so that the loads do not wait for the products; tiles of more queries
        # have no registers for them while S is computed.
        loads_early = spec.num_query_panels == 1

        def add_tile(sum_refs: Any) -> None:
            def compute_ds(s_ref: Ref, dp_ref: Ref) -> Tile:
                self.wait_for_queries(tile, stages)
                if loads_early:
                    self.wait_for_dout(tile, stages)
                    lse = scores.lse(stats_s, tile)
                self.issue_scores(s_ref, stages.query, wg)
                # With late statistics dO is awaited only now, while S is in flight.
                if not loads_early:
                    self.wait_for_dout(tile, stages)
                self.issue_dp(dp_ref, stages.dout, wg)
                # Wait until the previous dq has left shared memory. That is long before it is needed: all
                # threads wait for each other here, as they do for S anyway.
                if spec.adds_dq:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                # Wait for S but not for dP: P is computed meanwhile.
                s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=num_panels))
                if not loads_early:
                    lse = scores.lse(stats_s, tile)
                probabilities = scores.probabilities(s, lse, tile, loaded)
                if loads_early:
                    delta = scores.delta(stats_s)
                for panel, ref in enumerate(sum_refs.dv):
                    plgpu.wgmma(ref, probabilities.p, dout.at[panel])
                # Wait for dP but not for dV: dS is computed meanwhile.
                dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=num_panels))
                if not loads_early:
                    delta = scores.delta(stats_s)
                return scores.ds(probabilities, dp, delta).astype(spec.dtype)

            ds = pl.run_scoped(compute_ds, *[plgpu.ACC(spec.s_shape, f32)] * 2)
            self.exchange_ds(ds, buffer)

            def multiply_ds(*dq_refs: Ref) -> tuple[Tile, ...]:
                # The previous step's dQ first, so that it can leave while dK is in flight.
                for index, ref in enumerate(dq_refs):
                    self.issue_dq(ref, index, 1 - buffer, zero)
                for panel, ref in enumerate(sum_refs.dk):
                    plgpu.wgmma(ref, ds, queries.at[panel])
                if not dq_refs:
                    plgpu.wgmma_wait(num_panels)
                return tuple(plgpu.wgmma_accumulator_load(ref, wait_n=num_panels) for ref in dq_refs)

            num = spec.num_dq_blocks if spec.adds_dq else 0
            dq = pl.run_scoped(multiply_ds, *[plgpu.ACC((PANEL, PANEL), f32)] * num)
            # Release dO: dV is complete, so it has been read for the last time.
            plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
            if state.pending_dq is not None:
                dq = tuple(lax.optimization_barrier(dq))
                # This step's dS is stored, and the previous step's has been multiplied.
                plgpu.barrier_arrive(barriers.ds_full.at[buffer])
                self.add_dq(state.pending_dq, dq)

        start = DkDvSums(*(tuple(plgpu.ACC.init(acc) for acc in panels) for panels in state.sums))
        # Leaving run_state waits for dK.
        sums = DkDvSums(*(tuple(panels) for panels in pl.run_state(add_tile)(start)))
        # Release the queries: dK has read them for the last time.
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return self.next_state(tile, sums, state)

    def compute_dk_step(self, tile: QueryTile, step: Scalar, state: DkDvState) -> DkDvState:
        """Compute S, dP and dK of wide heads, whose dk and dv have a kernel each; see `compute_step`."""
        spec, barriers, scores = self.spec, self.barriers, self.scores
        stages = spec.step_stages(step, self.team)
        stats_s, loaded = self.smem.stats_and_columns.at[stages.dout], scores.load(tile)
        wg = self.wg + tile.work_tile["zero"]

        def compute_ds(s_ref: Ref, dp_ref: Ref) -> Tile:
            self.wait_for_queries(tile, stages)
            self.issue_scores(s_ref, stages.query, wg)
            self.wait_for_dout(tile, stages)
            self.issue_dp(dp_ref, stages.dout, wg)
            # Wait for S but not for dP: P is computed meanwhile.
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=spec.num_head_panels))
            probabilities = scores.probabilities(s, scores.lse(stats_s, tile), tile, loaded)
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=0))
            ds = scores.ds(probabilities, dp, scores.delta(stats_s)).astype(spec.dtype)
            # Release dO early: dP alone reads it.
            plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
            return ds

        ds = pl.run_scoped(compute_ds, *[plgpu.ACC(spec.s_shape, f32)] * 2)
        dk = self.add_product(state.sums.dk, ds, self.smem.query.at[stages.query])
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return self.next_state(tile, DkDvSums(dk, ()), state)

    def compute_dv_step(self, tile: QueryTile, step: Scalar, state: DkDvState) -> DkDvState:
        """Compute S and dV of wide heads, whose dk and dv have a kernel each; see `compute_step`."""
        barriers, scores, stages = self.barriers, self.scores, self.spec.step_stages(step, self.team)
        stats_s, loaded = self.smem.stats_and_columns.at[stages.dout], scores.load(tile)
        wg = self.wg + tile.work_tile["zero"]

        def compute_scores(s_ref: Ref) -> Tile:
            self.wait_for_queries(tile, stages)
            self.issue_scores(s_ref, stages.query, wg)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(compute_scores, plgpu.ACC(self.spec.s_shape, f32))
        self.wait_for_dout(tile, stages)
        s, lse = lax.optimization_barrier(s), scores.lse(stats_s, tile)
        p = scores.probabilities(s, lse, tile, loaded).p
        dv = self.add_product(state.sums.dv, p, self.smem.dout.at[stages.dout])
        plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return self.next_state(tile, DkDvSums((), dv), state)

    def compute_step_in_order(self, tile: QueryTile, step: Scalar, state: DkDvState) -> DkDvState:
        """Compute a step in interpret mode, which has no running accumulators and no register operands."""
        spec, smem, barriers, scores, wg = self.spec, self.smem, self.barriers, self.scores, self.wg
        stages, buffer = spec.step_stages(step, self.team), lax.rem(step, jnp.int32(DS_BUFFERS))
        stats_s, loaded = smem.stats_and_columns.at[stages.dout], scores.load(tile)
        queries, dout = smem.query.at[stages.query], smem.dout.at[stages.dout]
        self.wait_for_queries(tile, stages)
        s = run_mma(spec.s_shape, lambda ref: self.issue_scores(ref, stages.query, wg))
        self.wait_for_dout(tile, stages)
        probabilities = scores.probabilities(s, scores.lse(stats_s, tile), tile, loaded)
        dk, dv = state.sums
        dq: tuple[Tile, ...] = ()
        if spec.computes.dv:
            store_panels(smem.p.at[wg], probabilities.p, spec)
            plgpu.commit_smem()
            dv = tuple(acc + self.sum_over_queries(smem.p.at[wg], dout, n) for n, acc in enumerate(dv))
        if spec.computes.dk:
            dp = run_mma(spec.s_shape, lambda ref: self.issue_dp(ref, stages.dout, wg))
            ds = scores.ds(probabilities, dp, scores.delta(stats_s)).astype(spec.dtype)
            self.exchange_ds(ds, buffer)
            dq = self.dq(1 - buffer, tile.work_tile["zero"]) if spec.adds_dq else ()
            ds_s = smem.ds.at[buffer, wg]
            dk = tuple(acc + self.sum_over_queries(ds_s, queries, n) for n, acc in enumerate(dk))
        plgpu.barrier_arrive(barriers.dout_free.at[stages.dout])
        if state.pending_dq is not None:
            plgpu.barrier_arrive(barriers.ds_full.at[buffer])
            self.add_dq(state.pending_dq, dq)
        plgpu.barrier_arrive(barriers.q_free.at[stages.query])
        return self.next_state(tile, DkDvSums(dk, dv), state)

    def next_state(self, tile: QueryTile, sums: DkDvSums, state: DkDvState) -> DkDvState:
        """Return the state after a step."""
        if state.pending_dq is None:
            return DkDvState(sums, None)
        return DkDvState(sums, PendingDq(tile.head, tile.work_tile.query_row(tile.tile_index)))

    def wait_for_queries(self, tile: QueryTile, stages: QueryStages) -> None:
        """Wait for a step's queries, and zero those outside of the request."""
        plgpu.barrier_wait(self.barriers.q_full.at[stages.query])
        if tile.is_masked:
            self.clear_queries(tile, self.smem.query.at[stages.query])

    def wait_for_dout(self, tile: QueryTile, stages: QueryStages) -> None:
        """Wait for a step's dO and row statistics, which arrive together, and zero dO like the queries."""
        plgpu.barrier_wait(self.barriers.dout_full.at[stages.dout])
        if tile.is_masked:
            self.clear_queries(tile, self.smem.dout.at[stages.dout])

    def exchange_ds(self, ds: Tile, buffer: Scalar) -> None:
        """Store dS in 16 bits, after the other warpgroup has read what it replaces."""
        # The other warpgroup has then stored the previous dS, and multiplied the one that this replaces.
        if self.spec.adds_dq:
            plgpu.barrier_wait(self.barriers.ds_full.at[1 - buffer])
        if self.smem.ds is not None:
            store_panels(self.smem.ds.at[buffer, self.wg], ds, self.spec)
            plgpu.commit_smem()

    def issue_scores(self, s_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Issue S^T += K Q^T."""
        for panel in range(self.spec.num_head_panels):
            plgpu.wgmma(s_ref, self.smem.key.at[wg, panel], self.smem.query.at[stage, panel].T)

    def issue_dp(self, dp_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Issue dP^T += V dO^T."""
        for panel in range(self.spec.num_head_panels):
            plgpu.wgmma(dp_ref, self.smem.value.at[wg, panel], self.smem.dout.at[stage, panel].T)

    def issue_dq(self, dq_ref: Ref, index: int, buffer: Scalar, zero: Scalar) -> None:
        """Issue dQ += dS K for the warpgroup's dQ block `index`, over the keys of both warpgroups."""
        query_panel, panel = self.dq_block_indices(index)
        for wg in range(WARPGROUPS):
            ds = self.smem.ds.at[buffer, wg, query_panel]
            plgpu.wgmma(dq_ref, ds.T, self.smem.key.at[zero + wg, panel])

    def dq_block_indices(self, index: int) -> tuple[Scalar | int, Scalar | int]:
        """Return the (query panel, head panel) of the warpgroup's dQ block `index`, which is [64, 64]."""
        number = self.wg * self.spec.num_dq_blocks + index
        if self.spec.num_query_panels == 1:
            return 0, number
        panels = jnp.int32(self.spec.num_head_panels)
        return (
            (number, 0)
            if self.spec.num_head_panels == 1
            else (lax.div(number, panels), lax.rem(number, panels))
        )

    def dq(self, buffer: Scalar, zero: Scalar) -> tuple[Tile, ...]:
        """Return the warpgroup's blocks of dQ = dS K for the step whose dS is in `buffer`."""

        def compute_block(index: int) -> Tile:
            return run_mma((PANEL, PANEL), lambda ref: self.issue_dq(ref, index, buffer, zero))

        return tuple(compute_block(index) for index in range(self.spec.num_dq_blocks))

    def sum_over_queries(self, rows_s: Ref, queries_s: Ref, panel: int) -> Tile:
        """Return [64, tile_q] in shared memory times one head panel of a query tile."""

        def issue(ref: Ref) -> None:
            for index in range(self.spec.num_query_panels):
                plgpu.wgmma(ref, rows_s.at[index], queries_s.at[panel, pl.ds(index * PANEL, PANEL)])

        return run_mma((PANEL, PANEL), issue)

    def add_product(self, sums: tuple[Tile, ...], rows: Tile, queries_s: Ref) -> tuple[Tile, ...]:
        """Return the sums plus `rows` times a tile of queries or of dO."""

        def run(refs: Any) -> None:
            for panel, ref in enumerate(refs):
                plgpu.wgmma(ref, rows, queries_s.at[panel])

        return tuple(pl.run_state(run)(tuple(plgpu.ACC.init(acc) for acc in sums)))

    def add_last_dq(self, work_tile: DkDvWorkTile, pending_dq: PendingDq, step: Scalar) -> None:
        """Add the dq of a work tile's last step to global memory; `step` is one past that step."""
        buffer = previous_buffer(step)
        plgpu.barrier_wait(self.barriers.ds_full.at[buffer])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.add_dq(pending_dq, self.dq(buffer, work_tile["zero"]))

    def add_dq(self, pending_dq: PendingDq, dq: tuple[Tile, ...]) -> None:
        """Add the warpgroup's dQ blocks to global memory. They are 0 in rows outside of the request."""
        if not self.spec.is_interpreted:
            for index, dq_block in enumerate(dq):
                self.smem.dq[self.wg, index] = dq_block
            plgpu.commit_smem()

        @pl.when(pending_dq.row >= 0)
        def _() -> None:
            for index, dq_block in enumerate(dq):
                query_panel, panel = self.dq_block_indices(index)
                rows = pl.ds(pl.multiple_of(pending_dq.row + query_panel * PANEL, 8), PANEL)
                to = self.inputs.dq.at[pending_dq.head, panel, rows]
                if self.spec.is_interpreted:
                    to[...] = plgpu.load(to, layout=WGMMA, optimized=False) + dq_block
                else:
                    plgpu.copy_smem_to_gmem(self.smem.dq.at[self.wg, index], to, reduction_op="add")

    def store(self, work_tile: DkDvWorkTile, sums: DkDvSums) -> None:
        """Store dk in place of the keys and dv in place of the values; one alone in place of the keys."""
        scale, dtype = self.spec.score.scale, self.spec.dtype
        dk = tuple((acc * scale).astype(dtype) for acc in sums.dk)
        dv = tuple(acc.astype(dtype) for acc in sums.dv)

        def store_grad(grad_g: Ref, both_views: Ref, tiles: tuple[Tile, ...]) -> None:
            (swizzled,), (plain,) = both_views
            first_row = work_tile["first_key_row"] + self.rank * WARPGROUP_ROWS
            begin, end = (
                jnp.clip(work_tile[name] - self.rank * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)
                for name in ("store_begin", "store_end")
            )

            def index_of(rows: Slice, head: Scalar, panel: int) -> Index:
                return (rows, head, *self.spec.gmem_panel_index(panel, first_row * 0))

            store_valid_rows(
                grad_g, index_of, [PackedHead(work_tile.grad_head, 0)], ValidRows(first_row, begin, end),
                swizzled.at[self.wg], plain.at[self.wg], tiles, is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip

        computes, outputs = self.spec.computes, self.outputs
        if computes.dk and computes.dv:
            store_grad(outputs.dv, self.smem.value_and_dv, dv)
        if self.spec.sizes.team_size > 1:
            # The other warpgroup multiplies this one's keys as well, for dq: wait until it is done with them.
            plgpu.barrier_arrive(self.barriers.kv_products_issued)
            plgpu.barrier_wait(self.barriers.kv_products_issued)
        if computes.dk:
            store_grad(outputs.dk, self.smem.key_and_dk, dk)
        else:
            store_grad(outputs.dv, self.smem.key_and_dk, dv)

    def _clear_keys(self, work_tile: DkDvWorkTile) -> None:
        """Zero keys outside of the request: a gradient of 0 does not hide a NaN."""
        begin, end, sizes = work_tile["begin"], work_tile["end"], self.spec.sizes

        @pl.when((begin > 0) | (end < sizes.tile_kv))
        def _() -> None:
            for rank in range(sizes.team_size):
                wg = rank if sizes.teams == 1 else self.team
                clear_rows(self.smem.key.at[wg], begin - rank * WARPGROUP_ROWS, end - rank * WARPGROUP_ROWS)
            plgpu.commit_smem()

    def clear_queries(self, tile: QueryTile, tile_s: Ref) -> None:
        """Zero queries, or their dO, outside of the request; each warpgroup does it for itself."""
        clear_invalid_queries(tile, tile_s, fence=plgpu.commit_smem)


def clear_invalid_queries(tile: QueryTile, tile_s: Ref, *, fence: Callable[[], None]) -> None:
    """Zero queries, or their dO, outside of the request: 0 times NaN is NaN.

    Args:
        tile: The query tile.
        tile_s: Its queries or dO in shared memory, [chunks, tile_q, width].
        fence: Function that makes the zeros visible to the matrix product.
    """
    tile_q, num_runs = tile_s.shape[1], len(tile.runs)
    length, first, end = tile_q // num_runs, tile.work_tile["first_position"], tile.work_tile["end_position"]
    positions = [tile.work_tile.position(run) for run in tile.runs]
    is_outside = [(first > position) | (end - position < length) for position in positions]

    @pl.when(functools.reduce(operator.or_, is_outside))
    def _() -> None:
        for start in range(0, tile_q, PANEL):

            def query_position(shape: tuple[int, ...], start: int = start) -> Tile:
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
                first_run = start // length
                first_position = positions[first_run] + (start - first_run * length)
                others = positions[first_run + 1 : (start + PANEL) // length]
                return row + run_offsets(row, [first_position, *others], length)

            clear_masked_out(
                tile_s.at[slice(None), pl.ds(start, PANEL)], pl.ds(0, PANEL), query_position, first, end
            )
        fence()


def clear_rows(panel_s: Ref, begin: Scalar, end: Scalar) -> None:
    """Zero the rows of a panel outside of [begin, end)."""

    def row(shape: tuple[int, ...]) -> Tile:
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)

    clear_masked_out(panel_s, pl.ds(0, PANEL), row, begin, end)


def previous_buffer(step: Scalar) -> Scalar:
    """Return the dS buffer of the step before."""
    return lax.rem(step + 1, jnp.int32(DS_BUFFERS))


def store_panels(to_s: Ref, tile: Tile, spec: DkDvSpec) -> None:
    """Store a tile [64, tile_q] in shared memory, one query panel after the other."""
    for index in range(spec.num_query_panels):
        to_s[index] = tile[:, index * PANEL : (index + 1) * PANEL]


def run_mma(shape: tuple[int, int], issue: Callable[[Ref], None]) -> Tile:
    """Return what `issue` adds to an accumulator of zeros."""

    def run(ref: Ref) -> Tile:
        issue(ref)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))
