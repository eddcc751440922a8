"""The main loop of a warpgroup of the dq kernel: 64 query rows of each work tile, over all of their keys."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.types import Ref, Scalar, Tile, f32
from pallas_kernels.varlen_backward.dkdv_mainloop import run_mma
from pallas_kernels.varlen_backward.dq_loader import DqKvPipeline, has_wide_heads
from pallas_kernels.varlen_backward.dq_scores import DqScores, RowStats, load_row_stat
from pallas_kernels.varlen_backward.refs import DELTA, GRAD_LSE, LSE, NUM_ROW_STATS, DqInputs, DqSmem
from pallas_kernels.varlen_prefill.epilogue import store_rows
from pallas_kernels.varlen_prefill.loader import QueryBuffers
from pallas_kernels.varlen_prefill.masking import ValueTiles
from pallas_kernels.varlen_prefill.softmax import zero_accumulators
from pallas_kernels.varlen_prefill.spec import PrefillBarriers, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import (
    KvTile,
    MaskedEnds,
    PrefillTileScheduler,
    QueryRows,
    team_and_rank,
)


class DqOperands(NamedTuple):
    """A warpgroup's queries and dO in shared memory, [chunks, 64, width] each."""

    query: Ref
    dout: Ref


class DqRows(NamedTuple):
    """A warpgroup's query rows of a work tile.

    Attributes:
        rows: Query rows.
        stats: Statistics of each row.
        buffer: Index of the buffer that holds their queries and dO.
        first_step: Pipeline step of the work tile's first KV tile.
    """

    rows: QueryRows
    stats: RowStats
    buffer: Scalar
    first_step: Scalar


class DqState(NamedTuple):
    """State of a warpgroup between two KV tiles.

    Attributes:
        sums: Sum of dS K over all tiles before the last one, without the softmax scale; one per chunk.
        ds: Score gradients of the last tile in 16 bits.
    """

    sums: tuple[Tile, ...]
    ds: Tile


