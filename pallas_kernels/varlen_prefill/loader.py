"""The loading warp of a team: keys and values into the ring, queries of an item into buffers of their own."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import BULK_COPY
from pallas_kernels.shared.paged_kv import BlockTableRef, CacheTiling
from pallas_kernels.shared.types import Index, Ref, Scalar, Slice
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, KvStages, QueryBuffers
from pallas_kernels.varlen_prefill.refs import KvRefs, PrefillBarriers, PrefillInputs, PrefillSmem
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import (
    PrefillTileScheduler,
    PrefillWorkTile,
    align_row,
    packed_heads,
)

BLOCKS_AT_ONCE = 8


class KvCopy(NamedTuple):
    """One copy.

    Attributes:
        source: Where keys are in global memory, but for the chunk of a head.
        rows: Which rows of a tile they are.
        scales: Where scales per token are.
    """

    source: Index
    rows: Slice
    scales: Index = ()


class PackedKvCopies:
    """Packed keys: a tile is one copy, past the end of the array zeros."""

    copies = 1

    def __init__(self, spec: PrefillSpec):
        self.tile_kv = spec.sizes.tile_kv

    def of(
        self, item: PrefillWorkTile, tile: Scalar, kv_head: Scalar, first: Scalar | int, count: int
    ) -> list[KvCopy]:
        """Copies `first` to `first + count` of a tile."""
        rows = pl.ds(align_row(item["kv_start"] - item.skew + tile * self.tile_kv), self.tile_kv)
        return [KvCopy((rows, kv_head), pl.ds(0, self.tile_kv))]


class PagedKvCopies:
    """A paged cache: a copy is a block, or what of it a tile holds."""

    def __init__(self, table: Ref, in_cache: CacheTiling, spec: PrefillSpec):
        self.table, self.in_cache = BlockTableRef(table, in_cache.block_size), in_cache
        self.tile_kv, self.copies = spec.sizes.tile_kv, in_cache.num_copies

    def of(
        self, item: PrefillWorkTile, tile: Scalar, kv_head: Scalar, first: Scalar | int, count: int
    ) -> list[KvCopy]:
        """As PackedWindows.of. Keys that no query sees may have no block: another stands in."""
        cut, first_key = self.in_cache, tile * self.tile_kv
        seen = self.table.visible(item["req"], item.low, item.high, is_checked=True)
        blocks = seen.ids(cut.table_column(first_key) + first, count)
        copy = cut.copy_index(first_key)
        rows = [pl.ds((first + j) * cut.rows, cut.rows) for j in range(count)]
        return [
            KvCopy(cut.gmem_index(block, copy, kv_head), to, (block, kv_head, copy))
            for block, to in zip(blocks, rows, strict=True)
        ]


class PrefillLoader:
    """Loads what the warpgroups of a team compute with."""

    def __init__(
        self,
        inputs: PrefillInputs,
        smem: PrefillSmem,
        pipeline: PrefillBarriers,
        spec: PrefillSpec,
        team: int,
    ):
        self.query, self.table, self.spec = inputs.query, inputs.schedule.table, spec
        self.ring, self.team = KvPipeline(smem, pipeline, spec.sizes, team), team
        keys, values = self.ring.loaded
        self.streams = (inputs.cache.k, keys), (inputs.cache.v, values)
        # Scales per token, and where they go.
        self.scales: list[tuple[Ref, Ref]] = [(None, None)] * 2
        if smem.narrow is not None:
            narrow = smem.narrow
            self.scales = [(inputs.cache.k_scale, narrow.k_scale), (inputs.cache.v_scale, narrow.v_scale)]
        self.windows = make_kv_copies(inputs.cache, spec)
        team_size = spec.sizes.team_size
        self.queries = [
            QueryBuffers(smem, pipeline, spec.sizes, team * team_size + rank) for rank in range(team_size)
        ]

    def load_share(self, work: PrefillTileScheduler) -> None:
        """All items of the team."""
        rounds, number_of = work.rounds_of(self.team)

        def load(nth: Scalar, step: Scalar) -> Scalar:
            item, row = work.in_registers(number_of(nth))
            self.load_item(item, row, nth, step)
            return step + item.num

        steps = lax.fori_loop(0, rounds, load, rounds * 0)
        # Interpret mode insists that every completion is awaited; to the hardware it is all one.
        if self.spec.is_interpreted:
            self.ring.wait_until_read(steps)
            self.wait_for_queries(rounds)

    def load_item(self, item: PrefillWorkTile, row: Scalar, nth: Scalar, step: Scalar) -> None:
        """An item, whose row of the schedule is `row` and whose first keys are those of `step`."""
        tile, first = lambda i: item.tile_of(item.entry(i)), item.tile_of(item.first_entry())

        def load_next(i: Scalar, index: Scalar) -> Scalar:
            following = tile(jnp.minimum(i + 1, item.num - 1))
            self.load_tile(item, index, step + i)
            return following

        @pl.when(item.num > 0)
        def _() -> None:
            # Keys before queries: the ring has room while the queries of the item before are in use.
            self.load_tile(item, first, step, lambda: self.load_queries(item, row, nth))
            if self.spec.has_lists and self.spec.copies < BLOCKS_AT_ONCE:
                # Read a step ahead, where registers allow it: a list is in global memory.
                lax.fori_loop(1, item.num, load_next, tile(jnp.minimum(1, item.num - 1)))
            else:
                pl.loop(1, item.num)(lambda i: self.load_tile(item, tile(i), step + i))

        pl.when(item.num == 0)(lambda: self.load_queries(item, row, nth))

    def load_tile(
        self, item: PrefillWorkTile, tile: Scalar, step: Scalar, between: Callable[[], None] | None = None
    ) -> None:
        """A tile's keys, then what is to be done between, then its values, into the stage of a step."""
        stage, stages = self.ring.stage(step), self.spec.sizes.stages
        kv_head = item.kv_head
        # Block ids together and before the wait, so that their latencies overlap; as many as registers hold.
        copies, at_once = self.windows.copies, min(self.windows.copies, BLOCKS_AT_ONCE)
        is_few = copies == at_once
        windows = self.windows.of(item, tile, kv_head, 0, at_once) if is_few else []
        for nth, (kv_g, stream) in enumerate(self.streams):
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            if is_few:
                self.copy(kv_g, stream, stage, windows)
                self.copy_scales(nth, stream, stage, windows)
            else:
                # A bound that the compiler does not see through: unrolled, ids would not fit the registers.
                @pl.loop(0, copies // at_once + jnp.minimum(step, 0))
                def _(n: Scalar, nth: int = nth, kv_g: Ref = kv_g, stream: KvStages = stream) -> None:
                    windows = self.windows.of(item, tile, kv_head, n * at_once, at_once)
                    self.copy(kv_g, stream, stage, windows)
                    self.copy_scales(nth, stream, stage, windows)

            if between is not None and nth == 0:
                between()

    def copy(self, kv_g: Ref, stream: KvStages, stage: Scalar, windows: list[KvCopy]) -> None:
        """Begins to fill a stage."""
        cut = self.spec.shape.cut
        for window in windows:
            for chunk in range(cut.num_chunks):
                source = kv_g.at[(*window.source, *cut.gmem_index(chunk, stage * 0))]
                to = stream.tiles.at[stage, chunk, window.rows]
                plgpu.copy_gmem_to_smem(source, to, stream.full.at[stage])

    def copy_scales(self, nth: int, stream: KvStages, stage: Scalar, windows: list[KvCopy]) -> None:
        """Scales per token besides, if keys (0) or values (1) have some."""
        scales_g, scales_s = self.scales[nth]
        if scales_s is not None:
            for window in windows:
                source, to = scales_g.at[window.scales], scales_s.at[stage, window.rows]
                plgpu.copy_gmem_to_smem(source, to, stream.full.at[stage], oob_mode=BULK_COPY)

    def load_queries(self, item: PrefillWorkTile, row: Scalar, nth: Scalar) -> None:
        """Each warpgroup's queries, and the item's columns."""
        cut, each = self.spec.shape.cut, self.spec.sizes.warpgroup_tokens
        buffer = self.queries[0].buffer(nth)
        for rank, queries in enumerate(self.queries):
            barrier = queries.barrier(buffer)
            pl.when(nth >= queries.num)(functools.partial(plgpu.barrier_wait, queries.free.at[barrier]))
            # A warpgroup without rows may stand before the first.
            tokens = pl.ds(align_row(jnp.maximum(item["first_row"] + rank * each, 0)), each)
            for head, first in packed_heads(item, self.spec):
                for chunk in range(cut.num_chunks):
                    source = self.query.at[(tokens, head, *cut.gmem_index(chunk, nth * 0))]
                    to = queries.query.at[buffer, chunk, pl.ds(first, each)]
                    plgpu.copy_gmem_to_smem(source, to, queries.full.at[barrier])
            plgpu.copy_gmem_to_smem(self.table.at[row], queries.columns.at[buffer], queries.full.at[barrier])

    def wait_for_queries(self, rounds: Scalar) -> None:
        """Waits until the last items' queries have been read."""
        num = self.spec.sizes.query_buffers

        @pl.loop(jnp.maximum(rounds - num, 0), jnp.maximum(rounds - (num - 1), 0))
        def _(nth: Scalar) -> None:
            for queries in self.queries:
                plgpu.barrier_wait(queries.free.at[queries.barrier(queries.buffer(nth))])


def make_kv_copies(cache: KvRefs, spec: PrefillSpec) -> PackedKvCopies | PagedKvCopies:
    """Where the keys of a tile are."""
    in_cache = spec.shape.in_cache
    return PackedKvCopies(spec) if in_cache is None else PagedKvCopies(cache.block_table, in_cache, spec)
