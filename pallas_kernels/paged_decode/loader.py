"""The loads of the decode kernel: by a warp that issues TMA copies, or by the consumer with cp.async.

`DecodeSizes.uses_tma` selects one of them. `TmaPipeline` and `CpAsyncPipeline` are what the consumer sees; it
calls both in the same places. With TMA, `DecodeLoader` runs in another warp and fills the stages. A TMA copy
moves `CacheTiling.tokens_per_copy` tokens of one cache block, for one chunk of a head. With cp.async each
warp of the consumer fills its own rows of a stage again as soon as it has read them.
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.span import Segment, Span, SpanCursor, get_tile_keys, read_entries
from pallas_kernels.paged_decode.spec import DecodeBarriers, DecodeInputs, DecodeSmem
from pallas_kernels.ptx.cp_async import (
    commit_copies,
    copy_queries,
    release_to_warp,
    wait_for_warp,
    wait_for_warpgroup,
)
from pallas_kernels.ptx.cp_async_paged import copy_listed_keys, copy_tile, copy_token_scales
from pallas_kernels.shared.memory import BULK_COPY, padded_slice
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Ref, Scalar

type TileCopies = list[tuple[Scalar, Scalar]]
"""The copies that load a tile: (block id, index of the copy within the block)."""


class KVStream(NamedTuple):
    """The path of keys or of values from the cache to the stages.

    Attributes:
        cache_g: `KvRefs.k` or `.v`.
        scale_g: `KvRefs.k_scale` or `.v_scale` if it has one scale per token and head, else None.
        tile_s: Tiles of keys or values in SMEM, one per stage, [stages, num_chunks, tile_kv, width].
        scale_s: Scales of these tiles in SMEM, f32 [stages, tile_kv]; None without scales per token.
        full: One barrier per stage, at which each TMA copy into the stage arrives; None with cp.async.
        free: One barrier per stage, at which the consumer arrives when it has read the stage; None with
            cp.async.
    """

    cache_g: Ref
    scale_g: Ref
    tile_s: Ref
    scale_s: Ref
    full: Barriers
    free: Barriers


class CacheSource:
    """The locations of a tile's keys and values in the cache and in shared memory."""

    def __init__(self, inputs: DecodeInputs, smem: DecodeSmem, barriers: DecodeBarriers | None, span: Span):
        kv = inputs.kv
        self.inputs, self.q_s, self.span, self.spec = inputs, smem.q, span, span.spec
        has_k_scales, has_v_scales = self.spec.has_token_scales
        k_scale_g, v_scale_g = kv.k_scale if has_k_scales else None, kv.v_scale if has_v_scales else None
        self.tiling = self.spec.cache_tiling
        self.blocks = BlockTableRef(kv.block_table, self.spec.shape.block_size)
        k_barriers, v_barriers = (None, None), (None, None)
        if barriers is not None:
            k_barriers, v_barriers = (
                (barriers.k_full, barriers.k_free),
                (barriers.v_full, barriers.v_free),
            )
        self.streams = (
            KVStream(kv.k, k_scale_g, smem.k, smem.k_scale, *k_barriers),
            KVStream(kv.v, v_scale_g, smem.v, smem.v_scale, *v_barriers),
        )

    def tile_copies(self, segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...]) -> TileCopies:
        """Return the copies that load a tile.

        Args:
            segment: Segment of the tile.
            tile_index: Index of the tile in the segment; may exceed the number of tiles.
            entries: List entries of the tile; empty without lists.
        """
        ids = self.inputs.lists.ids
        entries = entries or read_entries(segment, tile_index, ids, self.spec)
        keys = get_tile_keys(segment, tile_index, entries, ids, self.spec)
        # Blocks outside of [first_key, end_key) may not be allocated. Another block is loaded instead, and
        # masked.
        blocks = self.blocks.visible_blocks(segment.request, segment.first_key, segment.end_key)
        copies = []
        for first in keys.run_starts:
            column, copy = self.tiling.locate(first)
            copies += [(block, copy) for block in blocks.ids(column, self.tiling.copies_per_run)]
        return copies


