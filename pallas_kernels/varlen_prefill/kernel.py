"""The prefill kernel: O = softmax(Q K^T) V of packed queries, 64 rows per warpgroup.

A persistent thread block processes work tiles (a query tile of one head, or of a few packed heads, with all
of its keys or one KV split), the longest first. One warpgroup loads, with one warp per team or, if tiles hold
several blocks, with two: one for queries and keys, one for values. The two or three warpgroups before it
compute, either as one team on the rows of one work tile or each as a team of its own. Both sides iterate over
the same work tiles (n; b = n % query_buffers) and KV tiles (i, over all work tiles of the team; s = i %
stages), and synchronize only through barriers:

    loading: warp t                      shared memory      computing: each warpgroup of team t
    ---------------                      -------------      -----------------------------------
    for each work tile n:                                   for each work tile n:
      its row of the schedule                                 wait q_full[b]
      for each KV tile i:                                     for each KV tile i:
        block ids, or entry of a list                           wait k_full[s]
        wait k_free[s]                                          issue S(i) = Q K(i)^T
        TMA: keys ---------------------> K [stages] ----------> issue O += P(i-1) V(i-1)
        if it is the first of n:                                await S(i)
          wait q_free[b]                                        arrive k_free[s]
          TMA: queries, the row -------> Q [buffers]            softmax: P(i), during P(i-1) V(i-1)
        wait v_free[s]                                          wait v_full[s], zero invisible values
        TMA: values -------------------> V [stages] ----------> await O
                                                                arrive v_free[s'], s' of tile i - 1
                                                                O *= alpha, if a row_max has changed
                                                              O += P V of the last tile, arrive v_free[s]
                                         Q [b] <------------- O / row_sum, in place of the queries
                                           TMA: --> out       lse --> global memory
                                                              arrive q_free[b] when it has left: during S
                                                              of work tile n + 1, or at once with one buffer

A `full` barrier completes when all TMA copies into its stage have landed. k_free and v_free complete when all
warpgroups of the team have arrived; Q, q_full and q_free belong to one warpgroup each. The first KV tile of a
work tile has only S; KV tiles that are not for a warpgroup's rows are released unread (KvPipeline.skip). The
result of a KV split goes from registers to global memory unnormalized, and combine.py merges the splits of a
query tile. Unlike in FlashAttention-3, the warpgroups do not issue in turn (ping-pong scheduling), which is 1
to 5 % slower here on an H200.

An 8-bit cache is loaded into stages of its own, and two more warpgroups, one for keys and one for values, sit
between both sides: they wait for an 8-bit stage and for a free stage of K or V, dequantize the one into the
other, and arrive where TMA does otherwise.

Modules: loader (left and middle, and the warpgroups that dequantize), this one (right), which calls softmax,
masking and epilogue. tile_scheduler says which tiles belong to whom, schedule which there are.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.warp_mma import WARPS
from pallas_kernels.score_mod import Lookups
from pallas_kernels.shared.layouts import COLUMN, WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, ScratchType, Tile, f32
from pallas_kernels.varlen_prefill.epilogue import RowResults, store_output, store_split_output
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.loader import Dequantizer, KvPipeline, PrefillLoader, QueryBuffers
from pallas_kernels.varlen_prefill.masking import Masking, ValueTiles
from pallas_kernels.varlen_prefill.softmax import (
    LANE_COLUMNS,
    Bias,
    choose_row_max_policy,
    full_rows,
    load_column_indices,
    probabilities,
    zero_accumulators,
)
from pallas_kernels.varlen_prefill.spec import (
    DEQUANTIZE_REGISTERS,
    PrefillBarriers,
    PrefillInputs,
    PrefillOutputs,
    PrefillSmem,
    PrefillSpec,
    barrier_types,
    smem_types,
    split_output_types,
    warp_barrier_types,
    warp_smem_types,
)
from pallas_kernels.varlen_prefill.tile_scheduler import (
    KvTile,
    MaskedEnds,
    PrefillTileScheduler,
    QueryRows,
    team_and_rank,
)
from pallas_kernels.varlen_prefill.warp_kernel import warp_prefill_body


def prefill(inputs: PrefillInputs, spec: PrefillSpec, num_tokens: int) -> PrefillOutputs:
    """Run the prefill kernel; `num_tokens` is the number of tokens without padding."""
    out = jax.ShapeDtypeStruct((num_tokens, *inputs.query.rows.shape[1:]), spec.dtype)
    lse = jax.ShapeDtypeStruct((spec.shape.q_heads, num_tokens), f32) if spec.returns_lse else None
    split_outputs = split_output_types(spec) if spec.has_splits else None
    body: Callable[..., None] = prefill_body
    scratch_types: tuple[ScratchType, ScratchType] = smem_types(spec), barrier_types(spec)
    compiler_params = plgpu.CompilerParams(approx_math=True)
    if spec.sizes.per_warp_mma:
        barrier = warp_barrier_types(spec.sizes.warpgroups, is_interpreted=spec.is_interpreted)
        body, scratch_types = warp_prefill_body, (warp_smem_types(spec), barrier)
        # Reductions over keys stay within a warp.
        compiler_params = dataclasses.replace(compiler_params, reduction_scratch_bytes=0)
    kernel = plgpu.kernel(
        functools.partial(body, spec=spec),
        out_type=(PrefillOutputs(out, lse, split_outputs),),
        scratch_types=scratch_types,
        grid=(spec.sizes.ctas,),
        grid_names=("cta",),
        num_threads=spec.num_warpgroups,
        thread_name="warpgroup",
        compiler_params=compiler_params,
        kernel_name="varlen_prefill",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def prefill_body(
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    smem: PrefillSmem,
    barriers: PrefillBarriers,
    *,
    spec: PrefillSpec,
) -> None:
    """Run one thread block: the first warpgroups compute, the next one loads, two more dequantize."""
    wg, num_computing = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    scheduler = PrefillTileScheduler(inputs.schedule, spec)

    @pl.when(wg == num_computing)
    def _() -> None:
        # The other warpgroups wait for these registers before they can take more.
        plgpu.set_max_registers(spec.load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            # Each team has its own loading warps, so that no team waits for another's stages. Stages of
            # several runs take many copies: two warps issue them, so that keys do not wait for a free stage
            # of values. Three teams would need more warps than there are.
            num_loaders = 2 if spec.runs_per_tile > 1 and 2 * spec.sizes.teams <= WARPS else 1
            for team, index in itertools.product(range(spec.sizes.teams), range(num_loaders)):
                loader = PrefillLoader(
                    inputs,
                    smem,
                    barriers,
                    spec,
                    team,
                    loads_keys=index == 0,
                    loads_values=index == num_loaders - 1,
                )
                pl.when(warp == num_loaders * team + index)(functools.partial(loader.load_all, scheduler))

    def run_dequantizer(index: int) -> None:
        plgpu.set_max_registers(DEQUANTIZE_REGISTERS, action="decrease")
        Dequantizer(inputs, smem, barriers, spec, index).run(scheduler)

    if spec.quantized is not None:
        for index in range(2):
            pl.when(wg == num_computing + 1 + index)(functools.partial(run_dequantizer, index))

    @pl.when(wg < num_computing)
    def _() -> None:
        plgpu.set_max_registers(spec.compute_registers, action="increase")
        queries = QueryBuffers(smem, barriers, spec.sizes, wg)
        PrefillMainloop(inputs, outputs, smem, barriers, spec=spec, queries=queries).run(scheduler)


class TileState(NamedTuple):
    """State of the online softmax, which does not yet include P V of the last tile.

    Attributes:
        accs: Accumulated P V, one per chunk of the head.
        row_sum: Partial sums of the probabilities of each row, one per thread: [64, LANE_COLUMNS].
        row_max: Number that is subtracted from the scores of each row.
        p: Probabilities of the last tile in 16 bits.
    """

    accs: tuple[Tile, ...]
    row_sum: Tile
    row_max: Rows
    p: Tile


class TileSoftmax(NamedTuple):
    """The softmax of one tile: its f32 probabilities and their sums, and the fields of ShiftedScores."""

    p: Tile
    row_sum: Tile
    row_max: Rows
    alpha: Rows
    needs_rescale: Scalar | None


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
        # Read again, although `queries` has it: with a shared value the compiler computes other addresses,
        # which were not measured.
        self.wg = wg = lax.axis_index("warpgroup")
        # The warpgroups of a team share a work tile: 64 rows each, from rank * 64 on.
        self.team, self.rank = team_and_rank(wg, spec.sizes.teams)
        self.inputs, self.outputs, self.smem, self.spec = inputs, outputs, smem, spec
        self.pipeline, self.queries = KvPipeline(smem, barriers, spec.sizes, self.team), queries
        self.bias = Bias(smem.alibi, self.column_indices, wg, spec, inputs.score_mod)
        self.masking, self.policy = Masking(inputs.mask, self.bias.columns, spec), choose_row_max_policy(spec)
        self.values = ValueTiles(self.pipeline.values, self.pipeline, spec)

    def column_indices(self) -> Columns:
        """Return the index of each key within its tile, f32 [tile_kv]."""
        return load_column_indices(self.smem.columns.at[self.wg])

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)
        # Column indices and the ALiBi operand are the same for all work tiles.
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.columns[self.queries.wg] = columns.astype(f32)
        self.bias.store_columns(self.queries.wg)
        plgpu.commit_smem()
        compute_work_tile = functools.partial(self.compute_work_tile, scheduler, tile_index)
        lax.fori_loop(0, rounds, compute_work_tile, jnp.int32(0) * rounds)
        # Shared memory must not be given up before the last outputs have left it.
        plgpu.wait_smem_to_gmem(0)

    def compute_work_tile(
        self,
        scheduler: PrefillTileScheduler,
        tile_index: Callable[[Scalar], Scalar],
        iteration: Scalar,
        step: Scalar,
    ) -> Scalar:
        """Compute and store the rows of a work tile, and return the step of the next work tile.

        Args:
            scheduler: Scheduler of the step.
            tile_index: Function that returns the index of a work tile of the team, see `assignment`.
            iteration: Number of work tiles that the team processed before.
            step: Step of the work tile's first KV tile.
        """
        queries = self.queries
        # Wait for the queries, with which the work tile's table row arrives.
        buffer = queries.buffer(iteration)
        plgpu.barrier_wait(queries.full.at[queries.barrier(buffer)])
        work_tile = scheduler.read_from_smem(tile_index(iteration), queries.table_row.at[buffer])
        rows = QueryRows(work_tile, self.rank, self.inputs.slopes, self.spec)
        if rows.slope is not None:
            self.bias.store_slope(rows.slope)

        def skip() -> RowResults:
            # No valid rows or no keys: release all of the work tile's stages, as the team's barriers expect.
            self.release_previous(iteration)
            self.pipeline.skip(step, jnp.int32(0), work_tile.num)
            return RowResults(
                zero_accumulators(self.spec),
                full_rows(WARPGROUP_ROWS, -jnp.inf),
                full_rows(WARPGROUP_ROWS, 0.0),
            )

        q_s, out_s = queries.query.at[buffer], queries.out.at[buffer]
        attend = functools.partial(self.attend, rows, q_s, step, iteration)
        results = lax.cond(rows.has_work(), attend, skip)
        # Store the output, in place of the queries, or the unnormalized results of a KV split.
        outputs = self.outputs
        store_final = functools.partial(
            store_output, outputs, self.inputs.sinks, rows, results, swizzled_s=q_s, plain_s=out_s
        )
        if outputs.split_outputs is None:
            store_final()
        else:
            index = work_tile["split_output"]
            store_split = functools.partial(store_split_output, outputs.split_outputs, index, rows, results)
            lax.cond(index < 0, store_final, store_split)
        if queries.num == 1:
            # With one buffer, the next work tile's queries wait until this output has left.
            queries.release(iteration)
        return step + work_tile.num

    def attend(self, rows: QueryRows, q_s: Ref, step: Scalar, iteration: Scalar) -> RowResults:
        """Return the unnormalized results of rows over all of their keys.

        Args:
            rows: Query rows of the warpgroup.
            q_s: Queries of the rows in shared memory, [chunks, 64, width].
            step: Step of the work tile's first KV tile.
            iteration: Number of work tiles that the team processed before.
        """
        has_lists, has_window = self.spec.has_lists, self.spec.has_window
        begin, full_begin, full_end, end = rows.kv_tile_range()
        # Release tiles that are only for other warpgroups of the team: first those before these rows' tiles.
        if has_window and not has_lists:
            self.pipeline.skip(step, jnp.int32(0), begin)
        # The rows' first KV tile, which has no P V beside it. It may contain both ends of the visible keys.
        tile, policy, first_step = rows.tile(begin, MaskedEnds.BOTH, is_first=True), self.policy, step + begin
        # The mask's data and lookups come from global memory: load them before the keys are awaited.
        loaded, lookups = self.masking.load(tile), self.bias.load(tile)
        s = self.scores(q_s, first_step, iteration)
        s, scaling = self.bias.apply(tile, s, lookups)
        row_max = full_rows(WARPGROUP_ROWS, policy.initial_row_max)
        s = self.masking.apply(tile, loaded, policy.prescale(s, scaling, row_max, is_first=True))
        shifted = policy.shift_scores(s, scaling, row_max, is_first=True)
        p, row_sum = probabilities(shifted.exponent)
        state = TileState(zero_accumulators(self.spec), row_sum, shifted.row_max, p.astype(self.spec.dtype))
        # The next step issues P V with these values, so they must have arrived and been cleared.
        self.values.wait(tile, first_step, is_first=True)
        # One loop per kind of tile, so that full tiles are computed without any mask.
        attend_tile = functools.partial(self.attend_tile, rows, q_s, step)
        if has_window or has_lists:
            attend_masked = functools.partial(attend_tile, MaskedEnds.BOTH)
            state = lax.fori_loop(begin + 1, full_begin, attend_masked, state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(attend_tile, MaskedEnds.NONE), state)
        if not has_lists:
            state = lax.fori_loop(full_end, end, functools.partial(attend_tile, MaskedEnds.HIGH), state)
        row_sum = state.row_sum.sum(axis=1)
        # The last tile's values have arrived; zero what follows the request's end before P V reads them.
        last, last_step = end - 1, step + end - 1
        if not has_lists:
            last_tile, stage = rows.tile(last, MaskedEnds.HIGH), self.pipeline.stage(last_step)
            self.values.clear(last_tile, stage, MaskedEnds.HIGH)
        accs = self.add_values(state, last_step)
        # Then release the tiles after these rows' tiles.
        if not has_lists:
            self.pipeline.skip(step, end, rows.work_tile.num)
        return RowResults(accs, state.row_max, row_sum)

    def attend_tile(
        self, rows: QueryRows, q_s: Ref, step: Scalar, masked_ends: MaskedEnds, i: Scalar, state: TileState
    ) -> TileState:
        """Add KV tile i: the main loop. P V of the previous tile runs during this tile's softmax.

        Args:
            rows: Query rows of the warpgroup.
            q_s: Queries of the rows in shared memory, [chunks, 64, width].
            step: Step of the work tile's first KV tile.
            masked_ends: Which ends of the visible keys the tile may contain. Static.
            i: Index of the KV tile in the work tile.
            state: State after the previous tile.
        """
        spec, policy, step = self.spec, self.policy, step + i
        tile = rows.tile(i, masked_ends)
        if spec.is_interpreted:
            return self.attend_tile_in_order(tile, q_s, step, state)
        zeros = plgpu.layout_cast(jnp.zeros(spec.s_shape, f32), WGMMA)
        empty = TileSoftmax(
            zeros,
            zeros[:, :LANE_COLUMNS],
            state.row_max,
            state.row_max,
            jnp.bool_(False) if policy.tests_rescale else None,
        )
        stage, previous = self.pipeline.stage(step), self.pipeline.stage(step - 1)
        keys, values = self.pipeline.keys, self.pipeline.values
        # Wait for the keys only: the previous tile's values were awaited in the previous step.
        plgpu.barrier_wait(keys.full.at[stage])

        def overlap(refs: tuple[tuple[Ref, ...], TileSoftmax]) -> None:
            acc_refs, softmax_refs = refs

            def products(s_ref: Ref) -> tuple[Tile, LoadedMask, Lookups | None]:
                # QK before PV: products complete in order, and the softmax of S overlaps with P V.
                self.issue_scores(s_ref, q_s, stage)
                self.issue_values(acc_refs, state.p, previous)
                # The mask's data and lookups come from global memory: load them while both products are in
                # flight.
                loaded, lookups = self.masking.load(tile), self.bias.load(tile)
                # Wait for S, but not for P V.
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=len(acc_refs)), loaded, lookups

            s, loaded, lookups = pl.run_scoped(products, plgpu.ACC(spec.s_shape, f32))
            s = lax.optimization_barrier(s)
            # Release the keys as soon as S is complete: the loading warp may refill their stage.
            plgpu.barrier_arrive(keys.free.at[stage])
            # Mask: after the bias, whose row term the policy adds, and before the maximum.
            s, scaling = self.bias.apply(tile, s, lookups)
            s = policy.prescale(s, scaling, state.row_max, is_first=False)
            s = self.masking.apply(tile, loaded, s)
            # Softmax: exponents first, because the vote on a new row_max is a branch.
            shifted = policy.shift_scores(s, scaling, state.row_max, is_first=False)
            if spec.waits_for_values_first:
                self.values.wait(tile, step)
                plgpu.wgmma_wait(0)
            p, row_sum = probabilities(shifted.exponent)
            softmax = TileSoftmax(p, row_sum, shifted.row_max, shifted.alpha, shifted.needs_rescale)
            for ref, result in zip(jax.tree.leaves(softmax_refs), jax.tree.leaves(softmax), strict=True):
                ref[...] = result
            # Wait for this tile's values, which the next step multiplies. Not earlier: the branch of this
            # wait keeps ptxas from waiting for P V before the softmax.
            if not spec.waits_for_values_first:
                self.values.wait(tile, step)

        # Leaving run_state waits for P V.
        accs, softmax = pl.run_state(overlap)((tuple([plgpu.ACC.init(acc) for acc in state.accs]), empty))
        # Release the previous tile's values: P V has read them.
        plgpu.barrier_arrive(values.free.at[previous])
        return self.rescaled(tuple(accs), state.row_sum, softmax)

    def attend_tile_in_order(self, tile: KvTile, q_s: Ref, step: Scalar, state: TileState) -> TileState:
        """Compute the same as `attend_tile` in interpret mode, one product after the other."""
        s = self.scores(q_s, step)
        accs = self.add_values(state, step - 1)
        s, scaling = self.bias.apply(tile, s, self.bias.load(tile))
        s = self.policy.prescale(s, scaling, state.row_max, is_first=False)
        s = self.masking.apply(tile, self.masking.load(tile), s)
        shifted = self.policy.shift_scores(s, scaling, state.row_max, is_first=False)
        p, row_sum = probabilities(shifted.exponent)
        softmax = TileSoftmax(p, row_sum, shifted.row_max, shifted.alpha, shifted.needs_rescale)
        self.values.wait(tile, step)
        return self.rescaled(accs, state.row_sum, softmax)

    def rescaled(self, accs: tuple[Tile, ...], row_sum: Tile, softmax: TileSoftmax) -> TileState:
        """Return the state after a tile: earlier sums rescaled, which P V computed with the old row_max."""
        sums = self.policy.rescale(softmax.alpha, softmax.needs_rescale, (*accs, row_sum))
        *accs_rescaled, row_sum = sums
        row_sum = row_sum + softmax.row_sum
        return TileState(tuple(accs_rescaled), row_sum, softmax.row_max, softmax.p.astype(self.spec.dtype))

    def issue_scores(self, s_ref: Ref, q_s: Ref, stage: Scalar) -> None:
        """Issue S += Q K^T, and the ALiBi bias if the tensor core adds it."""
        for chunk in range(self.spec.shape.head.num_chunks):
            plgpu.wgmma(s_ref, q_s.at[chunk], self.pipeline.keys.tiles.at[stage, chunk].T)
        if self.bias.operands is not None:
            plgpu.wgmma(s_ref, self.bias.operands.slopes, self.bias.operands.columns.T)

    def issue_values(self, acc_refs: tuple[Ref, ...], p: Ref, stage: Scalar) -> None:
        """Issue O += P V; P is in registers or, in interpret mode, in shared memory."""
        for chunk, acc_ref in enumerate(acc_refs):
            plgpu.wgmma(acc_ref, p, self.pipeline.values.tiles.at[stage, chunk])

    def scores(self, q_s: Ref, step: Scalar, iteration: Scalar | None = None) -> Tile:
        """Return Q K^T of a step; the output before work tile `iteration` leaves while it is in flight."""
        stage, keys = self.pipeline.stage(step), self.pipeline.keys
        plgpu.barrier_wait(keys.full.at[stage])

        def product(s_ref: Ref) -> Tile:
            self.issue_scores(s_ref, q_s, stage)
            if iteration is not None:
                self.release_previous(iteration)
            return s_ref[...]  # waits for the product

        s = pl.run_scoped(product, plgpu.ACC(self.spec.s_shape, f32))
        # The keys have been read: the loading warp may refill their stage.
        plgpu.barrier_arrive(keys.free.at[stage])
        return s

    def add_values(self, state: TileState, step: Scalar) -> tuple[Tile, ...]:
        """Return O + P V for the values of a step, which must have arrived and been cleared."""
        stage, free = self.pipeline.stage(step), self.pipeline.values.free
        if self.spec.is_interpreted:  # no running accumulators, and no operands in registers
            p_s = self.smem.p.at[self.wg]
            p_s[...] = state.p
            plgpu.commit_smem()

            def product(*refs: Ref) -> tuple[Tile, ...]:
                self.issue_values(refs, p_s, stage)
                return tuple(ref[...] for ref in refs)

            products = pl.run_scoped(product, *[plgpu.ACC(self.spec.acc_shape, f32)] * len(state.accs))
            accs = tuple([acc + x for acc, x in zip(state.accs, products, strict=True)])
        else:
            start = tuple([plgpu.ACC.init(acc) for acc in state.accs])
            add_product = functools.partial(self.issue_values, p=state.p, stage=stage)
            accs = tuple(pl.run_state(add_product)(start))
        plgpu.barrier_arrive(free.at[stage])
        return accs

    def release_previous(self, iteration: Scalar) -> None:
        """With two buffers, let the previous output leave; with one it has left already."""
        if self.queries.num > 1:
            pl.when(iteration >= 1)(functools.partial(self.queries.release, iteration - 1))
