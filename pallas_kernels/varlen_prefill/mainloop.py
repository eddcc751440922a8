"""What a warpgroup computes: 64 query rows of each of its team's items, through all of their keys.

It issues S = Q K^T of a tile of keys together with O += P V of the tile before and does the softmax of S
meanwhile.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_prefill.bias import Bias
from pallas_kernels.varlen_prefill.block_info import MaskedEnds, QueryRows
from pallas_kernels.varlen_prefill.epilogue import RowResults, store_output, store_split_output
from pallas_kernels.varlen_prefill.masking import LoadedMask, Masking, ValueTiles
from pallas_kernels.varlen_prefill.mma import InterpretedPrefillMma, PrefillMma
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, QueryBuffers
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillInputs, PrefillOutputs, PrefillSmem
from pallas_kernels.varlen_prefill.softmax import Softmax, SoftmaxState, SoftmaxStep, full_rows
from pallas_kernels.varlen_prefill.spec import COLUMN, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler


class PrefillMainloop:
    """One warpgroup."""

    def __init__(
        self,
        inputs: PrefillInputs,
        outputs: PrefillOutputs,
        smem: PrefillSmem,
        pipeline: PrefillBarriers,
        *,
        spec: PrefillSpec,
        queries: QueryBuffers,
    ):
        # The number that `queries` has, asked anew: one for both makes other addresses than those measured.
        self.wg = wg = lax.axis_index("warpgroup")
        # A team's warpgroups have the same item: 64 rows each, from rank * 64 on.
        self.team, self.rank = (wg * 0, wg) if spec.sizes.teams == 1 else (wg, wg * 0)
        self.inputs, self.outputs, self.smem, self.spec = inputs, outputs, smem, spec
        self.ring, self.queries = KvPipeline(smem, pipeline, spec.sizes, self.team), queries
        self.bias = Bias(smem.alibi, self.columns, wg, spec)
        self.masking, self.softmax = Masking(inputs.mask, self.columns, spec), Softmax(spec)
        self.values = ValueTiles(self.ring, spec)
        if spec.is_interpreted:
            self.products: PrefillMma = InterpretedPrefillMma(self.ring, smem.p.at[wg], spec)
        else:
            self.products = PrefillMma(self.ring, self.bias.operands, spec)

    def columns(self) -> Tile:
        """Number of each key in its tile, f32. Read, or the compiler keeps them all in registers."""
        column = plgpu.load(self.smem.columns.at[self.wg], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, self.spec.s_shape, [1])

    def attend_share(self, work: PrefillTileScheduler) -> None:
        """All items of the team."""
        rounds, number_of = work.rounds_of(self.team)
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.columns[self.queries.wg] = columns.astype(f32)
        self.bias.store_columns(self.queries.wg)
        plgpu.commit_smem()

        def attend(nth: Scalar, step: Scalar) -> Scalar:
            buffer = self.queries.buffer(nth)
            plgpu.barrier_wait(self.queries.full.at[self.queries.barrier(buffer)])
            item = work.in_memory(number_of(nth), self.queries.columns.at[buffer])
            self.attend_item(QueryRows(item, self.rank, self.inputs.slopes, self.spec), buffer, nth, step)
            return step + item.num

        lax.fori_loop(0, rounds, attend, jnp.int32(0) * rounds)
        plgpu.wait_smem_to_gmem(0)

    def attend_item(self, rows: QueryRows, buffer: Scalar, nth: Scalar, step: Scalar) -> None:
        """The rows of an item, whose queries are in a buffer, and whose first keys are those of `step`."""
        queries, item, chunks = self.queries, rows.item, self.spec.shape.cut.num_chunks
        if rows.slope is not None:
            self.bias.store_slope(rows.slope)

        def release_last() -> None:
            if queries.num > 1:
                pl.when(nth >= 1)(lambda: queries.release(nth - 1))

        def work() -> RowResults:
            return self.attend(rows, queries.query.at[buffer], step, release_last)

        def rest() -> RowResults:
            release_last()
            self.ring.skip(step, jnp.int32(0), item.num)
            zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
            return RowResults(tuple(zeros() for _ in range(chunks)), full_rows(-jnp.inf), full_rows(0.0))

        self.store(rows, buffer, lax.cond(rows.has_work(), work, rest))
        if queries.num == 1:
            queries.release(nth)

    def attend(self, rows: QueryRows, q_s: Ref, step: Scalar, meanwhile: Callable[[], None]) -> RowResults:
        """All keys of rows, whose item's first are those of `step`.

        `meanwhile` is done beside the first scores.
        """
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        begin, low_edge, high_edge, end = rows.share()
        if has_window and not has_lists:
            self.ring.skip(step, jnp.int32(0), begin)
        state = self.attend_first(rows, q_s, step, begin, meanwhile)

        def attend_tiles(first: Scalar, end: Scalar, edges: MaskedEnds, state: SoftmaxState) -> SoftmaxState:
            attend_tile = lambda i, state: self.attend_tile(rows, q_s, step, i, edges, state)
            return lax.fori_loop(first, end, attend_tile, state)

        if has_window or has_lists:
            state = attend_tiles(begin + 1, low_edge, MaskedEnds.BOTH, state)
        state = attend_tiles(low_edge, high_edge, MaskedEnds.NONE, state)
        if not has_lists:
            state = attend_tiles(high_edge, end, MaskedEnds.HIGH, state)
        total = state.total.sum(axis=1)
        self.values.clear_last(rows, end - 1, step + end - 1)
        accs = self.products.add_values(state.accs, state.p, step + end - 1)
        if not has_lists:
            self.ring.skip(step, end, rows.item.num)
        return RowResults(accs, state.top, total)

    def attend_first(
        self, rows: QueryRows, q_s: Ref, step: Scalar, begin: Scalar, meanwhile: Callable[[], None]
    ) -> SoftmaxState:
        """The first tile that is for the rows: scores and softmax."""
        tile = rows.first_tile(begin)
        stored = self.masking.stored(tile)
        step = step + begin
        s, row_term = self.bias.added(tile, self.products.scores(q_s, step, meanwhile))
        state = self.softmax.first(s, row_term, lambda s: self.masking.applied(tile, stored, s))
        self.values.await_first(tile, step)
        return state

    def attend_tile(
        self, rows: QueryRows, q_s: Ref, step: Scalar, i: Scalar, edges: MaskedEnds, state: SoftmaxState
    ) -> SoftmaxState:
        """Scores of tile i, beside the values of the tile before, and their softmax meanwhile."""
        step = step + i
        tile = rows.tile(i, edges)

        def softmax(s: Tile, stored: LoadedMask, before_exponents: Callable[[], None]) -> SoftmaxStep:
            s, row_term = self.bias.added(tile, s)
            masked = lambda s: self.masking.applied(tile, stored, s)
            return self.softmax.step(s, row_term, masked, state.top, before_exponents)

        accs, new = self.products.both(
            q_s, step, state, self.softmax.empty_step(state.top),
            meanwhile=lambda: self.masking.stored(tile),
            softmax=softmax,
            await_values=lambda: self.values.await_next(tile, step),
        )  # fmt: skip
        return self.softmax.joined(accs, state.total, new)

    def store(self, rows: QueryRows, buffer: Scalar, attended: RowResults) -> None:
        """Rows behind all of their keys, or what a split brings."""
        buffers = self.queries.query.at[buffer], self.queries.out.at[buffer]

        def whole() -> None:
            store_output(self.outputs, self.inputs.sinks, rows, attended, *buffers)

        partials = self.outputs.partials
        if partials is None:
            whole()
        else:
            partial = rows.item["partial"]
            lax.cond(partial < 0, whole, lambda: store_split_output(partials, partial, rows, attended))