class DqMainloop:
    """Main loop of one warpgroup."""

    def __init__(self, inputs: DqInputs, dq: Ref, smem: DqSmem, barriers: PrefillBarriers, spec: PrefillSpec):
        self.wg = wg = lax.axis_index("warpgroup")
        # The warpgroups of a team share a work tile: 64 rows each, from rank * 64 on.
        self.team, self.rank = team_and_rank(wg, spec.sizes.teams)
        self.inputs, self.dq, self.smem, self.spec = inputs, dq, smem, spec
        self.queries = QueryBuffers(smem.attention, barriers, spec.sizes, wg)
        self.pipeline = DqKvPipeline(smem.attention, barriers, spec, self.team)
        # dQ multiplies keys, as P V multiplies values: a gradient of 0 does not hide their NaNs.
        self.keys = ValueTiles(self.pipeline.keys, self.pipeline, spec)
        attention, columns_s = inputs.attention, smem.attention.columns.at[wg]
        self.scores = DqScores(attention.mask, attention.score_mod, columns_s, spec)

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)
        self.scores.store_column_indices()
        plgpu.commit_smem()

        def compute(iteration: Scalar, step: Scalar) -> Scalar:
            # Wait for the queries, with which dO and the work tile's table row arrive.
            buffer = self.queries.buffer(iteration)
            plgpu.barrier_wait(self.queries.full.at[self.queries.barrier(buffer)])
            work_tile = scheduler.read_from_smem(tile_index(iteration), self.queries.table_row.at[buffer])
            slopes = self.inputs.attention.slopes
            rows = QueryRows(work_tile, self.rank, slopes, self.spec)
            self.compute_work_tile(rows, buffer, iteration, step)
            return step + self.inputs.num_output_steps + work_tile.num

        lax.fori_loop(0, rounds, compute, jnp.int32(0) * rounds)
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(self, rows: QueryRows, buffer: Scalar, iteration: Scalar, step: Scalar) -> None:
        """Compute and store dq of a work tile's rows.

        Args:
            rows: Query rows of the warpgroup.
            buffer: Index of the buffer that holds their queries.
            iteration: Number of the work tile among those of the team.
            step: Number of pipeline steps before this work tile.
        """
        queries = self.queries
        if queries.num > 1:
            # With two buffers, the previous work tile's dq leaves before its buffer is passed on.
            pl.when(iteration >= 1)(lambda: queries.release(iteration - 1))

        def compute() -> tuple[Tile, ...]:
            return self.compute_dq(rows, buffer, step)

        def skip() -> tuple[Tile, ...]:
            # No valid rows or no keys: release all of the work tile's stages.
            num_steps = rows.work_tile.num + self.inputs.num_output_steps
            self.pipeline.skip(step, jnp.int32(0), num_steps)
            return zero_accumulators(self.spec)

        scale, dtype = self.spec.score.scale, self.spec.dtype
        dq = [(acc * scale).astype(dtype) for acc in lax.cond(rows.has_work(), compute, skip)]
        store_rows(self.dq, rows, queries.query.at[buffer], queries.out.at[buffer], dq)
        if queries.num == 1:
            # With one buffer, the next work tile's queries wait until this dq has left.
            queries.release(iteration)

    def operands(self, rows: QueryRows, buffer: Scalar) -> DqOperands:
        """Return the queries and dO of a buffer in shared memory.

        For wide heads, the addresses of all operands do not fit in registers. The compiler recomputes them in
        each step, because they depend on a 0 that it cannot treat as a constant.
        """
        if has_wide_heads(self.spec):
            buffer = buffer + lax.shift_right_logical(rows.work_tile["seq_len"], jnp.int32(31))
        return DqOperands(self.queries.query.at[buffer], self.smem.dout.at[self.wg, buffer])

    def compute_dq(self, rows: QueryRows, buffer: Scalar, step: Scalar) -> tuple[Tile, ...]:
        """Return dq of the rows without the softmax scale; see compute_work_tile for the arguments."""
        begin, full_begin, full_end, end = rows.kv_tile_range()
        first_step = step + self.inputs.num_output_steps
        row_stats = self.load_row_stats(rows, buffer, output_step=step)
        dq_rows = DqRows(rows, row_stats, buffer, first_step)
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        # Release tiles that are only for the other warpgroup: first those before these rows' tiles.
        if has_window and not has_lists:
            self.pipeline.skip(first_step, jnp.int32(0), begin)
        first, operands = rows.tile(begin, MaskedEnds.BOTH, is_first=True), self.operands(rows, buffer)
        ds = self.compute_ds(first, operands, row_stats, first_step + begin, is_first=True)
        state = DqState(zero_accumulators(self.spec), ds.astype(self.spec.dtype))

        def compute_tiles(first: Scalar, end: Scalar, ends: MaskedEnds, state: DqState) -> DqState:
            return lax.fori_loop(first, end, functools.partial(self.compute_tile, dq_rows, ends), state)

        # One loop per kind of tile, so that full tiles are computed without any mask.
        if has_window or has_lists:
            state = compute_tiles(begin + 1, full_begin, MaskedEnds.BOTH, state)
        state = compute_tiles(full_begin, full_end, MaskedEnds.NONE, state)
        if not has_lists:
            state = compute_tiles(full_end, end, MaskedEnds.HIGH, state)
        # Zero keys after the request's end before dQ reads them.
        last, last_step = end - 1, first_step + end - 1
        if not has_lists:
            last_tile, stage = rows.tile(last, MaskedEnds.HIGH), self.pipeline.stage(last_step)
            self.keys.clear(last_tile, stage, MaskedEnds.HIGH)
        dq = self.add_dq(state, last_step)
        # Then release the tiles after these rows' tiles.
        if not has_lists:
            self.pipeline.skip(first_step, end, rows.work_tile.num)
        return dq

    def compute_tile(self, dq_rows: DqRows, masked_ends: MaskedEnds, i: Scalar, state: DqState) -> DqState:
        """Compute dS of KV tile i, together with dQ of the previous tile.

        Args:
            dq_rows: Query rows of the warpgroup.
            masked_ends: Which ends of the visible keys the tile may contain. Static.
            i: Index of the KV tile in the work tile.
            state: State after the previous tile.
        """
        rows, row_stats, buffer, first_step = dq_rows
        spec, tile, operands = self.spec, rows.tile(i, masked_ends), self.operands(rows, buffer)
        step = first_step + i
        if spec.is_interpreted or spec.shape.head.padded_dim > 192:
            # Heads of 256 leave no registers for dS beside the next S and dP: complete dQ before S.
            sums = self.add_dq(state, step - 1)
            ds = self.compute_ds(tile, operands, row_stats, step)
            return DqState(sums, ds.astype(spec.dtype))
        previous = self.pipeline.stage(step - 1)

        def compute_ds_and_dq(refs: Any) -> None:
            sum_refs, ds_ref = refs
            ds_ref[...] = self.compute_ds(
                tile, operands, row_stats, step, sum_refs=sum_refs, last_ds=state.ds, last_stage=previous
            )

        start = tuple(plgpu.ACC.init(acc) for acc in state.sums)
        # dS stays in f32 until the products are complete: they read the registers of the previous one in 16
        # bits.
        empty = plgpu.layout_cast(jnp.zeros(spec.s_shape, f32), WGMMA)
        sums, ds = pl.run_state(compute_ds_and_dq)((start, empty))
        # dQ of the previous tile is complete, so its keys have been read for the last time.
        plgpu.barrier_arrive(self.pipeline.keys.free.at[previous])
        return DqState(tuple(sums), ds.astype(spec.dtype))

    def compute_ds(
        self,
        tile: KvTile,
        operands: DqOperands,
        row_stats: RowStats,
        step: Scalar,
        *,
        is_first: bool = False,
        sum_refs: tuple[Ref, ...] = (),
        last_ds: Tile | None = None,
        last_stage: Scalar | None = None,
    ) -> Tile:
        """Return dS of a tile without the scale, and issue dQ += dS K of the previous tile.

        Args:
            tile: The tile.
            operands: Queries and dO of the rows.
            row_stats: Statistics of the rows.
            step: Step of the tile.
            is_first: Whether it is the rows' first tile. Static.
            sum_refs: Accumulators of dQ; empty if the previous tile's dQ is complete.
            last_ds: dS of the previous tile, if there are accumulators.
            last_stage: Stage of its keys.
        """
        head, num_dq_products = self.spec.shape.head, len(sum_refs)
        stage, value_stage = self.pipeline.stage(step), self.pipeline.value_stage(step)
        keys, values = self.pipeline.keys.tiles, self.pipeline.values
        # Wait for the keys, and zero invisible ones: a gradient of 0 does not hide their NaNs from dQ.
        self.keys.wait(tile, step, is_first=is_first)

        def issue_scores(s_ref: Ref) -> None:
            for chunk in range(head.num_chunks):
                plgpu.wgmma(s_ref, operands.query.at[chunk], keys.at[stage, chunk].T)

        def issue_dp(dp_ref: Ref) -> None:
            for chunk in range(head.num_chunks):
                plgpu.wgmma(dp_ref, operands.dout.at[chunk], values.tiles.at[value_stage, chunk].T)

        def products(s_ref: Ref, dp_ref: Ref) -> Tile:
            # S first, so that it runs while the values are awaited.
            issue_scores(s_ref)
            plgpu.barrier_wait(values.full.at[value_stage])
            issue_dp(dp_ref)
            # dQ of the previous tile last: nothing waits for it before the next step.
            for chunk, ref in enumerate(sum_refs):
                plgpu.wgmma(ref, last_ds, keys.at[last_stage, chunk])
            # The mask's data comes from global memory: load it while the products are in flight.
            loaded = self.scores.load(tile)
            # Wait for S but neither for dP nor for dQ: P is computed meanwhile.
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=head.num_chunks + num_dq_products)
            weights = self.scores.weights(lax.optimization_barrier(s), row_stats, tile, loaded)
            # Wait for dP but not for dQ: dS is computed meanwhile.
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=num_dq_products))
            # Release the values: dP has read them.
            plgpu.barrier_arrive(values.free.at[value_stage])
            return self.scores.ds(weights, dp, row_stats, tile)

        if not self.spec.is_interpreted:
            return pl.run_scoped(products, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)
        s = run_mma(self.spec.s_shape, issue_scores)
        weights = self.scores.weights(s, row_stats, tile, self.scores.load(tile))
        plgpu.barrier_wait(values.full.at[value_stage])
        dp = run_mma(self.spec.s_shape, issue_dp)
        plgpu.barrier_arrive(values.free.at[value_stage])
        return self.scores.ds(weights, dp, row_stats, tile)

    def add_dq(self, state: DqState, step: Scalar) -> tuple[Tile, ...]:
        """Return the sums with dS K of the last tile, whose keys are those of `step`."""
        stage, keys = self.pipeline.stage(step), self.pipeline.keys
        if self.spec.is_interpreted:  # no running accumulators, and no operands in registers
            ds_s = self.smem.attention.p.at[self.wg]
            ds_s[...] = state.ds
            plgpu.commit_smem()

            def product(chunk: int, acc: Tile) -> Tile:
                key_s = keys.tiles.at[stage, chunk]
                return acc + run_mma(self.spec.acc_shape, lambda ref: plgpu.wgmma(ref, ds_s, key_s))

            sums = tuple(product(chunk, acc) for chunk, acc in enumerate(state.sums))
        else:

            def issue(refs: tuple[Ref, ...]) -> None:
                for chunk, ref in enumerate(refs):
                    plgpu.wgmma(ref, state.ds, keys.tiles.at[stage, chunk])

            sums = tuple(pl.run_state(issue)(tuple(plgpu.ACC.init(acc) for acc in state.sums)))
        plgpu.barrier_arrive(keys.free.at[stage])
        return sums

    def compute_delta(self, operands: DqOperands, step: Scalar) -> Tile:
        """Return the row sums of O * dO. Step `step` of the pipeline holds O in place of keys and values."""
        for buffers, stage, _ in self.pipeline.kv_stages(step):
            plgpu.barrier_wait(buffers.full.at[stage])

        def row_sum(rank: int) -> Tile:
            buffers, stage, _ = self.pipeline.kv_stages(step)[rank]
            products = [
                plgpu.load(buffers.tiles.at[stage, chunk], layout=WGMMA).astype(f32)
                * plgpu.load(operands.dout.at[chunk], layout=WGMMA).astype(f32)
                for chunk in range(self.spec.shape.head.num_chunks)
            ]
            return sum(products[1:], start=products[0]).sum(axis=1)

        # The first warpgroup's outputs are in a stage of keys, the second's in one of values. Those of a team
        # of one warpgroup are in both.
        if self.spec.sizes.team_size == 1:
            delta = row_sum(0)
        else:
            delta = lax.cond(self.rank == 0, lambda: row_sum(0), lambda: row_sum(1))
        # All threads must have read the stages before TMA refills them.
        plgpu.commit_smem()
        for buffers, stage, _ in self.pipeline.kv_stages(step):
            plgpu.barrier_arrive(buffers.free.at[stage])
        return delta

    def load_row_stats(self, rows: QueryRows, buffer: Scalar, output_step: Scalar) -> RowStats:
        """Return the row statistics of a work tile's rows, including rows of other requests or of none.

        If delta is computed here, it is stored for the dk/dv kernel as well. Work tiles that share a row
        store the same value.

        Args:
            rows: Query rows of the warpgroup.
            buffer: Index of the buffer that holds their dO.
            output_step: Step that carries their output, if delta is computed from it.
        """
        stats_g = self.inputs.row_stats
        work_tile, first = rows.work_tile, rows.work_tile["first_row"] + rows.rank * WARPGROUP_ROWS

        lse = load_row_stat(stats_g, rows, LSE)
        if self.inputs.out is None:
            return RowStats(lse, load_row_stat(stats_g, rows, DELTA))
        # Load before computing delta, so that the loads are in flight meanwhile.
        grad_lse = 0.0 if stats_g.shape[1] == NUM_ROW_STATS else load_row_stat(stats_g, rows, GRAD_LSE)
        delta = self.compute_delta(self.operands(rows, buffer), output_step) - grad_lse
        stats_g[work_tile.head, DELTA, pl.ds(first, WARPGROUP_ROWS)] = delta
        return RowStats(lse, delta)
