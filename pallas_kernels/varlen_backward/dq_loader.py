"""The loading warps of the dq kernel; its pipeline with separate numbers of stages for keys and values."""

import functools
import itertools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import TokenRows
from pallas_kernels.shared.types import Scalar
from pallas_kernels.varlen_backward.refs import DqInputs, DqSmem
from pallas_kernels.varlen_prefill.loader import KvPipeline, KvStages, KvStream, PrefillLoader, copy_rows
from pallas_kernels.varlen_prefill.spec import PrefillBarriers, PrefillSmem, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler, PrefillWorkTile, align_row


def has_wide_heads(spec: PrefillSpec) -> bool:
    """Return whether the heads are 192 or 256 wide."""
    return spec.shape.head.padded_dim > 128


def num_value_stages(spec: PrefillSpec) -> int:
    """Return the number of stages of values; heads of 256 have 1, but 2 stages of keys.

    Values are read once, by dP. Keys are read by S and, while the next tile's S is computed, by dQ.
    """
    return 1 if spec.shape.head.padded_dim > 192 else spec.sizes.stages


class DqKvPipeline(KvPipeline):
    """Pipeline of keys and values with separate numbers of stages."""

    def __init__(self, smem: PrefillSmem, barriers: PrefillBarriers, spec: PrefillSpec, team: Scalar | int):
        super().__init__(smem, barriers, spec.sizes, team)
        self.num_values = num_value_stages(spec)

    def value_stage(self, step: Scalar) -> Scalar:
        """Return the index of the stage that holds the values of a step."""
        if self.num_values == self.sizes.stages:
            return self.stage(step)
        return lax.rem(step, jnp.int32(self.num_values))

    def kv_stages(self, step: Scalar) -> tuple[tuple[KvStages, Scalar, int], ...]:
        """Return (buffers, stage index of a step, number of stages) for keys, then for values."""
        return (
            (self.keys, self.stage(step), self.sizes.stages),
            (self.values, self.value_stage(step), self.num_values),
        )

    def skip(self, step: Scalar, first: Scalar, end: Scalar) -> None:
        """Release tiles [first, end) of a work tile, whose stages of keys and values differ."""

        @pl.loop(first, end)
        def _(i: Scalar) -> None:
            for buffers, stage, _ in self.kv_stages(step + i):
                plgpu.barrier_wait(buffers.full.at[stage])
                plgpu.barrier_arrive(buffers.free.at[stage])

    def drain(self, steps: Scalar) -> None:
        """Wait until the last tiles have been read; keys and values have different numbers of stages."""
        for index, num in enumerate((self.sizes.stages, self.num_values)):

            @pl.loop(jnp.maximum(steps - num, 0), steps)
            def _(step: Scalar, index: int = index) -> None:
                buffers, stage, _ = self.kv_stages(step)[index]
                plgpu.barrier_wait(buffers.free.at[stage])


class DqLoader(PrefillLoader):
    """A team's warp that loads queries, dO, keys and values, and the output if the kernel computes delta."""

    pipeline: DqKvPipeline

    def __init__(
        self, inputs: DqInputs, smem: DqSmem, barriers: PrefillBarriers, spec: PrefillSpec, team: int
    ):
        super().__init__(inputs.attention, smem.attention, barriers, spec, team)
        self.pipeline = DqKvPipeline(smem.attention, barriers, spec, team)
        kv, (keys, values) = inputs.attention.kv, self.pipeline.loaded
        self.streams = KvStream(kv.k, keys, kv.k_tail), KvStream(kv.v, values, kv.v_tail)
        self.dout, self.dout_s = inputs.dout, smem.dout
        self.out, self.num_output_steps = inputs.out, inputs.num_output_steps

    def load_all(self, scheduler: PrefillTileScheduler) -> None:
        """Load all work tiles; the outputs of a work tile come before its keys."""
        rounds, tile_index = scheduler.assignment(self.team)

        def load(iteration: Scalar, step: Scalar) -> Scalar:
            work_tile, row = scheduler.read_to_registers(tile_index(iteration))
            if self.out is not None:
                self.load_outputs(self.out, work_tile, step)
            self.load_work_tile(work_tile, row, iteration, step + self.num_output_steps)
            return step + self.num_output_steps + work_tile.num

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        # Interpret mode requires that every barrier completion is awaited; the hardware does not.
        if self.spec.is_interpreted:
            self.pipeline.drain(steps)
            self.wait_for_queries(rounds)

    def load_outputs(self, out: TokenRows, work_tile: PrefillWorkTile, step: Scalar) -> None:
        """Load the first warpgroup's outputs into a stage of keys, the second's into one of values.

        In a team of one warpgroup, both stages hold the same outputs.
        """
        head, team_size = self.spec.shape.head, self.spec.sizes.team_size
        for operand, (buffers, stage, num) in enumerate(self.pipeline.kv_stages(step)):
            rank = min(operand, team_size - 1)
            pl.when(step >= num)(functools.partial(plgpu.barrier_wait, buffers.free.at[stage]))
            first_row = jnp.maximum(work_tile["first_row"] + rank * WARPGROUP_ROWS, 0)
            # As many copies as a tile of keys, for which the barrier counts. Both have WARPGROUP_ROWS rows.
            first_rows = range(0, WARPGROUP_ROWS, self.run_length)
            for chunk, first in itertools.product(range(head.num_chunks), first_rows):
                index = (work_tile.head, *head.gmem_index(chunk, step * 0))
                to = buffers.tiles.at[stage, chunk, pl.ds(first, self.run_length)]
                row, full = align_row(first_row + first), buffers.full.at[stage]
                copy_rows(out, row, index, to, full, num_rows=self.run_length)

    def load_tile(
        self,
        work_tile: PrefillWorkTile,
        runs: tuple[Scalar, ...],
        step: Scalar,
        after_keys: Callable[[], None] | None = None,
    ) -> None:
        """Load the keys and values of a KV tile into stages whose indices may differ; see PrefillLoader."""
        copies = self.tile_copies(work_tile, runs, work_tile.kv_head)
        for index, (buffers, stage, num) in enumerate(self.pipeline.kv_stages(step)):
            # A stage is free once all warpgroups have read the tile that it held.
            pl.when(step >= num)(functools.partial(plgpu.barrier_wait, buffers.free.at[stage]))
            self.copy(self.streams[index], stage, copies)
            if after_keys is not None and index == 0:
                after_keys()

    def load_queries(self, work_tile: PrefillWorkTile, row: Scalar, iteration: Scalar) -> None:
        """Load each warpgroup's queries and dO, and the work tile's row of the table."""
        super().load_queries(work_tile, row, iteration)
        head, buffer = self.spec.shape.head, self.queries[0].buffer(iteration)
        for rank, queries in enumerate(self.queries):
            first_row = align_row(jnp.maximum(work_tile["first_row"] + rank * WARPGROUP_ROWS, 0))
            for chunk in range(head.num_chunks):
                index = (work_tile.head, *head.gmem_index(chunk, iteration * 0))
                to, full = self.dout_s.at[queries.wg, buffer, chunk], queries.full.at[queries.barrier(buffer)]
                copy_rows(self.dout, first_row, index, to, full, num_rows=WARPGROUP_ROWS)
