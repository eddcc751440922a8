"""The pipeline of keys and values, and what fills it: loading warps, and warpgroups that dequantize.

A loading warp per team, or one for keys and one for values, fills the pipeline and the query buffers. With an
8-bit cache it fills stages of 8-bit keys and values, which one warpgroup each converts to 16 bits.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import QUANTIZED_LAYOUT, dequantize
from pallas_kernels.shared.memory import BULK_COPY, PANEL, TokenRows, store_unoptimized
from pallas_kernels.shared.paged_kv import (
    BlockTableRef,
    load_head_scale,
)
from pallas_kernels.shared.types import Barriers, Index, Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.schedule import ALIGN
from pallas_kernels.varlen_prefill.sizes import PrefillSizes
from pallas_kernels.varlen_prefill.spec import (
    MAX_COPIES_AT_ONCE,
    PrefillBarriers,
    PrefillInputs,
    PrefillSmem,
    PrefillSpec,
)
from pallas_kernels.varlen_prefill.tile_scheduler import (
    PrefillTileScheduler,
    PrefillWorkTile,
    align_row,
    packed_heads,
)


# ------------------------------------------------------------------------------------- pipeline
class KvStages(NamedTuple):
    """A circular buffer of key tiles or value tiles.

    Attributes:
        tiles: Tiles [stages, chunks, tile_kv, width] in shared memory.
        full: Barriers that complete when a stage has been filled.
        free: Barriers that complete when a stage has been read.
    """

    tiles: Ref
    full: Barriers
    free: Barriers


class KvPipeline:
    """The pipeline stages of a team. A **step** is one KV tile, counted over all work tiles of the team.

    Attributes:
        keys: Stages of 16-bit keys, which the matrix products read.
        values: Stages of 16-bit values, which the matrix products read.
        loaded: Stages that TMA fills: `keys` and `values`, or the stages of 8-bit keys and values.
    """

    def __init__(self, smem: PrefillSmem, barriers: PrefillBarriers, sizes: PrefillSizes, team: Scalar | int):
        self.keys = KvStages(smem.k, barriers.k_full, barriers.k_free)
        self.values = KvStages(smem.v, barriers.v_full, barriers.v_free)
        self.loaded = self.keys, self.values
        quantized_s, quantized = smem.quantized, barriers.quantized
        if quantized_s is not None and quantized is not None:
            self.loaded = (
                KvStages(quantized_s.k, quantized.k_full, quantized.k_free),
                KvStages(quantized_s.v, quantized.v_full, quantized.v_free),
            )
        self.sizes, self.team = sizes, team

    def stage(self, step: Scalar) -> Scalar:
        """Return the index of the stage that holds the keys and values of a step."""
        # Matrix products are issued after this: a remainder costs up to 1 % with tile lists.
        stages = self.sizes.stages
        stage = step & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(step, jnp.int32(stages))
        return stage if self.sizes.teams == 1 else stage + self.team * stages

    def skip(self, step: Scalar, first: Scalar, end: Scalar) -> None:
        """Release the KV tiles [first, end) of a work tile without reading them.

        Args:
            step: Step of the work tile's first KV tile.
            first: Index of the first KV tile to skip.
            end: One past the index of the last KV tile to skip.
        """

        @pl.loop(first, end)
        def _(i: Scalar) -> None:
            stage = self.stage(step + i)
            for stages in (self.keys, self.values):
                plgpu.barrier_wait(stages.full.at[stage])
                plgpu.barrier_arrive(stages.free.at[stage])

    def drain_stages(self, stages: KvStages, steps: Scalar) -> None:
        """Wait until all tiles of the `steps` steps of the team have been read from `stages`.

        Only interpret mode needs this, because it requires that every barrier completion is awaited.
        """

        @pl.loop(jnp.maximum(steps - self.sizes.stages, 0), steps)
        def _(step: Scalar) -> None:
            plgpu.barrier_wait(stages.free.at[self.stage(step)])


class QueryBuffers:
    """A warpgroup's buffers for the queries, outputs and table rows of work tiles.

    `iteration` is the number of work tiles that the team processed before.
    """

    def __init__(self, smem: PrefillSmem, barriers: PrefillBarriers, sizes: PrefillSizes, wg: Scalar | int):
        (query,), (out,) = smem.query_and_out
        self.query, self.out, self.table_row = query.at[wg], out.at[wg], smem.table_row.at[wg]
        self.full, self.free = barriers.q_full, barriers.q_free
        self.num, self.wg = sizes.query_buffers, wg

    def buffer(self, iteration: Scalar) -> Scalar:
        """Return the index of the buffer that a work tile uses."""
        return lax.rem(iteration, jnp.int32(self.num))

    def barrier(self, buffer: Scalar) -> Scalar:
        """Return the index of a buffer's barriers."""
        return self.wg * self.num + buffer

    def release(self, iteration: Scalar) -> None:
        """Wait until a work tile's output is in global memory, then release its buffer."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.free.at[self.barrier(self.buffer(iteration))])


# ------------------------------------------------------------------------------------- loading warp


class KvCopy(NamedTuple):
    """Source and destination of one TMA copy.

    Attributes:
        source: Index of the keys in global memory, to which the caller appends the index of the chunk; for
            packed keys without the rows.
        rows: Rows of the tile in shared memory that the copy fills.
        scales: Index of the scales per token in global memory; () without such scales.
        first_row: First row of packed keys in global memory; None for a paged cache.
    """

    source: Index
    rows: Slice
    scales: Index = ()
    first_row: Scalar | None = None


def copy_rows(
    array: TokenRows, first_row: Scalar, index: Index, to: Ref, barrier: Ref, *, num_rows: int
) -> None:
    """Start to copy rows of an array from global memory, where they are in place or in the copied tail.

    Args:
        array: Array whose tail, if there is one, has at least `num_rows` rows.
        first_row: First row, from align_row.
        index: Index after the rows.
        to: Destination in shared memory.
        barrier: Barrier at which the copy arrives.
        num_rows: Number of rows; those past the array's end become 0.
    """
    rows_g, tail_g = array
    source_g = rows_g.at[(pl.ds(first_row, num_rows), *index)]
    if tail_g is None:
        plgpu.copy_gmem_to_smem(source_g, to, barrier)
        return
    tail_start = rows_g.shape[0] + ALIGN - tail_g.shape[0]

    @pl.when(first_row < tail_start)
    def _() -> None:
        plgpu.copy_gmem_to_smem(source_g, to, barrier)

    @pl.when(first_row >= tail_start)
    def _() -> None:
        tail_row = align_row(first_row - tail_start)
        plgpu.copy_gmem_to_smem(tail_g.at[(pl.ds(tail_row, num_rows), *index)], to, barrier)


class KvStream(NamedTuple):
    """The path of keys or of values from global memory to the pipeline.

    Attributes:
        kv_g: `KvRefs.k` or `.v`.
        stages: Stages that TMA fills.
        tail_g: `KvRefs.k_tail` or `.v_tail`.
        scales_g: `KvRefs.k_scale` or `.v_scale`; only read if there are scales per token.
        scales_s: Stages of the scales per token in shared memory; None without such scales.
    """

    kv_g: Ref
    stages: KvStages
    tail_g: Ref = None
    scales_g: Ref = None
    scales_s: Ref = None


class PrefillLoader:
    """A warp that loads queries and keys, values, or all of them for the warpgroups of a team."""

    def __init__(
        self,
        inputs: PrefillInputs,
        smem: PrefillSmem,
        barriers: PrefillBarriers,
        spec: PrefillSpec,
        team: int,
        *,
        loads_keys: bool = True,
        loads_values: bool = True,
    ):
        """Create a loader of a team.

        Args:
            inputs: Arrays that the kernel reads.
            smem: Shared memory of the thread block.
            barriers: Barriers of the thread block.
            spec: Static description of the kernel.
            team: Index of the team.
            loads_keys: Whether the warp loads keys and queries.
            loads_values: Whether the warp loads values.
        """
        self.query, self.table, self.spec = inputs.query, inputs.schedule.table, spec
        self.pipeline, self.team = KvPipeline(smem, barriers, spec.sizes, team), team
        self.run_length = spec.run_length
        kv, (keys, values) = inputs.kv, self.pipeline.loaded
        k_scales_s, v_scales_s = None, None
        if smem.quantized is not None:
            k_scales_s, v_scales_s = smem.quantized.k_scale, smem.quantized.v_scale
        key_stream = KvStream(kv.k, keys, kv.k_tail, kv.k_scale, k_scales_s)
        value_stream = KvStream(kv.v, values, kv.v_tail, kv.v_scale, v_scales_s)
        self.streams = (key_stream,) * loads_keys + (value_stream,) * loads_values
        self.loads_queries = loads_keys
        self.tiling = tiling = spec.shape.cache_tiling
        self.blocks = None if tiling is None else BlockTableRef(kv.block_table, tiling.block_size)
        self.copies_per_run = 1 if tiling is None else tiling.copies_per_run
        team_size = spec.sizes.team_size
        self.queries = [
            QueryBuffers(smem, barriers, spec.sizes, team * team_size + rank) for rank in range(team_size)
        ]

    def load_all(self, scheduler: PrefillTileScheduler) -> None:
        """Load all work tiles of the team."""
        rounds, tile_index = scheduler.assignment(self.team)

        def load(iteration: Scalar, step: Scalar) -> Scalar:
            work_tile, row = scheduler.read_to_registers(tile_index(iteration))
            self.load_work_tile(work_tile, row, iteration, step)
            return step + work_tile.num

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        # Interpret mode requires that every barrier completion is awaited; the hardware does not.
        if self.spec.is_interpreted:
            for stream in self.streams:
                self.pipeline.drain_stages(stream.stages, steps)
            if self.loads_queries:
                self.wait_for_queries(rounds)

    def load_work_tile(
        self, work_tile: PrefillWorkTile, row: Scalar, iteration: Scalar, step: Scalar
    ) -> None:
        """Load the queries, keys and values of a work tile.

        Args:
            work_tile: Work tile whose keys and values are loaded.
            row: Its row of the schedule's table.
            iteration: Its number among the team's work tiles.
            step: Step of its first KV tile.
        """
        first = self.run_indices(work_tile, work_tile.first_entries())
        load_queries = None
        if self.loads_queries:
            load_queries = functools.partial(self.load_queries, work_tile, row, iteration)

        def entries(i: Scalar) -> tuple[Scalar, ...]:
            return self.run_indices(work_tile, work_tile.tile_entries(i))

        def load_and_prefetch(i: Scalar, indices: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            next_indices = entries(jnp.minimum(i + 1, work_tile.num - 1))
            self.load_tile(work_tile, indices, step + i)
            return next_indices

        @pl.when(work_tile.num > 0)
        def _() -> None:
            # Keys before queries: stages are free while the previous work tile's queries are still in use.
            self.load_tile(work_tile, first, step, load_queries)
            has_registers = self.spec.copies_per_stage < MAX_COPIES_AT_ONCE or len(self.streams) == 1
            if self.spec.has_lists and has_registers:
                # A list is in global memory, so read entries one step ahead if registers allow it.
                second = entries(jnp.minimum(1, work_tile.num - 1))
                lax.fori_loop(1, work_tile.num, load_and_prefetch, second)
            else:

                @pl.loop(1, work_tile.num)
                def _(i: Scalar) -> None:
                    self.load_tile(work_tile, entries(i), step + i)

        if load_queries is not None:
            pl.when(work_tile.num == 0)(load_queries)

    def run_indices(self, work_tile: PrefillWorkTile, entries: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Return the index of each run of consecutive keys of a KV tile, from its entries."""
        return tuple(work_tile.kv_tile_index(entry) for entry in entries)

    def load_tile(
        self,
        work_tile: PrefillWorkTile,
        runs: tuple[Scalar, ...],
        step: Scalar,
        after_keys: Callable[[], None] | None = None,
    ) -> None:
        """Load the keys and values of a KV tile into the stage of a step.

        Args:
            work_tile: Work tile whose keys and values are loaded.
            runs: Index of each run of consecutive keys of the tile.
            step: Step of the KV tile.
            after_keys: Function that is called after the copies of keys and before the copies of values.
        """
        stage, stages = self.pipeline.stage(step), self.spec.sizes.stages
        kv_head = work_tile.kv_head
        # Read the block ids together and before the wait, so that their latencies overlap; as many as fit in
        # registers.
        num_copies = self.copies_per_run * len(runs)  # of each chunk of the head
        at_once = min(num_copies, MAX_COPIES_AT_ONCE)
        fits_registers = num_copies == at_once
        copies = self.tile_copies(work_tile, runs, kv_head) if fits_registers else []
        for index, stream in enumerate(self.streams):
            # A stage is free once all warpgroups of the team have read the tile that it held.
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, stream.stages.free.at[stage]))
            if fits_registers:
                self.copy(stream, stage, copies)
            else:
                # The bound is hidden from the compiler: unrolled, the ids would not fit in registers.
                @pl.loop(0, num_copies // at_once + jnp.minimum(step, 0))
                def _(n: Scalar, stream: KvStream = stream) -> None:
                    (tile,) = runs
                    self.copy(stream, stage, self.run_copies(work_tile, tile, kv_head, n * at_once, at_once))

            if after_keys is not None and index == 0:
                after_keys()

    def tile_copies(
        self, work_tile: PrefillWorkTile, runs: tuple[Scalar, ...], kv_head: Scalar
    ) -> list[KvCopy]:
        """Return the TMA copies of a KV tile, see run_copies."""
        return [
            copy
            for position, run in enumerate(runs)
            for copy in self.run_copies(work_tile, run, kv_head, 0, self.copies_per_run, position=position)
        ]

    def run_copies(
        self,
        work_tile: PrefillWorkTile,
        run: Scalar,
        kv_head: Scalar,
        first: Scalar | int,
        count: int,
        *,
        position: int = 0,
    ) -> list[KvCopy]:
        """Return TMA copies `first` to `first + count - 1` of a run of consecutive keys of a KV tile.

        A run of packed keys is one copy. In a paged cache there is one copy per block, or one per run if a
        block holds several runs. Keys that no query attends to may have no block; another block is loaded
        instead.

        Args:
            work_tile: Work tile whose keys and values are loaded.
            run: Index of the run among the runs of the request.
            kv_head: KV head.
            first: Index of the first copy.
            count: Number of copies. Static.
            position: Index of the run in the tile. Static.
        """
        tiling, first_key, first_row_s = self.tiling, run * self.run_length, position * self.run_length
        if tiling is None or self.blocks is None:
            first_row = work_tile["kv_start"] - work_tile.alignment_offset + first_key
            rows_s = pl.ds(first_row_s, self.run_length)
            return [KvCopy((kv_head,), rows_s, first_row=align_row(first_row))]
        visible = self.blocks.visible_blocks(
            work_tile["req"],
            work_tile.first_key_with_block,
            work_tile.end_key_with_block,
            is_checked=True,
        )
        column, copy = tiling.locate(first_key)
        blocks = visible.ids(column + first, count)
        rows = [
            pl.ds(first_row_s + (first + j) * tiling.tokens_per_copy, tiling.tokens_per_copy)
            for j in range(count)
        ]
        return [
            KvCopy(tiling.gmem_index(block, copy, kv_head), to, (block, kv_head, copy))
            for block, to in zip(blocks, rows, strict=True)
        ]

    def copy(self, stream: KvStream, stage: Scalar, copies: list[KvCopy]) -> None:
        """Start to fill a stage with keys or values, and with their scales if there is one per token."""
        head, full = self.spec.shape.head, stream.stages.full.at[stage]
        for copy in copies:
            for chunk in range(head.num_chunks):
                index = (*copy.source, *head.gmem_index(chunk, stage * 0))
                to = stream.stages.tiles.at[stage, chunk, copy.rows]
                if copy.first_row is None:
                    plgpu.copy_gmem_to_smem(stream.kv_g.at[index], to, full)
                else:
                    array, num_rows = TokenRows(stream.kv_g, stream.tail_g), self.run_length
                    copy_rows(array, copy.first_row, index, to, full, num_rows=num_rows)
        if stream.scales_s is not None:
            for copy in copies:
                source, to = stream.scales_g.at[copy.scales], stream.scales_s.at[stage, copy.rows]
                plgpu.copy_gmem_to_smem(source, to, full, oob_mode=BULK_COPY)

    def load_queries(self, work_tile: PrefillWorkTile, row: Scalar, iteration: Scalar) -> None:
        """Load each warpgroup's queries, and the work tile's row of the table."""
        head_dims, tokens = self.spec.shape.head, self.spec.sizes.warpgroup_tokens
        buffer = self.queries[0].buffer(iteration)
        for rank, queries in enumerate(self.queries):
            barrier = queries.barrier(buffer)
            # A buffer is free once the output that replaced its queries has left shared memory.
            pl.when(iteration >= queries.num)(functools.partial(plgpu.barrier_wait, queries.free.at[barrier]))
            # A warpgroup without valid rows may start before row 0.
            first_row = align_row(jnp.maximum(work_tile["first_row"] + rank * tokens, 0))
            for head, first in packed_heads(work_tile, self.spec):
                for chunk in range(head_dims.num_chunks):
                    index = (head, *head_dims.gmem_index(chunk, iteration * 0))
                    to, full = queries.query.at[buffer, chunk, pl.ds(first, tokens)], queries.full.at[barrier]
                    copy_rows(self.query, first_row, index, to, full, num_rows=tokens)
            plgpu.copy_gmem_to_smem(
                self.table.at[row], queries.table_row.at[buffer], queries.full.at[barrier]
            )

    def wait_for_queries(self, rounds: Scalar) -> None:
        """Wait until the warpgroups have freed all query buffers."""
        num = self.spec.sizes.query_buffers

        @pl.loop(jnp.maximum(rounds - num, 0), jnp.maximum(rounds - (num - 1), 0))
        def _(iteration: Scalar) -> None:
            for queries in self.queries:
                plgpu.barrier_wait(queries.free.at[queries.barrier(queries.buffer(iteration))])


# ------------------------------------------------------------------------------------- dequantization
class DequantizeOperand(NamedTuple):
    """Pipeline stages and scales of the operand that a warpgroup dequantizes: keys or values.

    Attributes:
        source: Stages of 8-bit tiles, which TMA fills.
        target: Stages of 16-bit tiles, which the matrix products read.
        granularity: What has a scale: `QuantizedKV.scales` of the operand.
        scale: `KvRefs.k_scale` or `.v_scale`, in global memory.
        token_scale: `QuantizedKvSmem.k_scale` or `.v_scale`; None without scales per token.
    """

    source: KvStages
    target: KvStages
    granularity: str | None
    scale: Ref
    token_scale: Ref


class Dequantizer:
    """One warpgroup that follows the loading warp through the work tiles and dequantizes keys or values."""

    def __init__(
        self,
        inputs: PrefillInputs,
        smem: PrefillSmem,
        barriers: PrefillBarriers,
        spec: PrefillSpec,
        index: int,
    ):
        """Create the dequantizer of keys (index 0) or of values (1)."""
        self.spec, self.pipeline = spec, KvPipeline(smem, barriers, spec.sizes, 0)
        kv, quantized_s = inputs.kv, smem.quantized
        assert spec.quantized is not None
        assert quantized_s is not None
        self.operand = DequantizeOperand(
            source=self.pipeline.loaded[index],
            target=(self.pipeline.keys, self.pipeline.values)[index],
            granularity=spec.quantized.scales[index],
            scale=(kv.k_scale, kv.v_scale)[index],
            token_scale=(quantized_s.k_scale, quantized_s.v_scale)[index],
        )

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Dequantize all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)

        def convert(iteration: Scalar, step: Scalar) -> Scalar:
            work_tile, _ = scheduler.read_to_registers(tile_index(iteration))
            self.dequantize_work_tile(work_tile, step)
            return step + work_tile.num

        steps = lax.fori_loop(0, rounds, convert, rounds * 0)
        if self.spec.is_interpreted:
            self.pipeline.drain_stages(self.operand.target, steps)

    def dequantize_work_tile(self, work_tile: PrefillWorkTile, step: Scalar) -> None:
        """Dequantize all KV tiles of a work tile; `step` is the step of its first KV tile."""
        operand = self.operand
        head = work_tile.kv_head
        head_scale = load_head_scale(operand.scale, head) if operand.granularity == "head" else None

        @pl.loop(0, work_tile.num)
        def _(i: Scalar) -> None:
            # Wait for the 8-bit tile, then for a 16-bit stage that the computing warpgroups have read.
            stage = self.pipeline.stage(step + i)
            plgpu.barrier_wait(operand.source.full.at[stage])
            is_reused = step + i >= self.spec.sizes.stages
            pl.when(is_reused)(functools.partial(plgpu.barrier_wait, operand.target.free.at[stage]))
            self.dequantize_stage(head, head_scale, stage)
            # Commit before either stage is passed on: results were wrong when the 8-bit one was released
            # before.
            plgpu.commit_smem()
            plgpu.barrier_arrive(operand.target.full.at[stage])
            plgpu.barrier_arrive(operand.source.free.at[stage])

    def dequantize_stage(self, head: Scalar, head_scale: Scalar | None, stage: Scalar) -> None:
        """Dequantize a stage, one panel at a time."""
        head_dims, operand = self.spec.shape.head, self.operand

        def apply_scale(x: Tile, columns: tuple[int, Slice]) -> Tile:
            if operand.granularity == "token":
                scale = plgpu.load(
                    operand.token_scale.at[stage], layout=QUANTIZED_LAYOUT.reduce(1), optimized=False
                )
                return x * lax.broadcast_in_dim(scale, x.shape, [0])
            if operand.granularity == "channel":
                channel_scale = operand.scale.at[(head, *columns)]
                scale = plgpu.load(channel_scale, layout=QUANTIZED_LAYOUT.reduce(0), optimized=False)
                return x * lax.broadcast_in_dim(scale, x.shape, [1])
            assert head_scale is not None
            return x * head_scale

        for chunk in range(head_dims.num_chunks):
            for first in range(0, head_dims.width, PANEL):
                columns = chunk, pl.ds(first, PANEL)
                index = (stage, chunk, slice(None), columns[1])
                scaled = None
                if operand.granularity is not None:
                    scaled = functools.partial(apply_scale, columns=columns)
                quantized = plgpu.load(operand.source.tiles.at[index], layout=QUANTIZED_LAYOUT)
                tile = dequantize(quantized, self.spec.dtype, scaled)
                store_unoptimized(operand.target.tiles.at[index], tile)