class DecodeLoader(CacheSource):
    """The warp that loads the queries of each segment, and the keys and values of each tile, by TMA."""

    def __init__(self, inputs: DecodeInputs, smem: DecodeSmem, barriers: DecodeBarriers, span: Span):
        super().__init__(inputs, smem, barriers, span)
        self.barriers = barriers

    def load_span(self) -> None:
        """Load all segments of the span in order."""
        span, stages, barriers = self.span, self.spec.sizes.stages, self.barriers
        loop = span.loop()

        def load(_: Scalar, cursor: SpanCursor) -> SpanCursor:
            # Read one row ahead, so that the latency passes during the segment.
            next_row = span.read_row(cursor.row.number + 1, start=cursor.row.end)
            segment = span.segment(cursor, loop.stop)
            self.load_segment(segment, cursor.step, cursor.segment_index)
            return span.advance(cursor, segment, next_row)

        end = lax.fori_loop(0, loop.num_segments, load, loop.first)
        # Interpret mode requires that every completion of a barrier is awaited; the hardware does not.
        for count, num_buffers, free in (
            (end.step, stages, (barriers.k_free, barriers.v_free)),
            (end.segment_index, 2, (barriers.q_free,)),
        ):

            @pl.loop(jnp.maximum(count - num_buffers, 0), count)
            def _(i: Scalar, num_buffers: int = num_buffers, free: tuple[Barriers, ...] = free) -> None:
                for stage_barriers in free:
                    plgpu.barrier_wait(stage_barriers.at[lax.rem(i, jnp.int32(num_buffers))])

    def load_query(self, segment: Segment, segment_index: Scalar) -> None:
        """Load the queries of a segment into buffer `segment_index % 2`."""
        shape, barriers, buffer = self.spec.shape, self.barriers, lax.rem(segment_index, jnp.int32(2))
        rows = padded_slice(shape.tile_q, shape.rows, segment_index * 0)
        # Wait until the consumer has finished the segment before the last, which used this buffer.
        pl.when(segment_index >= 2)(functools.partial(plgpu.barrier_wait, barriers.q_free.at[buffer]))
        for chunk in range(shape.head.num_chunks):
            # Rows past the last are loaded as zeros, and so are columns past the end of a chunk.
            chunk_index = shape.head.gmem_index(chunk, segment_index * 0)
            index = segment.row, self.span.head_tile, rows, *chunk_index
            plgpu.copy_gmem_to_smem(
                self.inputs.query.at[index], self.q_s.at[buffer, chunk], barriers.q_full.at[buffer]
            )

    def load_segment(self, segment: Segment, step: Scalar, segment_index: Scalar) -> None:
        """Load the queries and the tiles of a segment, if it is not empty.

        Args:
            segment: Segment to load.
            step: Number of tiles of the span before the segment.
            segment_index: Number of non-empty segments of the span before this one.
        """
        num_tiles = jnp.where(segment.is_nonempty, segment.num_tiles, 0)
        has_lists, ids = self.spec.shape.list_block_size is not None, self.inputs.lists.ids

        def load(
            i: Scalar, ahead: tuple[TileCopies, tuple[Scalar, ...]]
        ) -> tuple[TileCopies, tuple[Scalar, ...]]:
            # The block table is read one tile ahead, and a list, which selects its columns, two tiles ahead:
            # their latencies pass while this warp waits for a free stage.
            copies, next_entries = ahead
            entries_after_next = read_entries(segment, i + 2, ids, self.spec) if has_lists else ()
            next_copies = self.tile_copies(segment, i + 1, next_entries)
            self.load_tile(segment, step + i, copies)
            return next_copies, entries_after_next

        entries: list[tuple[Scalar, ...]] = [(), ()]
        if has_lists:
            entries = [read_entries(segment, jnp.int32(i), ids, self.spec) for i in range(2)]
        first_copies = self.tile_copies(segment, jnp.int32(0), entries[0])
        # Load the queries while the first block ids are being loaded.
        pl.when(segment.is_nonempty)(functools.partial(self.load_query, segment, segment_index))
        lax.fori_loop(0, num_tiles, load, (first_copies, entries[1]))

    def load_tile(self, segment: Segment, step: Scalar, copies: TileCopies) -> None:
        """Load the keys and the values of a tile into the stage of `step`."""
        stages, tokens_per_copy, head = (
            self.spec.sizes.stages,
            self.tiling.tokens_per_copy,
            self.spec.shape.head,
        )
        stage = lax.rem(step, jnp.int32(stages))
        for stream in self.streams:
            # Wait until the consumer has read the tile that used this stage before.
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            full = stream.full.at[stage]
            for j, (block, copy) in enumerate(copies):
                rows = pl.ds(j * tokens_per_copy, tokens_per_copy)
                index = self.tiling.gmem_index(block, copy, segment.kv_head)
                for chunk in range(head.num_chunks):
                    source = stream.cache_g.at[(*index, *head.gmem_index(chunk, copy * 0))]
                    plgpu.copy_gmem_to_smem(source, stream.tile_s.at[stage, chunk, rows], full)
                if stream.scale_g is not None:
                    plgpu.copy_gmem_to_smem(
                        stream.scale_g.at[block, segment.kv_head, copy],
                        stream.scale_s.at[stage, rows],
                        full,
                        oob_mode=BULK_COPY,
                    )


