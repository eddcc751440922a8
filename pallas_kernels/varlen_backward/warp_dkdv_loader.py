"""The loads of the dk/dv kernels on GPUs without TMA: the computing warps load by cp.async."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ptx.cp_async import WARPS, commit_copies, copy_numbers, copy_token_rows
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_backward.dkdv_scores import QueryTile
from pallas_kernels.varlen_backward.dkdv_spec import DkDvSpec
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import DkDvWorkTile, entry_tile
from pallas_kernels.varlen_backward.refs import DkDvInputs, WarpDkDvSmem
from pallas_kernels.varlen_prefill.warp_loader import wait_for_copies


class NextStep(NamedTuple):
    """The next step of a work tile.

    Attributes:
        head: Query head.
        entry: Query tile, or entry of the tile list; see QuerySteps.entry.
        exists: 1 if there is a next step, else 0.
    """

    head: Scalar
    entry: Scalar
    exists: Scalar


class WarpQueryPipeline:
    """The stages of queries and dO of a thread block, which its warps fill by cp.async.

    Of the queries and dO of a step, one is the `first` that is read: dO, or the queries if only dv is
    computed; the other is the `second`. All warpgroups call the same methods in the same order: for each work
    tile `load_table_row` and `start`, then for each step `wait_first`, `wait_second` and `release_first`; see
    the figures in warp_dkdv_kernel.py.
    """

    def __init__(
        self, inputs: DkDvInputs, smem: WarpDkDvSmem, barrier: Barriers, spec: DkDvSpec, rank: Scalar
    ):
        """Create the pipeline; `rank` is the index of the warpgroup in the thread block."""
        self.inputs, self.smem, self.barrier, self.spec, self.rank = inputs, smem, barrier, spec, rank
        self.load_first, self.load_second = self._load_dout, self._load_queries
        if not spec.computes.dk:
            self.load_first, self.load_second = self._load_queries, self._load_dout
        # In interpret mode the first warpgroup copies whole tiles.
        self.num_warps = 1 if spec.is_interpreted else WARPS * spec.sizes.warpgroups

    @property
    def needs_release(self) -> bool:
        """Return whether `first` is read after `second` has arrived, so that its only stage is not free."""
        return self.spec.sizes.stages == 1 and self.spec.computes.dk and self.spec.computes.dv

    def first_step_from(self, work_tile: DkDvWorkTile, index: Scalar) -> NextStep:
        """Return the first step of the query heads of the group from `index` on."""
        group = self.spec.group
        if self.spec.has_lists:  # a head may have no steps
            index = lax.while_loop(
                lambda n: (n < group) & (work_tile.steps(jnp.minimum(n, group - 1)).num_steps == 0),
                lambda n: n + 1,
                index,
            )
        last = jnp.minimum(index, group - 1)
        steps = work_tile.steps(last)
        exists = (index < group) & (steps.num_steps > 0)
        return NextStep(work_tile.head(last), steps.entry(jnp.int32(0)), exists.astype(jnp.int32))

    def load_table_row(self, row: Scalar) -> None:
        """Load a row of the schedule's table into shared memory, after all warps have read the previous."""
        self._wait()

        @pl.when(self._is_loading(row >= 0))
        def _() -> None:
            copy_numbers(
                self.smem.table_row, self.inputs.schedule.table, row, row * 0,
                num_warps=self.num_warps, is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip

        self._commit()
        self._wait()

    def start(self, work_tile: DkDvWorkTile, first_step: NextStep) -> None:
        """Load the warpgroup's keys and values, and the `first` of a work tile's first step.

        With two stages, load the `second` as well.

        Args:
            work_tile: The work tile.
            first_step: The first step.
        """
        inputs, smem, is_interpreted = self.inputs, self.smem, self.spec.is_interpreted
        first_row = work_tile["first_key_row"] + self.rank * WARPGROUP_ROWS
        arrays = [(inputs.key.rows, smem.key)]
        if self.spec.computes.dk:
            arrays.append((inputs.value.rows, smem.value))
        for rows_g, to_s in arrays:
            copy_token_rows(
                to_s.at[self.rank], rows_g, first_row, work_tile.kv_head, head=self.spec.head,
                rows_per_head=WARPGROUP_ROWS, num_warps=1 if is_interpreted else WARPS,
                is_interpreted=is_interpreted,
            )  # fmt: skip
        self.load_first(work_tile, first_step, first_row * 0)
        if self.spec.sizes.stages > 1:
            self.load_second(work_tile, first_step, first_row * 0)
        self._commit()

    def wait_first(self, tile: QueryTile, step: Scalar) -> Scalar:
        """Wait for the `first` of a step, and return its stage; with one stage, load the `second`."""
        stages = self.spec.sizes.stages
        self._wait()
        if stages > 1:
            return lax.rem(step, jnp.int32(stages))
        self.load_second(tile.work_tile, NextStep(tile.head, tile.tile_index, step * 0 + 1), step * 0)
        self._commit()
        return step * 0

    def wait_second(self, tile: QueryTile, stage: Scalar, next_step: NextStep) -> None:
        """Wait for the `second` of a step, and load what there is a free stage for.

        With two stages it has arrived already, and the next step is loaded. With one, the `first` of the next
        step is loaded, unless `release_first` does so.
        """
        if self.spec.sizes.stages > 1:
            self.load_first(tile.work_tile, next_step, 1 - stage)
            self.load_second(tile.work_tile, next_step, 1 - stage)
            self._commit()
            return
        self._wait()
        if not self.needs_release:
            self.load_first(tile.work_tile, next_step, stage)
            self._commit()

    def release_first(self, tile: QueryTile, stage: Scalar, next_step: NextStep) -> None:
        """Wait until all warps have read the `first` for the last time, and load that of the next step."""
        if self.needs_release:
            self._wait()
            self.load_first(tile.work_tile, next_step, stage)
            self._commit()

    def _load_queries(self, work_tile: DkDvWorkTile, step: NextStep, stage: Scalar) -> None:
        """Start to load the queries and the row statistics of a step."""
        self._load(self.inputs.query.rows, self.smem.query, work_tile, step, stage)
        row = work_tile.query_row(entry_tile(step.entry))

        @pl.when(self._is_loading(step.exists != 0))
        def _() -> None:
            copy_numbers(
                self.smem.stats_and_columns.at[stage], self.inputs.row_stats, step.head, row,
                num_warps=self.num_warps, is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip

    def _load_dout(self, work_tile: DkDvWorkTile, step: NextStep, stage: Scalar) -> None:
        self._load(self.inputs.dout.rows, self.smem.dout, work_tile, step, stage)

    def _load(
        self, rows_g: Ref, stages_s: Ref, work_tile: DkDvWorkTile, step: NextStep, stage: Scalar
    ) -> None:
        row = work_tile.query_row(entry_tile(step.entry))

        @pl.when(self._is_loading(step.exists != 0))
        def _() -> None:
            copy_token_rows(
                stages_s.at[stage], rows_g, row, step.head, head=self.spec.head,
                rows_per_head=self.spec.sizes.tile_q, num_warps=self.num_warps,
                is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip

    def _is_loading(self, is_loaded: Scalar) -> Scalar:
        """Return whether the warpgroup copies what is loaded: in interpret mode only the first one does."""
        return is_loaded & (self.rank == 0) if self.spec.is_interpreted else is_loaded

    def _commit(self) -> None:
        commit_copies(is_interpreted=self.spec.is_interpreted)

    def _wait(self) -> None:
        num = self.spec.sizes.warpgroups
        wait_for_copies(self.barrier, 0, num, is_interpreted=self.spec.is_interpreted)
