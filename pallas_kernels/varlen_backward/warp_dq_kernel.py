"""The dq kernel for GPUs without wgmma: dQ of 64 query rows per warpgroup, bitwise reproducible.

Each warp multiplies its 16 rows by mma.sync, and the computing warps load by cp.async, as in varlen_prefill's
warp_kernel.py. A KV tile's values are read first, and its keys last: so keys and values change places in the
pipeline of prefill. A work tile's dO is loaded together with its queries. For each KV tile i:

    wait for the values of tile i, and for all warps      so all warps have read the keys of tile i - 1:
    start to load keys of tile i + stages - 1             into their stage
    dP = dO V^T
    wait for the keys of tile i, and for all warps        so all warps have read the values of tile i:
    start to load values of tile i + stages               into their stage
    S = Q K^T; P = 2^(S - LSE); dS = P (dP - delta)
    zero invisible keys, if it is a tile at an end
    dQ += dS K
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ptx.stores import store_token_rows
from pallas_kernels.ptx.tile_mma import multiply_chunks, multiply_registers
from pallas_kernels.shared.types import Barriers, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dq_loader import has_wide_heads
from pallas_kernels.varlen_backward.dq_scores import DqScores, RowStats, load_row_stat
from pallas_kernels.varlen_backward.refs import DELTA, LSE, DqInputs, WarpDqSmem
from pallas_kernels.varlen_prefill.epilogue import valid_rows
from pallas_kernels.varlen_prefill.masking import clear_invisible_values
from pallas_kernels.varlen_prefill.softmax import zero_accumulators
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import (
    KvTile,
    MaskedEnds,
    PrefillTileScheduler,
    PrefillWorkTile,
    QueryRows,
)
from pallas_kernels.varlen_prefill.warp_loader import NextLoads, WarpPipeline


def warp_dq_body(
    inputs: DqInputs, dq: Ref, smem: WarpDqSmem, barrier: Barriers, *, spec: PrefillSpec
) -> None:
    """Run one thread block, all of whose warps load and compute."""
    WarpDqMainloop(inputs, dq, smem, barrier, spec).run(PrefillTileScheduler(inputs.attention.schedule, spec))


class WarpDqPipeline(WarpPipeline):
    """The pipeline of prefill, but values come first and keys second, and dO is loaded with the queries."""

    def __init__(self, inputs: DqInputs, smem: WarpDqSmem, barrier: Barriers, spec: PrefillSpec, wg: Scalar):
        super().__init__(inputs.attention, smem.attention, barrier, spec, wg)
        self.first, self.second = self.second, self.first
        self.dout_g, self.dout_s = inputs.dout.rows, smem.dout

    def _copy_queries(self, work_tile: PrefillWorkTile) -> None:
        super()._copy_queries(work_tile)
        self._copy_rows(self.dout_s, self.dout_g, work_tile)


class WarpDqState(NamedTuple):
    """State after a KV tile: dQ so far without the softmax scale, one per chunk, and what is loaded next."""

    sums: tuple[Tile, ...]
    loads: NextLoads


class WarpDqMainloop:
    """Main loop of one warpgroup."""

    def __init__(self, inputs: DqInputs, dq: Ref, smem: WarpDqSmem, barrier: Barriers, spec: PrefillSpec):
        self.wg = wg = lax.axis_index("warpgroup") if spec.sizes.warpgroups > 1 else jnp.int32(0)
        self.inputs, self.dq, self.smem, self.spec = inputs, dq, smem, spec
        self.pipeline = WarpDqPipeline(inputs, smem, barrier, spec, wg)
        attention, columns_s = inputs.attention, smem.attention.columns.at[wg]
        self.scores = DqScores(attention.mask, attention.score_mod, columns_s, spec)

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Compute all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)
        self.scores.store_column_indices()

        @pl.loop(0, rounds)
        def _(iteration: Scalar) -> None:
            work_tile = scheduler.read_from_gmem(tile_index(iteration))
            self.compute_work_tile(QueryRows(work_tile, self.wg, self.inputs.attention.slopes, self.spec))

    def compute_work_tile(self, rows: QueryRows) -> None:
        """Compute and store dq of a work tile's rows."""
        work_tile, head, scale = rows.work_tile, self.spec.shape.head, self.spec.score.scale
        loads = self.pipeline.start(work_tile)

        def skip() -> tuple[Tile, ...]:
            # No valid rows or no keys: only take part in the loads.
            self.pipeline.skip(work_tile, jnp.int32(0), work_tile.num, loads)
            return zero_accumulators(self.spec)

        sums = lax.cond(rows.has_work(), functools.partial(self.compute_dq, rows, loads), skip)
        valid = valid_rows(rows)
        for chunk, acc in enumerate(sums):
            dq_g = self.dq.at[:, :, chunk] if head.is_padded else self.dq
            store_token_rows(
                dq_g, acc * scale, work_tile.head, *valid, tokens_per_head=rows.tokens,
                columns=head.chunk_dim, is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip

    def compute_dq(self, rows: QueryRows, loads: NextLoads) -> tuple[Tile, ...]:
        """Return dq of the rows without the softmax scale; `loads` is the pipeline's state after `start`."""
        work_tile, has_lists, has_window = rows.work_tile, self.spec.has_lists, self.spec.has_window
        begin, full_begin, full_end, end = rows.kv_tile_range()
        row_stats = RowStats(*(load_row_stat(self.inputs.row_stats, rows, index) for index in (LSE, DELTA)))
        if has_window:
            loads = self.pipeline.skip(work_tile, jnp.int32(0), begin, loads)
        state = WarpDqState(zero_accumulators(self.spec), loads)
        compute_tile = functools.partial(self.compute_tile, rows, row_stats)
        # The first tile may contain both ends of the visible keys.
        state = compute_tile(MaskedEnds.BOTH, begin, state, is_first=True)
        # One loop per kind of tile, so that full tiles are computed without any mask.
        if has_window or has_lists:
            compute_masked = functools.partial(compute_tile, MaskedEnds.BOTH)
            state = lax.fori_loop(begin + 1, full_begin, compute_masked, state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(compute_tile, MaskedEnds.NONE), state)
        if not has_lists:
            state = lax.fori_loop(full_end, end, functools.partial(compute_tile, MaskedEnds.HIGH), state)
        # Then there are tiles for the other warpgroup's rows only.
        self.pipeline.skip(work_tile, end, work_tile.num, state.loads)
        return state.sums

    def compute_tile(
        self,
        rows: QueryRows,
        row_stats: RowStats,
        masked_ends: MaskedEnds,
        i: Scalar,
        state: WarpDqState,
        *,
        is_first: bool = False,
    ) -> WarpDqState:
        """Add dS K of a KV tile to dQ.

        Args:
            rows: Query rows of the warpgroup.
            row_stats: Their statistics.
            masked_ends: Which ends of the visible keys the tile may contain. Static.
            i: Index of the KV tile in the work tile.
            state: State after the previous tile.
            is_first: Whether it is the rows' first tile. Static.
        """
        smem, scores, work_tile = self.smem.attention, self.scores, rows.work_tile
        tile = rows.tile(i, masked_ends, is_first=is_first)
        # The mask's data comes from global memory: load it before the values are awaited.
        loaded = scores.load(tile)
        stage = self.pipeline.wait_first(work_tile, i, state.loads)
        keys_s, values_s = smem.k.at[stage], smem.v.at[stage]
        rank = self.wg
        if has_wide_heads(self.spec):
            # The compiler computes the addresses of queries and dO in each step instead of keeping them in
            # registers, because they depend on a 0 that it cannot treat as a constant.
            rank = rank + lax.shift_right_logical(work_tile["seq_len"], jnp.int32(31))
        dp = multiply_chunks(self.smem.dout.at[rank], values_s, is_interpreted=self.spec.is_interpreted)
        loads = self.pipeline.wait_second(work_tile, i, state.loads)
        s = multiply_chunks(smem.query.at[rank], keys_s, is_interpreted=self.spec.is_interpreted)
        weights = scores.weights(s, row_stats, tile, loaded)
        ds = scores.ds(weights, dp, row_stats, tile)
        self.clear_keys(tile, keys_s)
        sums = tuple(
            multiply_registers(acc, ds, keys_s.at[chunk], is_interpreted=self.spec.is_interpreted)
            for chunk, acc in enumerate(state.sums)
        )
        return WarpDqState(sums, loads)

    def clear_keys(self, tile: KvTile, keys_s: Ref) -> None:
        """Zero the keys of a tile that no query of the request attends to: 0 times NaN is NaN."""
        for end in (MaskedEnds.LOW, MaskedEnds.HIGH):
            if end in tile.masked_ends and (end is MaskedEnds.HIGH or self.spec.has_low_end):
                # Pallas makes the warpgroup wait after each store, and every warpgroup stores all zeros.
                clear_invisible_values(keys_s, tile, end, tile_kv=self.spec.sizes.tile_kv, fence=lambda: None)