@runtime_checkable
class Pipeline(Protocol):
    """The loads of a span as the consumer sees them.

    The consumer calls `start_segment` and `wait_queries` once per segment, then for every tile
    `copies_after`, `wait_keys`, `release_keys`, `wait_values` and `release_values`, and at the segment's end
    `release_queries`. Stages are numbered over all tiles of a span.

    Attributes:
        num_query_buffers: Number of buffers of queries; a segment uses buffer `segment_index %
            num_query_buffers`.
    """

    num_query_buffers: int

    def start_segment(self, segment: Segment, step: Scalar) -> TileCopies:
        """Start the loads of a segment and return the copies of its first tile for which no stage is left.

        Args:
            segment: Segment, which is not empty.
            step: Number of tiles of the span before the segment.
        """
        ...

    def copies_after(self, segment: Segment, tile_index: Scalar) -> TileCopies:
        """Return the copies of the tile that follows the one which `release_keys` loads for this tile."""
        ...

    def wait_queries(self, buffer: Scalar) -> None:
        """Wait for the queries of the segment."""
        ...

    def release_queries(self, buffer: Scalar) -> None:
        """Declare that the queries have been read."""
        ...

    def wait_keys(self, stage: Scalar) -> None:
        """Wait for the keys of a tile and their scales."""
        ...

    def release_keys(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Declare that the keys of a tile have been read, so that the stage may be filled again.

        Args:
            stage: Stage of the tile.
            segment: Segment of the tile.
            tile_index: Index of the tile in the segment.
            copies: Copies of the tile that is `stages` tiles further.
        """
        ...

    def wait_values(self, stage: Scalar) -> None:
        """Wait for the values of a tile and their scales."""
        ...

    def release_values(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Declare that the values of a tile have been read; see `release_keys`."""
        ...


class TmaPipeline(Pipeline):
    """Loads that `DecodeLoader` issues in another warp; the consumer only waits at barriers."""

    num_query_buffers = 2

    def __init__(self, barriers: DecodeBarriers):
        self.barriers = barriers

    def start_segment(self, segment: Segment, step: Scalar) -> TileCopies:
        """Do nothing, because the loader runs ahead."""
        return []

    def copies_after(self, segment: Segment, tile_index: Scalar) -> TileCopies:
        """Return no copies, because the loader issues them."""
        return []

    def wait_queries(self, buffer: Scalar) -> None:
        """Wait until TMA has written the queries."""
        plgpu.barrier_wait(self.barriers.q_full.at[buffer])

    def release_queries(self, buffer: Scalar) -> None:
        """Arrive at the barrier for which the loader waits."""
        plgpu.barrier_arrive(self.barriers.q_free.at[buffer])

    def wait_keys(self, stage: Scalar) -> None:
        """Wait until TMA has written the keys."""
        plgpu.barrier_wait(self.barriers.k_full.at[stage])

    def release_keys(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Arrive at the barrier for which the loader waits."""
        plgpu.barrier_arrive(self.barriers.k_free.at[stage])

    def wait_values(self, stage: Scalar) -> None:
        """Wait until TMA has written the values."""
        plgpu.barrier_wait(self.barriers.v_full.at[stage])

    def release_values(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Arrive at the barrier for which the loader waits."""
        plgpu.barrier_arrive(self.barriers.v_free.at[stage])


class CpAsyncPipeline(CacheSource, Pipeline):
    """Loads that the consumer issues by cp.async.

    The groups of copies are, in order: the queries; keys and values of the first `stages` tiles; then keys of
    tile i + stages when those of tile i have been read, and likewise for values. Past the segment's last tile
    groups are empty. So at any wait, exactly `2 * stages - 1` groups are younger than the one waited for.
    """

    num_query_buffers = 1

    def start_segment(self, segment: Segment, step: Scalar) -> TileCopies:
        """Load the queries and the first `stages` tiles of a segment."""
        stages, shape, is_interpreted = self.spec.sizes.stages, self.spec.shape, self.spec.is_interpreted
        tiles = [self.copies_of(segment, jnp.int32(i)) for i in range(stages + 1)]
        query_g = self.inputs.query.at[segment.row, self.span.head_tile]
        copy_queries(self.q_s.at[0], query_g, head=shape.head, is_interpreted=is_interpreted)
        commit_copies(is_interpreted=is_interpreted)
        for i, copies in enumerate(tiles[:stages]):
            stage = lax.rem(step + i, jnp.int32(stages))
            for stream in self.streams:
                self.load(stream, stage, segment, jnp.int32(i), copies)
        return tiles[stages]

    def load(
        self, stream: KVStream, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies
    ) -> None:
        """Start to load keys or values of a tile; past the segment's last tile, nothing."""
        is_interpreted = self.spec.is_interpreted
        blocks, indices = [block for block, _ in copies], [copy for _, copy in copies]
        num_listed, tile_kv = segment.num_listed, self.spec.sizes.tile_kv

        def copy_listed() -> None:
            assert num_listed is not None
            copy_listed_keys(
                stream.tile_s.at[stage],
                stream.cache_g,
                self.inputs.lists.ids.at[segment.row],
                self.inputs.kv.block_table.at[segment.request],
                (segment.first_tile + tile_index) * tile_kv,
                num_listed,
                (segment.first_key, segment.end_key),
                segment.kv_head,
                tiling=self.tiling,
                is_interpreted=is_interpreted,
            )

        def copy_runs() -> None:
            source = blocks, indices, segment.kv_head
            copy_tile(
                stream.tile_s.at[stage],
                stream.cache_g,
                *source,
                tiling=self.tiling,
                is_interpreted=is_interpreted,
            )
            if stream.scale_g is not None:
                scale_s = stream.scale_s.at[stage]
                copy_token_scales(scale_s, stream.scale_g, *source, is_interpreted=is_interpreted)

        is_listed = self.spec.shape.list_block_size == 1
        pl.when(tile_index < segment.num_tiles)(copy_listed if is_listed else copy_runs)
        commit_copies(is_interpreted=is_interpreted)

    def copies_of(self, segment: Segment, tile_index: Scalar) -> TileCopies:
        """Return the copies that load a tile; none if each lane reads the list of single keys itself."""
        return [] if self.spec.shape.list_block_size == 1 else self.tile_copies(segment, tile_index, ())

    def copies_after(self, segment: Segment, tile_index: Scalar) -> TileCopies:
        """Read the block ids of a tile one tile ahead, so that their latency passes during this tile."""
        return self.copies_of(segment, tile_index + (self.spec.sizes.stages + 1))

    def wait_queries(self, buffer: Scalar) -> None:
        """Wait until all warps have written their part of the queries."""
        pending = 2 * self.spec.sizes.stages
        wait_for_warpgroup(num_pending=pending, is_interpreted=self.spec.is_interpreted)

    def release_queries(self, buffer: Scalar) -> None:
        """Do nothing: `copy_queries` waits for all warps."""

    def _wait(self) -> None:
        pending = 2 * self.spec.sizes.stages - 1
        wait_for_warp(num_pending=pending, is_interpreted=self.spec.is_interpreted)

    def _refill(
        self, stream: KVStream, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies
    ) -> None:
        release_to_warp(is_interpreted=self.spec.is_interpreted)
        self.load(stream, stage, segment, tile_index + self.spec.sizes.stages, copies)

    def wait_keys(self, stage: Scalar) -> None:
        """Wait for the keys of the warp."""
        self._wait()

    def release_keys(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Load the keys of the tile that is `stages` tiles further."""
        self._refill(self.streams[0], stage, segment, tile_index, copies)

    def wait_values(self, stage: Scalar) -> None:
        """Wait for the values of the warp."""
        self._wait()

    def release_values(self, stage: Scalar, segment: Segment, tile_index: Scalar, copies: TileCopies) -> None:
        """Load the values of the tile that is `stages` tiles further."""
        self._refill(self.streams[1], stage, segment, tile_index, copies)
