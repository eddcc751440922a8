"""The prefill kernel for GPUs without wgmma, after FlashAttention-2: each warp owns 16 or 32 query rows.

One or two warpgroups compute the rows of a work tile, and load by cp.async what they need; there are no other
warps. For each KV tile i of a work tile (s = i % stages):

    wait for the keys of tile i, and for all warps        so all warps have read the values of tile i - 1:
    start to load values of tile i + stages - 1           into their stage
    S = Q K^T, bias, mask, softmax: P in registers
    wait for the values of tile i, and for all warps      so all warps have read the keys of tile i:
    start to load keys of tile i + stages                 into their stage
    zero invisible values, if it is a tile at an end
    O = O * alpha + P V

Products are those of ptx/tile_mma.py. Masks, bias, softmax, the schedule and the combine kernel are those of
the kernel with wgmma (kernel.py), which overlaps the softmax with products and is therefore another loop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.lane_sums import add_lanes, sum_lane_columns
from pallas_kernels.ptx.tile_mma import multiply_chunks, multiply_registers
from pallas_kernels.shared.layouts import COLUMN
from pallas_kernels.shared.types import Barriers, Columns, Rows, Scalar, Tile, f32
from pallas_kernels.varlen_prefill.epilogue import (
    RowResults,
    store_output_from_registers,
    store_split_output,
)
from pallas_kernels.varlen_prefill.masking import Masking, clear_invisible_values
from pallas_kernels.varlen_prefill.softmax import (
    Bias,
    choose_row_max_policy,
    full_rows,
    load_column_indices,
    zero_accumulators,
)
from pallas_kernels.varlen_prefill.spec import PrefillInputs, PrefillOutputs, PrefillSpec, WarpPrefillSmem
from pallas_kernels.varlen_prefill.tile_scheduler import (
    KvTile,
    MaskedEnds,
    PrefillTileScheduler,
    QueryRows,
)
from pallas_kernels.varlen_prefill.warp_loader import NextLoads, WarpPipeline


def warp_prefill_body(
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    smem: WarpPrefillSmem,
    barrier: Barriers,
    *,
    spec: PrefillSpec,
) -> None:
    """Run one thread block, all of whose warps load and compute."""
    WarpMainloop(inputs, outputs, smem, barrier, spec=spec).run(PrefillTileScheduler(inputs.schedule, spec))


class WarpTileState(NamedTuple):
    """State of the online softmax after a KV tile, and what is loaded next.

    Attributes:
        accs: Accumulated P V, one per chunk of the head.
        row_sum: Sum of the probabilities of each row that a lane holds, see `sum_lane_columns`.
        row_max: Number that is subtracted from the scores of each row.
        loads: State of the pipeline.
    """

    accs: tuple[Tile, ...]
    row_sum: Tile
    row_max: Rows
    loads: NextLoads


class WarpMainloop:
    """Attention of one warpgroup: its query rows of each work tile of the thread block."""

    def __init__(
        self,
        inputs: PrefillInputs,
        outputs: PrefillOutputs,
        smem: WarpPrefillSmem,
        barrier: Barriers,
        *,
        spec: PrefillSpec,
    ):
        self.wg = lax.axis_index("warpgroup") if spec.sizes.warpgroups > 1 else jnp.int32(0)
        self.inputs, self.outputs, self.smem, self.spec = inputs, outputs, smem, spec
        self.pipeline = WarpPipeline(inputs, smem, barrier, spec, self.wg)
        self.full_rows = functools.partial(full_rows, spec.s_shape[0])
        self.bias = Bias(None, self.column_indices, self.wg, spec, inputs.score_mod)
        self.masking, self.policy = Masking(inputs.mask, self.bias.columns, spec), choose_row_max_policy(spec)

    def column_indices(self) -> Columns:
        """Return the index of each key within its tile, f32 [tile_kv]."""
        return load_column_indices(self.smem.columns.at[self.wg])

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.smem.columns[self.wg] = columns.astype(f32)
        compute_work_tile = functools.partial(self.compute_work_tile, scheduler, tile_index)
        pl.loop(0, rounds)(compute_work_tile)

    def compute_work_tile(
        self, scheduler: PrefillTileScheduler, tile_index: Callable[[Scalar], Scalar], iteration: Scalar
    ) -> None:
        """Compute and store the rows of a work tile."""
        work_tile = scheduler.read_from_gmem(tile_index(iteration))
        rows = QueryRows(work_tile, self.wg, self.inputs.slopes, self.spec)
        loads = self.pipeline.start(work_tile)

        def skip() -> RowResults:
            # No valid rows or no keys: only take part in the loads.
            self.pipeline.skip(work_tile, jnp.int32(0), work_tile.num, loads)
            return RowResults(zero_accumulators(self.spec), self.full_rows(-jnp.inf), self.full_rows(0.0))

        results = lax.cond(rows.has_work(), functools.partial(self.attend, rows, loads), skip)
        # Store the output, or the unnormalized results of a KV split.
        outputs = self.outputs
        store_final = functools.partial(
            store_output_from_registers, outputs, self.inputs.sinks, rows, results
        )
        if outputs.split_outputs is None:
            store_final()
        else:
            index = work_tile["split_output"]
            store_split = functools.partial(store_split_output, outputs.split_outputs, index, rows, results)
            lax.cond(index < 0, store_final, store_split)

    def attend(self, rows: QueryRows, loads: NextLoads) -> RowResults:
        """Return the unnormalized results of rows over all of their keys.

        Args:
            rows: Query rows of the warpgroup.
            loads: State of the pipeline after `start`.
        """
        work_tile, has_masked = rows.work_tile, self.spec.has_window or self.spec.has_lists
        begin, full_begin, full_end, end = rows.kv_tile_range()
        if self.spec.has_window:
            loads = self.pipeline.skip(work_tile, jnp.int32(0), begin, loads)
        row_max = self.full_rows(self.policy.initial_row_max)
        state = WarpTileState(zero_accumulators(self.spec), self.full_rows(0.0), row_max, loads)
        # The first tile may contain both ends of the visible keys.
        attend_tile = functools.partial(self.attend_tile, rows)
        state = self.attend_tile(rows, MaskedEnds.BOTH, begin, state, is_first=True)
        # One loop per kind of tile, so that full tiles are computed without any mask.
        if has_masked:
            attend_masked = functools.partial(attend_tile, MaskedEnds.BOTH)
            state = lax.fori_loop(begin + 1, full_begin, attend_masked, state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(attend_tile, MaskedEnds.NONE), state)
        if not self.spec.has_lists:
            state = lax.fori_loop(full_end, end, functools.partial(attend_tile, MaskedEnds.HIGH), state)
        # Then there are tiles for the other warpgroup's rows only.
        self.pipeline.skip(work_tile, end, work_tile.num, state.loads)
        row_sum = add_lanes(state.row_sum, is_interpreted=self.spec.is_interpreted)
        return RowResults(state.accs, state.row_max, row_sum)

    def attend_tile(
        self,
        rows: QueryRows,
        masked_ends: MaskedEnds,
        i: Scalar,
        state: WarpTileState,
        *,
        is_first: bool = False,
    ) -> WarpTileState:
        """Add KV tile i.

        Args:
            rows: Query rows of the warpgroup.
            masked_ends: Which ends of the visible keys the tile may contain. Static.
            i: Index of the KV tile in the work tile.
            state: State after the previous tile.
            is_first: Whether it is the rows' first tile. Static.
        """
        spec, policy, work_tile = self.spec, self.policy, rows.work_tile
        tile = rows.tile(i, masked_ends, is_first=is_first)
        is_interpreted = spec.is_interpreted
        # The mask's data comes from global memory: load it before the keys are awaited.
        loaded, lookups = self.masking.load(tile), self.bias.load(tile)
        stage = self.pipeline.wait_first(work_tile, i, state.loads)
        q_s, k_s, v_s = self.smem.query.at[self.wg], self.smem.k.at[stage], self.smem.v.at[stage]
        s = multiply_chunks(q_s, k_s, is_interpreted=is_interpreted)
        # Mask: after the bias, whose row term the policy adds, and before the maximum.
        s, scaling = self.bias.apply(tile, s, lookups)
        s = policy.prescale(s, scaling, state.row_max, is_first=is_first)
        s = self.masking.apply(tile, loaded, s)
        shifted = policy.shift_scores(s, scaling, state.row_max, is_first=is_first)
        p, accs = jnp.exp2(shifted.exponent), state.accs
        row_sum = sum_lane_columns(p, is_interpreted=is_interpreted)
        if not is_first:
            sums = policy.rescale(shifted.alpha, shifted.needs_rescale, (*accs, state.row_sum))
            accs, row_sum = tuple(sums[:-1]), sums[-1] + row_sum
        loads = self.pipeline.wait_second(work_tile, i, state.loads)
        self.clear_values(tile, stage)
        accs = tuple(
            multiply_registers(acc, p, v_s.at[chunk], is_interpreted=is_interpreted)
            for chunk, acc in enumerate(accs)
        )
        return WarpTileState(accs, row_sum, shifted.row_max, loads)

    def clear_values(self, tile: KvTile, stage: Scalar) -> None:
        """Zero the values of a tile that no query of the request attends to: 0 times NaN is NaN."""
        for end in (MaskedEnds.LOW, MaskedEnds.HIGH):
            if end in tile.masked_ends and (end is MaskedEnds.HIGH or self.spec.has_low_end):
                # Pallas makes the warpgroup wait after each store, and every warpgroup stores all zeros.
                clear_invisible_values(
                    self.smem.v.at[stage], tile, end, tile_kv=self.spec.sizes.tile_kv, fence=lambda: None
                )
