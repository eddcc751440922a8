"""The dk/dv kernels for GPUs without wgmma, after FlashAttention-2: each warp owns 16 keys.

Two warpgroups compute dK and dV of a work tile, 64 keys each, and load by cp.async what they need; there are
no other warps. Where shared memory holds only 64 keys, there is one warpgroup. dQ has a kernel of its own
(warp_dq_kernel.py). A step is a query tile of one of the group's heads. With two stages of queries and dO
(s = n % stages), one wait per step is enough:

    wait for queries and dO of step n, and for all warps  so all warps have read those of step n - 1:
    dP^T = V dO^T
    start to load queries and dO of step n + 1            into their stages
    S^T = K Q^T; P^T = 2^(S^T - LSE); dS^T = P^T (dP^T - delta)
    dV += P^T dO
    dK += dS^T Q

With one stage, queries are loaded during dP, and the next dO during dK:

    wait for dO of step n, and for all warps              so all warps have read the queries of step n - 1:
    start to load queries of step n
    dP^T = V dO^T
    wait for the queries of step n
    S^T = K Q^T; P^T = 2^(S^T - LSE); dS^T = P^T (dP^T - delta)
    dV += P^T dO
    wait for all warps                                    so all warps have read dO:
    start to load dO of step n + 1
    dK += dS^T Q

Heads wider than 128 leave no registers for both dK and dV: then one kernel computes S, dP and dK, and another
S and dV. With one stage, the next dO is loaded during S and dK, or the next queries during dV.

Products are those of ptx/tile_mma.py. Masks, scores, the schedule and the lists are those of the kernels with
wgmma (dkdv_kernel.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ptx.stores import store_token_rows
from pallas_kernels.ptx.tile_mma import multiply_chunks, multiply_registers
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.types import Barriers, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_mainloop import DkDvSums, clear_invalid_queries, zero_sums
from pallas_kernels.varlen_backward.dkdv_scores import DkDvScores, QueryTile
from pallas_kernels.varlen_backward.dkdv_spec import DkDvSpec
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import (
    DkDvTileScheduler,
    DkDvWorkTile,
    entry_tile,
    is_needed_by,
)
from pallas_kernels.varlen_backward.refs import DkDvInputs, DkDvOutputs, WarpDkDvSmem
from pallas_kernels.varlen_backward.warp_dkdv_loader import NextStep, WarpQueryPipeline


def warp_dkdv_body(
    inputs: DkDvInputs,
    outputs: DkDvOutputs,
    smem: WarpDkDvSmem,
    barrier: Barriers,
    *,
    ctas: int,
    spec: DkDvSpec,
) -> None:
    """Run one thread block, all of whose warps load and compute."""
    scheduler = DkDvTileScheduler(inputs.schedule, ctas, spec)
    WarpDkDvMainloop(inputs, outputs, smem, barrier, spec).run(scheduler)


class WarpDkDvState(NamedTuple):
    """State between two steps of a work tile.

    Attributes:
        sums: dK without the softmax scale, and dV; one f32 [64, width] tile per chunk of the head each.
        next_step: The next step, whose dO is being loaded.
    """

    sums: DkDvSums
    next_step: NextStep


class WarpDkDvMainloop:
    """Main loop of one warpgroup: dk and dv of 64 of a work tile's keys."""

    def __init__(
        self,
        inputs: DkDvInputs,
        outputs: DkDvOutputs,
        smem: WarpDkDvSmem,
        barrier: Barriers,
        spec: DkDvSpec,
    ):
        self.rank = lax.axis_index("warpgroup") if spec.sizes.warpgroups > 1 else jnp.int32(0)
        self.inputs, self.outputs, self.smem, self.spec = inputs, outputs, smem, spec
        self.pipeline = WarpQueryPipeline(inputs, smem, barrier, spec, self.rank)
        columns_s = smem.stats_and_columns.at[self.rank * 0 + spec.sizes.stages, self.rank]
        self.scores = DkDvScores(inputs.mask, inputs.score_mod, columns_s, self.rank, spec)

    def run(self, scheduler: DkDvTileScheduler) -> None:
        """Compute all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)
        self.scores.store_column_indices()

        @pl.loop(0, rounds)
        def _(iteration: Scalar) -> None:
            index = tile_index(iteration)
            self.pipeline.load_table_row(scheduler.work_tile(index).row)
            work_tile = scheduler.work_tile(index, self.smem.table_row)
            self.store(work_tile, self.compute_work_tile(work_tile))

    def compute_work_tile(self, work_tile: DkDvWorkTile) -> DkDvSums:
        """Return dk and dv of the warpgroup's keys."""
        first_step = self.pipeline.first_step_from(work_tile, jnp.int32(0))
        self.pipeline.start(work_tile, first_step)

        def compute_head(index: Scalar, carry: tuple[Scalar, WarpDkDvState]) -> tuple[Scalar, WarpDkDvState]:
            step, state = carry
            head, steps = work_tile.head(index), work_tile.steps(index)
            slope = None if self.inputs.slopes is None else self.inputs.slopes[head]
            next_head = self.pipeline.first_step_from(work_tile, index + 1)

            def compute_step(is_masked: bool) -> Callable[[Scalar, WarpDkDvState], WarpDkDvState]:
                def compute(i: Scalar, state: WarpDkDvState) -> WarpDkDvState:
                    entry = state.next_step.entry
                    # With lists, entries are in global memory: read the next one during this step.
                    is_last = i + 1 >= steps.num_steps
                    next_entry = steps.entry(jnp.minimum(i + 1, steps.num_steps - 1))
                    next_step = NextStep(
                        jnp.where(is_last, next_head.head, head),
                        jnp.where(is_last, next_head.entry, next_entry),
                        jnp.where(is_last, next_head.exists, 1),
                    )
                    tile = QueryTile(work_tile, head, (entry_tile(entry),), slope, is_masked)
                    sums = self.compute_step(tile, entry, step + i, next_step, state.sums)
                    return WarpDkDvState(sums, next_step)

                return compute

            # Partial tiles come first; full ones are computed without any mask.
            state = lax.fori_loop(0, steps.num_masked, compute_step(True), state)
            state = lax.fori_loop(steps.num_masked, steps.num_steps, compute_step(False), state)
            return step + steps.num_steps, state

        carry = jnp.int32(0), WarpDkDvState(zero_sums(self.spec), first_step)
        _, state = lax.fori_loop(0, self.spec.group, compute_head, carry)
        return state.sums

    def compute_step(
        self, tile: QueryTile, entry: Scalar, step: Scalar, next_step: NextStep, sums: DkDvSums
    ) -> DkDvSums:
        """Add a query tile to dk and dv, or only take part in the loads if no key is visible.

        Args:
            tile: The query tile.
            entry: Its entry of the list, or its index without lists.
            step: Number of the step in the work tile.
            next_step: The step after it, whose tiles are loaded.
            sums: dk and dv so far.
        """
        if not self.spec.has_warpgroup_bits:
            return self.add_tile(tile, step, next_step, sums)

        def skip() -> DkDvSums:
            stage = self.pipeline.wait_first(tile, step)
            self.pipeline.wait_second(tile, stage, next_step)
            self.pipeline.release_first(tile, stage, next_step)
            return sums

        is_needed = is_needed_by(self.rank, entry)
        return lax.cond(is_needed, lambda: self.add_tile(tile, step, next_step, sums), skip)

    def add_tile(self, tile: QueryTile, step: Scalar, next_step: NextStep, sums: DkDvSums) -> DkDvSums:
        """Add a query tile to dk and dv; see compute_step for the arguments."""
        smem, pipeline, scores, computes = self.smem, self.pipeline, self.scores, self.spec.computes
        # The mask's data comes from global memory: load it before anything is awaited.
        loaded = scores.load(tile)
        stage = pipeline.wait_first(tile, step)
        queries_s, dout_s, stats_s = (
            stages.at[stage] for stages in (smem.query, smem.dout, smem.stats_and_columns)
        )
        # The compiler computes the addresses of keys and values in each step instead of keeping them in
        # registers, because they depend on a 0 that it cannot treat as a constant.
        rank = self.rank + tile.work_tile["zero"]
        dk, dv = sums
        if not computes.dk:
            s = multiply_chunks(smem.key.at[rank], queries_s, is_interpreted=self.spec.is_interpreted)
            p = scores.probabilities(s, scores.lse(stats_s, tile), tile, loaded).p
            pipeline.wait_second(tile, stage, next_step)
            self.clear_queries(tile, dout_s)
            return DkDvSums(dk, self.add_product(dv, p, dout_s))
        if computes.dv:
            self.clear_queries(tile, dout_s)
        dp = multiply_chunks(smem.value.at[rank], dout_s, is_interpreted=self.spec.is_interpreted)
        pipeline.wait_second(tile, stage, next_step)
        self.clear_queries(tile, queries_s)
        s = multiply_chunks(smem.key.at[rank], queries_s, is_interpreted=self.spec.is_interpreted)
        probabilities = scores.probabilities(s, scores.lse(stats_s, tile), tile, loaded)
        ds = scores.ds(probabilities, dp, scores.delta(stats_s))
        if computes.dv:
            dv = self.add_product(dv, probabilities.p, dout_s)
        pipeline.release_first(tile, stage, next_step)
        return DkDvSums(self.add_product(dk, ds, queries_s), dv)

    def add_product(self, sums: tuple[Tile, ...], rows: Tile, queries_s: Ref) -> tuple[Tile, ...]:
        """Return the sums plus `rows` [64, tile_q] times a tile of queries or of dO."""
        return tuple(
            multiply_registers(acc, rows, queries_s.at[chunk], is_interpreted=self.spec.is_interpreted)
            for chunk, acc in enumerate(sums)
        )

    def clear_queries(self, tile: QueryTile, tile_s: Ref) -> None:
        """Zero queries, or their dO, outside of the request in a tile that needs a mask."""
        if tile.is_masked:
            # Pallas makes the warpgroup wait after each store, and every warpgroup stores all zeros.
            clear_invalid_queries(tile, tile_s, fence=lambda: None)

    def store(self, work_tile: DkDvWorkTile, sums: DkDvSums) -> None:
        """Store dk and dv of the warpgroup's keys from registers."""
        head = self.spec.head
        first_row = work_tile["first_key_row"] + self.rank * WARPGROUP_ROWS
        begin, end = (
            jnp.clip(work_tile[name] - self.rank * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)
            for name in ("store_begin", "store_end")
        )
        for grad_g, accs, scale in (
            (self.outputs.dk, sums.dk, self.spec.score.scale),
            (self.outputs.dv, sums.dv, 1.0),
        ):
            for chunk, acc in enumerate(accs):
                chunk_g = grad_g.at[:, :, chunk] if head.is_padded else grad_g
                store_token_rows(
                    chunk_g, acc * scale, work_tile.grad_head, first_row, begin, end,
                    tokens_per_head=WARPGROUP_ROWS, columns=head.chunk_dim,
                    is_interpreted=self.spec.is_interpreted,
                )  # fmt: skip
