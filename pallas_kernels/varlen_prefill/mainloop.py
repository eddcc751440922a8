"""The main loop of a computing warpgroup: 64 query rows of each work tile, over all of their keys.

It issues S = Q K^T of a tile of keys together with O += P V of the previous tile, and computes the softmax of
S while P V is in flight.
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
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.masking import Masking, ValueTiles
from pallas_kernels.varlen_prefill.mma import InterpretedPrefillMma, PrefillMma
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, QueryBuffers
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillInputs, PrefillOutputs, PrefillSmem
from pallas_kernels.varlen_prefill.softmax import Softmax, SoftmaxState, SoftmaxStep, full_rows
from pallas_kernels.varlen_prefill.spec import COLUMN, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler


class PrefillMainloop:
    """Attention of one computing warpgroup: 64 query rows of each work tile of its team."""

    def __init__(
        self,
        inputs: PrefillInputs,
        outputs: PrefillOutputs,
        smem: PrefillSmem,
        barriers: PrefillBarriers,
        *,
        spec: PrefillSpec,
        queries: QueryBuffers,
    ):
        # The same number as in `queries`, read again: sharing it would change the addresses that were
        # measured.
        self.wg = wg = lax.axis_index("warpgroup")
        # The warpgroups of a team share a work tile: 64 rows each, from rank * 64 on.
        self.team, self.rank = (wg * 0, wg) if spec.sizes.teams == 1 else (wg, wg * 0)
        self.inputs, self.outputs, self.smem, self.spec = inputs, outputs, smem, spec
        self.pipeline, self.queries = KvPipeline(smem, barriers, spec.sizes, self.team), queries
        self.bias = Bias(smem.alibi, self.columns, wg, spec)
        self.masking, self.softmax = Masking(inputs.mask, self.columns, spec), Softmax(spec)
        self.values = ValueTiles(self.pipeline, spec)
        if spec.is_interpreted:
            self.mma: PrefillMma = InterpretedPrefillMma(self.pipeline, smem.p.at[wg], spec)
        else:
            self.mma = PrefillMma(self.pipeline, self.bias.operands, spec)

    def columns(self) -> Tile:
        """Return the index of each key within its tile, f32."""
        # Loaded at each use; otherwise the compiler keeps all of them in registers.
        column = plgpu.load(self.smem.columns.at[self.wg], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, self.spec.s_shape, [1])

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)
        # Column indices and the ALiBi operand are the same for all work tiles.
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.columns[self.queries.wg] = columns.astype(f32)
        self.bias.store_columns(self.queries.wg)
        plgpu.commit_smem()

        def compute(iteration: Scalar, step: Scalar) -> Scalar:
            # Wait for the queries, with which the work tile's columns arrive.
            buffer = self.queries.buffer(iteration)
            plgpu.barrier_wait(self.queries.full.at[self.queries.barrier(buffer)])
            work_tile = scheduler.read_from_smem(tile_index(iteration), self.queries.columns.at[buffer])
            rows = QueryRows(work_tile, self.rank, self.inputs.slopes, self.spec)
            self.compute_work_tile(rows, buffer, iteration, step)
            return step + work_tile.num

        lax.fori_loop(0, rounds, compute, jnp.int32(0) * rounds)
        # Shared memory must not be given up before the last outputs have left it.
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(self, rows: QueryRows, buffer: Scalar, iteration: Scalar, step: Scalar) -> None:
        """Compute and store the rows of a work tile.

        Args:
            rows: Query rows of the warpgroup: positions, tile and row offsets.
            buffer: Index of the buffer that holds the queries.
            iteration: Number of work tiles that the team processed before.
            step: Step of the work tile's first KV tile.
        """
        queries, work_tile = self.queries, rows.work_tile
        num_chunks = self.spec.shape.head.num_chunks
        if rows.slope is not None:
            self.bias.store_slope(rows.slope)

        def release_previous() -> None:
            # With two buffers, the previous output leaves while this work tile's first scores are computed.
            if queries.num > 1:
                pl.when(iteration >= 1)(lambda: queries.release(iteration - 1))

        def attend() -> RowResults:
            return self.attend(rows, queries.query.at[buffer], step, release_previous)

        def skip() -> RowResults:
            # No valid rows or no keys: release all of the work tile's stages, as the team's barriers expect.
            release_previous()
            self.pipeline.skip(step, jnp.int32(0), work_tile.num)
            accs = tuple(plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W) for _ in range(num_chunks))
            return RowResults(accs, full_rows(-jnp.inf), full_rows(0.0))

        self.store(rows, buffer, lax.cond(rows.has_work(), attend, skip))
        if queries.num == 1:
            # With one buffer, the next work tile's queries wait until this output has left.
            queries.release(iteration)

    def attend(
        self, rows: QueryRows, q_s: Ref, step: Scalar, during_first_scores: Callable[[], None]
    ) -> RowResults:
        """Return the unnormalized results of rows over all of their keys.

        Args:
            rows: Query rows of the warpgroup.
            q_s: Queries of the rows in shared memory, [chunks, 64, width].
            step: Step of the work tile's first KV tile.
            during_first_scores: Function that is called while the first scores are being computed.
        """
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        begin, full_begin, full_end, end = rows.kv_tile_range()
        # Release tiles that are only for other warpgroups of the team: first those before these rows' tiles.
        if has_window and not has_lists:
            self.pipeline.skip(step, jnp.int32(0), begin)
        state = self.attend_first(rows, q_s, step, begin, during_first_scores)

        def attend_tiles(
            first_tile: Scalar, end_tile: Scalar, ends: MaskedEnds, state: SoftmaxState
        ) -> SoftmaxState:
            return lax.fori_loop(
                first_tile,
                end_tile,
                lambda i, state: self.attend_tile(rows, q_s, step, i, ends, state),
                state,
            )

        # One loop per kind of tile, so that full tiles are computed without any mask.
        if has_window or has_lists:
            state = attend_tiles(begin + 1, full_begin, MaskedEnds.BOTH, state)
        state = attend_tiles(full_begin, full_end, MaskedEnds.NONE, state)
        if not has_lists:
            state = attend_tiles(full_end, end, MaskedEnds.HIGH, state)
        row_sum = state.row_sum.sum(axis=1)
        # The last tile's values have arrived; zero what follows the request's end before P V reads them.
        self.values.clear_last(rows, end - 1, step + end - 1)
        accs = self.mma.add_values(state.accs, state.p, step + end - 1)
        # Then release the tiles after these rows' tiles.
        if not has_lists:
            self.pipeline.skip(step, end, rows.work_tile.num)
        return RowResults(accs, state.row_max, row_sum)

    def attend_first(
        self, rows: QueryRows, q_s: Ref, step: Scalar, first_tile: Scalar, during_scores: Callable[[], None]
    ) -> SoftmaxState:
        """Compute the scores and the softmax of the rows' first KV tile."""
        tile = rows.first_tile(first_tile)
        loaded = self.masking.load(tile)
        step = step + first_tile
        s, row_term = self.bias.apply(tile, self.mma.scores(q_s, step, during_scores))
        state = self.softmax.first_step(s, row_term, lambda s: self.masking.apply(tile, loaded, s))
        # The next step issues P V with these values, so they must have arrived and been cleared.
        self.values.wait_first(tile, step)
        return state

    def attend_tile(
        self, rows: QueryRows, q_s: Ref, step: Scalar, i: Scalar, masked_ends: MaskedEnds, state: SoftmaxState
    ) -> SoftmaxState:
        """Compute the scores of KV tile i together with P V of the previous tile, and the softmax."""
        step = step + i
        tile = rows.tile(i, masked_ends)

        def softmax(s: Tile, loaded: LoadedMask, before_exponentials: Callable[[], None]) -> SoftmaxStep:
            s, row_term = self.bias.apply(tile, s)
            return self.softmax.step(
                s,
                row_term,
                lambda s: self.masking.apply(tile, loaded, s),
                state.row_max,
                before_exponentials,
            )

        accs, new = self.mma.scores_and_values(
            q_s, step, state, self.softmax.empty_step(state.row_max),
            load_mask=lambda: self.masking.load(tile),
            softmax=softmax,
            wait_for_values=lambda: self.values.wait_next(tile, step),
        )  # fmt: skip
        # P V used the old row_max, so it is rescaled only now that it is complete.
        return self.softmax.add_step(accs, state.row_sum, new)

    def store(self, rows: QueryRows, buffer: Scalar, results: RowResults) -> None:
        """Store the output of rows, or their unnormalized results if they are a KV split."""
        buffers = self.queries.query.at[buffer], self.queries.out.at[buffer]

        def store_final() -> None:
            store_output(self.outputs, self.inputs.sinks, rows, results, *buffers)

        split_outputs = self.outputs.split_outputs
        if split_outputs is None:
            store_final()
        else:
            index = rows.work_tile["split_output"]
            lax.cond(index < 0, store_final, lambda: store_split_output(split_outputs, index, rows, results))
