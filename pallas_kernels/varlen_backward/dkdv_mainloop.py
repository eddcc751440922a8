"""What a warpgroup computes: gradients of its half of an item's keys and values, through all steps of it.

Of each step it adds its pieces of the queries' gradient to global memory, too.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.paged_kv import clear_masked_out
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT
from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_epilogue import store_valid_rows
from pallas_kernels.varlen_backward.dkdv_mma import (
    DkDvCallbacks,
    DkDvSums,
    DqTarget,
    Units,
    mma_class,
    store_units,
)
from pallas_kernels.varlen_backward.dkdv_scores import DkDvScores, QueryTile
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvOutputs, DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import DS_BUFFERS, BackwardSpec, W
from pallas_kernels.varlen_backward.tile_scheduler import BackwardTileScheduler, BackwardWorkTile, entry_tile


class DkDvState(NamedTuple):
    """What an item's steps so far came to; traced.

    Attributes:
        sums: Of keys and values.
        last: Whose the last step's gradients of scores are, which are multiplied beside the next step's; its
            row is negative before the first step. None where another kernel makes the gradient of queries.
    """

    sums: DkDvSums
    last: DqTarget | None


class DkDvMainloop:
    """One warpgroup."""

    def __init__(
        self,
        inputs: DkDvInputs,
        outputs: DkDvOutputs,
        smem: DkDvSmem,
        pipeline: DkDvBarriers,
        spec: BackwardSpec,
    ):
        self.wg = wg = lax.axis_index("warpgroup")
        self.inputs, self.outputs, self.smem, self.pipeline = inputs, outputs, smem, pipeline
        self.spec = spec
        columns_s = smem.stats_and_columns.at[wg * 0 + spec.grad_out_stages, wg]
        self.scores = DkDvScores(inputs.mask, columns_s, wg, spec)
        self.products = mma_class(spec)(smem, wg, spec)

    def work_share(self, work: BackwardTileScheduler) -> None:
        """All items of the thread block."""
        rounds, number_of = work.rounds()
        self.scores.store_columns()

        def attend(nth: Scalar, step: Scalar) -> Scalar:
            plgpu.barrier_wait(self.pipeline.kv_full)
            item = work.item(number_of(nth), self.smem.item)
            self._clear_keys(item)
            step, sums = self.grads_of(item, step)
            self.store(item, sums)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.pipeline.kv_free)
            return step

        lax.fori_loop(0, rounds, attend, rounds * 0)
        plgpu.wait_smem_to_gmem(0)

    def grads_of(self, item: BackwardWorkTile, step: Scalar) -> tuple[Scalar, DkDvSums]:
        """All steps of an item, from `step` on: the one behind, and the sums."""

        def of_head(nth: Scalar, carry: tuple[Scalar, DkDvState]) -> tuple[Scalar, DkDvState]:
            step, done = carry
            head, steps = item.head(nth), item.steps(nth)
            slope = self.slope(head)

            def of_tile(is_masked: bool) -> Callable[[Scalar, DkDvState], DkDvState]:
                def take(i: Scalar, done: DkDvState) -> DkDvState:
                    entry = steps.entry(i)
                    nth = entry_tile(entry) if self.spec.has_parts else entry
                    tile = QueryTile(item, head, nth, slope, is_masked)
                    if not self.spec.has_parts:
                        return self.take_step(tile, step + i, done)
                    is_seen = lax.shift_right_logical(entry, QUERY_BLOCK_SHIFT + self.wg) & 1 != 0
                    work = lambda: self.take_step(tile, step + i, done)
                    return lax.cond(is_seen, work, lambda: self.let_pass(step + i, done))

                return take

            done = lax.fori_loop(0, steps.num_masked, of_tile(True), done)
            done = lax.fori_loop(steps.num_masked, steps.num, of_tile(False), done)
            return step + steps.num, done

        nowhere = None
        if self.spec.adds_grad_query:
            nowhere = DqTarget(item.head(step * 0), step * 0 - 1)
            plgpu.barrier_arrive(self.pipeline.ds_full.at[previous_buffer(step)])  # awaited by the first step
        begin = DkDvState(self.products.zeros(), nowhere)
        step, (sums, last) = lax.fori_loop(0, self.spec.group, of_head, (step, begin))
        if last is not None:
            self.add_last_grad_query(item, last, step)
        return step, sums

    def slope(self, head: Scalar) -> Scalar | None:
        """ALiBi's of a query head, times log2(e)."""
        return None if self.inputs.slopes is None else self.inputs.slopes[head]

    def let_pass(self, step: Scalar, done: DkDvState) -> DkDvState:
        """A tile of queries that see none of the warpgroup's keys."""
        stages, pipeline = self.spec.stages_of(step), self.pipeline
        plgpu.barrier_wait(pipeline.q_full.at[stages.query])
        plgpu.barrier_wait(pipeline.do_full.at[stages.grad_out])
        plgpu.barrier_arrive(pipeline.do_free.at[stages.grad_out])
        plgpu.barrier_arrive(pipeline.q_free.at[stages.query])
        return done

    def take_step(self, tile: QueryTile, step: Scalar, done: DkDvState) -> DkDvState:
        """A tile of queries."""
        stages = self.spec.stages_of(step)
        buffer = lax.rem(step, jnp.int32(DS_BUFFERS))
        smem, pipeline = self.smem, self.pipeline
        stats_s, stored = smem.stats_and_columns.at[stages.grad_out], self.scores.stored(tile)
        last = done.last

        def arrived(full: Ref, tile_s: Ref, stage: Scalar) -> None:
            plgpu.barrier_wait(full.at[stage])
            if tile.is_masked:
                self.clear_queries(tile, tile_s.at[stage])

        def await_last_grad_query() -> None:
            if self.spec.adds_grad_query:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def exchange(ds: Tile) -> None:
            if last is not None:
                plgpu.barrier_wait(pipeline.ds_full.at[1 - buffer])
            if smem.grad_scores is not None:
                store_units(smem.grad_scores.at[buffer, self.wg], ds, self.spec)
                plgpu.commit_smem()

        def add_grad_query(dq: Units) -> None:
            assert last is not None
            plgpu.barrier_arrive(pipeline.ds_full.at[buffer])
            self.add_grad_query(last, dq)

        work = DkDvCallbacks(
            zero=tile.item["zero"],
            await_queries=lambda: arrived(pipeline.q_full, smem.query, stages.query),
            await_grad_out=lambda: arrived(pipeline.do_full, smem.grad_out, stages.grad_out),
            await_last_grad_query=await_last_grad_query,
            stats=lambda which: self.scores.stats(stats_s, which, tile),
            probabilities=lambda s, less: self.scores.probabilities(s, less, tile, stored),
            grad_scores=self.scores.gradients,
            exchange=exchange,
            release_grad_out=lambda: plgpu.barrier_arrive(pipeline.do_free.at[stages.grad_out]),
            add_grad_query=add_grad_query,
        )
        sums = self.products.step(done.sums, stages, buffer, work)
        plgpu.barrier_arrive(pipeline.q_free.at[stages.query])
        return DkDvState(sums, None if last is None else DqTarget(tile.head, tile.item.query_row(tile.nth)))

    def add_last_grad_query(self, item: BackwardWorkTile, last: DqTarget, step: Scalar) -> None:
        """Of an item's last step, which is the one before `step`."""
        buffer = previous_buffer(step)
        plgpu.barrier_wait(self.pipeline.ds_full.at[buffer])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.add_grad_query(last, self.products.grad_query(buffer, item["zero"]))

    def add_grad_query(self, place: DqTarget, dq: Units) -> None:
        """Adds the warpgroup's pieces to global memory; of rows that are not the request's they are 0."""
        if not self.spec.is_interpreted:
            for nth, piece in enumerate(dq):
                self.smem.grad_query[self.wg, nth] = piece
            plgpu.commit_smem()

        @pl.when(place.row >= 0)
        def _() -> None:
            for nth, piece in enumerate(dq):
                query_unit, unit = self.products.piece(nth)
                rows = pl.ds(pl.multiple_of(place.row + query_unit * UNIT, 8), UNIT)
                to = self.inputs.grad_query.at[place.head, unit, rows]
                if self.spec.is_interpreted:
                    to[...] = plgpu.load(to, layout=W, optimized=False) + piece
                else:
                    plgpu.copy_smem_to_gmem(self.smem.grad_query.at[self.wg, nth], to, reduction_op="add")

    def store(self, item: BackwardWorkTile, sums: DkDvSums) -> None:
        """Gradients of the keys and values, in the place of these; one alone in the place of the keys."""
        scale, dtype = self.spec.score.scale, self.spec.dtype
        of_key = tuple((acc * scale).astype(dtype) for acc in sums.key)
        of_value = tuple(acc.astype(dtype) for acc in sums.value)

        def store(grad_g: Ref, both: Ref, tiles: Units) -> None:
            (swizzled,), (plain,) = both
            store_valid_rows(
                grad_g, item, self.wg, swizzled.at[self.wg], plain.at[self.wg], tiles, spec=self.spec
            )

        makes, outputs = self.spec.makes, self.outputs
        if makes.key and makes.value:
            store(outputs.grad_value, self.smem.value_and_grad, of_value)
        # The other warpgroup multiplies these keys, too.
        plgpu.barrier_arrive(self.pipeline.kv_read)
        plgpu.barrier_wait(self.pipeline.kv_read)
        last = (outputs.grad_key, of_key) if makes.key else (outputs.grad_value, of_value)
        store(last[0], self.smem.key_and_grad, last[1])

    def _clear_keys(self, item: BackwardWorkTile) -> None:
        """Zeros for rows that are not the request's: a gradient of 0 hides no NaN."""
        begin, end = item["begin"], item["end"]

        @pl.when((begin > 0) | (end < WARPGROUPS * UNIT))
        def _() -> None:
            for wg in range(WARPGROUPS):
                self._clear(self.smem.key.at[wg], begin - wg * UNIT, end - wg * UNIT)
            plgpu.commit_smem()

    def clear_queries(self, tile: QueryTile, *tiles_s: Ref) -> None:
        """The same of queries, and of gradients of their outputs. Each warpgroup for itself."""
        begin, end = tile.live()

        @pl.when((begin > 0) | (end < self.spec.sizes.tile_q))
        def _() -> None:
            for tile_s, nth in itertools.product(tiles_s, range(self.spec.query_units)):
                here = tile_s.at[slice(None), pl.ds(nth * UNIT, UNIT)]
                self._clear(here, begin - nth * UNIT, end - nth * UNIT)
            plgpu.commit_smem()

    def _clear(self, unit_s: Ref, begin: Scalar, end: Scalar) -> None:
        row = lambda shape: plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=W)
        clear_masked_out(unit_s, pl.ds(0, UNIT), row, begin, end)


def previous_buffer(step: Scalar) -> Scalar:
    """The buffer of gradients of scores of the step before."""
    return lax.rem(step + 1, jnp.int32(DS_BUFFERS))
