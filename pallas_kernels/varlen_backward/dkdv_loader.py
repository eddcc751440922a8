"""The loading warp of the dk/dv kernel: loads keys and values, then the queries and dO of each step."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import BULK_COPY, TokenRows
from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_backward.dkdv_spec import DkDvSpec
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import DkDvTileScheduler, DkDvWorkTile
from pallas_kernels.varlen_backward.refs import DkDvBarriers, DkDvInputs, DkDvSmem
from pallas_kernels.varlen_prefill.loader import copy_rows
from pallas_kernels.varlen_prefill.tile_scheduler import align_row


class DkDvLoader:
    """The warp that loads keys, values, queries, dO and row statistics of a team into shared memory."""

    def __init__(self, inputs: DkDvInputs, smem: DkDvSmem, barriers: DkDvBarriers, spec: DkDvSpec, team: int):
        self.inputs, self.smem, self.barriers, self.spec, self.team = inputs, smem, barriers, spec, team

    def load_all(self, scheduler: DkDvTileScheduler) -> None:
        """Load all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)

        def load(iteration: Scalar, step: Scalar) -> Scalar:
            work_tile = scheduler.work_tile(tile_index(iteration))
            # The previous work tile's gradients leave through the memory of its keys and values.
            pl.when(iteration >= 1)(lambda: plgpu.barrier_wait(self.barriers.kv_free.at[self.team]))
            self.load_keys(work_tile)
            return lax.fori_loop(0, self.spec.group, functools.partial(self.load_head, work_tile), step)

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        # Interpret mode requires that every barrier completion is awaited; the hardware does not.
        if self.spec.is_interpreted:
            pl.when(rounds >= 1)(lambda: plgpu.barrier_wait(self.barriers.kv_free.at[self.team]))

            @pl.loop(jnp.maximum(steps - self.spec.sizes.stages, 0), steps)
            def _(step: Scalar) -> None:
                plgpu.barrier_wait(self.barriers.q_free.at[self.spec.step_stages(step, self.team).query])

            @pl.loop(jnp.maximum(steps - self.spec.dout_stages, 0), steps)
            def _(step: Scalar) -> None:
                plgpu.barrier_wait(self.barriers.dout_free.at[self.spec.step_stages(step, self.team).dout])

    def load_keys(self, work_tile: DkDvWorkTile) -> None:
        """Load a work tile's keys, its table row and, if dk is computed, its values."""
        inputs, smem, full = self.inputs, self.smem, self.barriers.kv_full.at[self.team]
        team_size = self.spec.sizes.team_size
        for rank in range(team_size):
            wg = self.team * team_size + rank
            row = align_row(work_tile["first_key_row"] + rank * WARPGROUP_ROWS)
            for panel in range(self.spec.num_head_panels):
                index = (work_tile.kv_head, *self.spec.gmem_panel_index(panel, work_tile.row * 0))
                copy_rows(inputs.key, row, index, smem.key.at[wg, panel], full, num_rows=WARPGROUP_ROWS)
                if self.spec.computes.dk:
                    copy_rows(
                        inputs.value, row, index, smem.value.at[wg, panel], full, num_rows=WARPGROUP_ROWS
                    )
        plgpu.copy_gmem_to_smem(inputs.schedule.table.at[work_tile.row], smem.table_row.at[self.team], full)

    def load_head(self, work_tile: DkDvWorkTile, index: Scalar, step: Scalar) -> Scalar:
        """Load the query tiles of a query head, the first as step `step`; return one past the last step."""
        head, steps = work_tile.head(index), work_tile.steps(index)

        def load_and_prefetch(i: Scalar, runs: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            next_runs = steps.runs(jnp.minimum(i + 1, steps.num_steps - 1))
            self.load_tile(work_tile, head, runs, step + i)
            return next_runs

        if self.spec.has_lists:  # a list is in global memory, so read entries one step ahead
            lax.fori_loop(0, steps.num_steps, load_and_prefetch, steps.runs(jnp.int32(0)))
        else:
            pl.loop(0, steps.num_steps)(lambda i: self.load_tile(work_tile, head, steps.runs(i), step + i))
        return step + steps.num_steps

    def load_tile(
        self, work_tile: DkDvWorkTile, head: Scalar, runs: tuple[Scalar, ...], step: Scalar
    ) -> None:
        """Load the queries, dO and row statistics of a query tile.

        Args:
            work_tile: Work tile of the keys.
            head: Query head.
            runs: Index of each run of consecutive queries of the tile.
            step: Step of the tile.
        """
        stages, barriers, smem = self.spec.step_stages(step, self.team), self.barriers, self.smem
        length = self.spec.run_length
        rows = [(pl.ds(n * length, length), work_tile.query_row(run)) for n, run in enumerate(runs)]

        def copy_panels(array: TokenRows, to_s: Ref, full: Barriers) -> None:
            for panel in range(self.spec.num_head_panels):
                index = (head, *self.spec.gmem_panel_index(panel, step * 0))
                for rows_s, row in rows:
                    copy_rows(array, row, index, to_s.at[panel, rows_s], full, num_rows=length)

        def wait_until_free(free: Barriers, num_stages: int, stage: Scalar) -> None:
            pl.when(step >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))

        # Queries first: S needs them before dP needs dO. Each stage is free once all warpgroups of the team
        # have read it.
        stage, full = stages.query, barriers.q_full.at[stages.query]
        wait_until_free(barriers.q_free, self.spec.sizes.stages, stage)
        copy_panels(self.inputs.query, smem.query.at[stage], full)
        stage, full = stages.dout, barriers.dout_full.at[stages.dout]
        wait_until_free(barriers.dout_free, self.spec.dout_stages, stage)
        copy_panels(self.inputs.dout, smem.dout.at[stage], full)
        stats_g, stats_s = self.inputs.row_stats.at[head], smem.stats_and_columns.at[stage]
        for stats, run in self.spec.row_stats_copies:
            rows_s, row = rows[run]
            source, to = stats_g.at[stats, pl.ds(row, length)], stats_s.at[stats, rows_s]
            plgpu.copy_gmem_to_smem(source, to, full, oob_mode=None if len(runs) == 1 else BULK_COPY)
