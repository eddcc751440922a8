"""The main loop of a warpgroup of the dq kernel: 64 query rows of each work tile, over all of their keys."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dq_loader import DqKvPipeline, has_wide_heads
from pallas_kernels.varlen_backward.dq_mma import DqCallbacks, DqOperands, DqState, mma_class
from pallas_kernels.varlen_backward.dq_scores import DqScores, RowStats
from pallas_kernels.varlen_backward.refs import DqInputs, DqSmem
from pallas_kernels.varlen_prefill.block_info import KvTile, MaskedEnds, QueryRows
from pallas_kernels.varlen_prefill.epilogue import store_rows
from pallas_kernels.varlen_prefill.masking import Masking, ValueTiles
from pallas_kernels.varlen_prefill.pipeline import QueryBuffers
from pallas_kernels.varlen_prefill.refs import PrefillBarriers
from pallas_kernels.varlen_prefill.spec import COLUMN, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler


class DqMainloop:
    """Main loop of one warpgroup."""

    def __init__(self, inputs: DqInputs, dq: Ref, smem: DqSmem, barriers: PrefillBarriers, spec: PrefillSpec):
        self.wg = wg = lax.axis_index("warpgroup")
        self.inputs, self.dq, self.smem, self.spec = inputs, dq, smem, spec
        self.queries = QueryBuffers(smem.attention, barriers, spec.sizes, wg)
        self.pipeline, key_pipeline = (DqKvPipeline(smem.attention, barriers, spec) for _ in range(2))
        # dQ multiplies keys, as P V multiplies values: a gradient of 0 does not hide their NaNs.
        key_pipeline.values = key_pipeline.keys
        self.keys = ValueTiles(key_pipeline, spec)
        masking = Masking(inputs.attention.mask, self.columns, spec)
        self.scores = DqScores(inputs.row_stats, masking, spec)
        ds_s = smem.attention.p.at[wg] if spec.is_interpreted else None
        self.mma = mma_class(spec)(self.pipeline, ds_s, spec)

    def columns(self) -> Tile:
        """Return the index of each key within its tile, f32."""
        # Loaded at each use; otherwise the compiler keeps all of them in registers.
        column = plgpu.load(self.smem.attention.columns.at[self.wg], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, self.spec.s_shape, [1])

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.attention.columns[self.wg] = columns.astype(f32)
        plgpu.commit_smem()

        def compute(iteration: Scalar, step: Scalar) -> Scalar:
            # Wait for the queries, with which dO and the work tile's columns arrive.
            buffer = self.queries.buffer(iteration)
            plgpu.barrier_wait(self.queries.full.at[self.queries.barrier(buffer)])
            work_tile = scheduler.read_from_smem(tile_index(iteration), self.queries.columns.at[buffer])
            slopes = self.inputs.attention.slopes
            rows = QueryRows(work_tile, self.wg, slopes, self.spec)
            self.compute_work_tile(rows, buffer, iteration, step)
            return step + self.inputs.num_output_steps + work_tile.num

        lax.fori_loop(0, rounds, compute, jnp.int32(0) * rounds)
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(self, rows: QueryRows, buffer: Scalar, iteration: Scalar, step: Scalar) -> None:
        """Compute and store dq of a work tile's rows.

        Args:
            rows: Query rows of the warpgroup.
            buffer: Index of the buffer that holds their queries.
            iteration: Number of the work tile among those of the thread block.
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
            return tuple(
                plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
                for _ in range(self.spec.shape.head.num_chunks)
            )

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
        output_step, step = step, step + self.inputs.num_output_steps

        def delta() -> Tile:
            return self.compute_delta(self.operands(rows, buffer), output_step)

        row_stats = self.scores.load_row_stats(rows, None if self.inputs.out is None else delta)
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        # Release tiles that are only for the other warpgroup: first those before these rows' tiles.
        if has_window and not has_lists:
            self.pipeline.skip(step, jnp.int32(0), begin)
        first = rows.first_tile(begin)
        callbacks = self.callbacks(first, row_stats, lambda: self.keys.wait_first(first, step + begin))
        state = self.mma.first_step(self.operands(rows, buffer), step + begin, callbacks)

        def compute_tile(masked_ends: MaskedEnds) -> Callable[[Scalar, DqState], DqState]:
            def compute(i: Scalar, state: DqState) -> DqState:
                tile = rows.tile(i, masked_ends)
                callbacks = self.callbacks(tile, row_stats, lambda: self.keys.wait_next(tile, step + i))
                return self.mma.step(self.operands(rows, buffer), step + i, callbacks, state)

            return compute

        # One loop per kind of tile, so that full tiles are computed without any mask.
        if has_window or has_lists:
            state = lax.fori_loop(begin + 1, full_begin, compute_tile(MaskedEnds.BOTH), state)
        state = lax.fori_loop(full_begin, full_end, compute_tile(MaskedEnds.NONE), state)
        if not has_lists:
            state = lax.fori_loop(full_end, end, compute_tile(MaskedEnds.HIGH), state)
        # Zero keys after the request's end before dQ reads them.
        self.keys.clear_last(rows, end - 1, step + end - 1)
        dq = self.mma.finish(step + end - 1, state)
        # Then release the tiles after these rows' tiles.
        if not has_lists:
            self.pipeline.skip(step, end, rows.work_tile.num)
        return dq

    def compute_delta(self, operands: DqOperands, step: Scalar) -> Tile:
        """Return the row sums of O * dO. Step `step` of the pipeline holds O in place of keys and values."""
        for buffers, stage, _ in self.pipeline.kv_stages(step):
            plgpu.barrier_wait(buffers.full.at[stage])

        def row_sum(rank: int) -> Tile:
            buffers, stage, _ = self.pipeline.kv_stages(step)[rank]
            products = [
                plgpu.load(buffers.tiles.at[stage, chunk], layout=W).astype(f32)
                * plgpu.load(operands.dout.at[chunk], layout=W).astype(f32)
                for chunk in range(self.spec.shape.head.num_chunks)
            ]
            return sum(products[1:], start=products[0]).sum(axis=1)

        # The first warpgroup's outputs are in a stage of keys, the second's in one of values.
        delta = lax.cond(self.wg == 0, lambda: row_sum(0), lambda: row_sum(1))
        # All threads must have read the stages before TMA refills them.
        plgpu.commit_smem()
        for buffers, stage, _ in self.pipeline.kv_stages(step):
            plgpu.barrier_arrive(buffers.free.at[stage])
        return delta

    def callbacks(self, tile: KvTile, row_stats: RowStats, wait_for_keys: Callable[[], None]) -> DqCallbacks:
        """Return the functions that DqMma calls between the matrix products of a tile."""
        return DqCallbacks(
            wait_for_keys=wait_for_keys,
            load_mask=lambda: self.scores.masking.load(tile),
            weights=lambda s, loaded: self.scores.weights(s, row_stats, tile, loaded),
            score_grads=lambda weights, dp: self.scores.gradients(weights, dp, row_stats, tile),
        )
