"""What a warpgroup computes in the kernel of queries' gradients: 64 rows of its items, through their keys."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dq_loader import DqKvPipeline, has_wide_heads
from pallas_kernels.varlen_backward.dq_mma import (
    DqCallbacks,
    DqOperands,
    DqState,
    mma_class,
)
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
    """One warpgroup."""

    def __init__(
        self, inputs: DqInputs, grad_query: Ref, smem: DqSmem, pipeline: PrefillBarriers, spec: PrefillSpec
    ):
        self.wg = wg = lax.axis_index("warpgroup")
        self.inputs, self.grad_query, self.smem, self.spec = inputs, grad_query, smem, spec
        self.queries = QueryBuffers(smem.attention, pipeline, spec.sizes, wg)
        self.ring, of_keys = (DqKvPipeline(smem.attention, pipeline, spec) for _ in range(2))
        # Here it is keys that a gradient of 0 is multiplied by.
        of_keys.values = of_keys.keys
        self.clear = ValueTiles(of_keys, spec)
        masking = Masking(inputs.attention.mask, self.columns, spec)
        self.scores = DqScores(inputs.stats, masking, spec)
        self.products = mma_class(spec)(
            self.ring, smem.attention.p.at[wg] if spec.is_interpreted else None, spec
        )

    def columns(self) -> Tile:
        """Number of each key in its tile, f32. Read, or the compiler keeps them all in registers."""
        column = plgpu.load(self.smem.attention.columns.at[self.wg], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, self.spec.s_shape, [1])

    def work_share(self, work: PrefillTileScheduler) -> None:
        """All items of the thread block."""
        rounds, number_of = work.rounds_of(0)
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.attention.columns[self.wg] = columns.astype(f32)
        plgpu.commit_smem()

        def take(nth: Scalar, step: Scalar) -> Scalar:
            buffer = self.queries.buffer(nth)
            plgpu.barrier_wait(self.queries.full.at[self.queries.barrier(buffer)])
            item = work.in_memory(number_of(nth), self.queries.columns.at[buffer])
            slopes = self.inputs.attention.slopes
            self.take_item(QueryRows(item, self.wg, slopes, self.spec), buffer, nth, step)
            return step + self.inputs.steps_before + item.num

        lax.fori_loop(0, rounds, take, jnp.int32(0) * rounds)
        plgpu.wait_smem_to_gmem(0)

    def take_item(self, rows: QueryRows, buffer: Scalar, nth: Scalar, step: Scalar) -> None:
        """The rows of an item, whose queries are in a buffer, and whose first keys are those of `step`."""
        queries = self.queries
        if queries.num > 1:
            pl.when(nth >= 1)(lambda: queries.release(nth - 1))

        def work() -> tuple[Tile, ...]:
            return self.grads_of(rows, buffer, step)

        def rest() -> tuple[Tile, ...]:
            self.ring.skip(step, jnp.int32(0), rows.item.num + self.inputs.steps_before)
            zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
            return tuple(zeros() for _ in range(self.spec.shape.cut.num_chunks))

        scale, dtype = self.spec.score.scale, self.spec.dtype
        grads = [(acc * scale).astype(dtype) for acc in lax.cond(rows.has_work(), work, rest)]
        store_rows(self.grad_query, rows, queries.query.at[buffer], queries.out.at[buffer], grads)
        if queries.num == 1:
            queries.release(nth)

    def here(self, rows: QueryRows, buffer: Scalar) -> DqOperands:
        """Rows in shared memory.

        Wide heads have more addresses for the tensor core than registers: these are made anew each step, of
        a 0 that the compiler does not know.
        """
        if has_wide_heads(self.spec):
            buffer = buffer + lax.shift_right_logical(rows.item["seq_len"], jnp.int32(31))
        return DqOperands(self.queries.query.at[buffer], self.smem.grad_out.at[self.wg, buffer])

    def grads_of(self, rows: QueryRows, buffer: Scalar, step: Scalar) -> tuple[Tile, ...]:
        """All keys of rows, which are in a buffer, and whose item's first are those of `step`."""
        begin, low_edge, high_edge, end = rows.share()
        of_outputs, step = step, step + self.inputs.steps_before
        expected = lambda: self.expected(self.here(rows, buffer), of_outputs)
        stats = self.scores.stats_of(rows, None if self.inputs.out is None else expected)
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        if has_window and not has_lists:
            self.ring.skip(step, jnp.int32(0), begin)
        first = rows.first_tile(begin)
        await_first = lambda: self.clear.await_first(first, step + begin)
        work = self.work(first, stats, await_first)
        state = self.products.start(self.here(rows, buffer), step + begin, work)

        def take(edges: MaskedEnds) -> Callable[[Scalar, DqState], DqState]:
            def take(i: Scalar, state: DqState) -> DqState:
                tile = rows.tile(i, edges)
                work = self.work(tile, stats, lambda: self.clear.await_next(tile, step + i))
                return self.products.take(self.here(rows, buffer), step + i, work, state)

            return take

        if has_window or has_lists:
            state = lax.fori_loop(begin + 1, low_edge, take(MaskedEnds.BOTH), state)
        state = lax.fori_loop(low_edge, high_edge, take(MaskedEnds.NONE), state)
        if not has_lists:
            state = lax.fori_loop(high_edge, end, take(MaskedEnds.HIGH), state)
        self.clear.clear_last(rows, end - 1, step + end - 1)
        grads = self.products.finish(step + end - 1, state)
        if not has_lists:
            self.ring.skip(step, end, rows.item.num)
        return grads

    def expected(self, here: DqOperands, step: Scalar) -> Tile:
        """The sum of outputs, which are where keys and values of a step are, times their gradients."""
        for stream, stage, _ in self.ring.stages(step):
            plgpu.barrier_wait(stream.full.at[stage])

        def of(rank: int) -> Tile:
            stream, stage, _ = self.ring.stages(step)[rank]
            as_f32 = lambda ref: plgpu.load(ref, layout=W).astype(f32)
            products = [
                as_f32(stream.tiles.at[stage, chunk]) * as_f32(here.grad_out.at[chunk])
                for chunk in range(self.spec.shape.cut.num_chunks)
            ]
            return sum(products[1:], start=products[0]).sum(axis=1)

        total = lax.cond(self.wg == 0, lambda: of(0), lambda: of(1))
        plgpu.commit_smem()
        for stream, stage, _ in self.ring.stages(step):
            plgpu.barrier_arrive(stream.free.at[stage])
        return total

    def work(self, tile: KvTile, stats: RowStats, await_keys: Callable[[], None]) -> DqCallbacks:
        """What is done between the products of a tile."""
        return DqCallbacks(
            await_keys=await_keys,
            stored=lambda: self.scores.masking.stored(tile),
            weights=lambda s, stored: self.scores.weights(s, stats, tile, stored),
            grad_scores=lambda weights, dp: self.scores.gradients(weights, dp, stats, tile),
        )
