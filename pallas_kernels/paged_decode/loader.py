"""The loader of the decode kernel: one warp that fills shared memory by TMA copies.

A TMA copy moves `CacheTiling.tokens_per_copy` tokens of one cache block, for one chunk of a head.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.span import Segment, Span, SpanCursor, get_tile_keys, read_entries
from pallas_kernels.paged_decode.spec import DecodeBarriers, DecodeInputs, DecodeSmem
from pallas_kernels.shared.memory import BULK_COPY, padded_slice
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Ref, Scalar

type TmaCopies = list[tuple[Scalar, Scalar]]
"""The TMA copies of a tile: (block id, index of the copy within the block)."""


class KVStream(NamedTuple):
    """The path of keys or of values from the cache to the stages.

    Attributes:
        cache_g: `KvRefs.k` or `.v`.
        scale_g: `KvRefs.k_scale` or `.v_scale` if it has one scale per token and head, else None.
        tile_s: Tiles of keys or values in SMEM, one per stage, [stages, num_chunks, tile_kv, width].
        scale_s: Scales of these tiles in SMEM, f32 [stages, tile_kv]; None without scales per token.
        full: One barrier per stage, at which each TMA copy into the stage arrives.
        free: One barrier per stage, at which the consumer arrives when it has read the stage.
    """

    cache_g: Ref
    scale_g: Ref
    tile_s: Ref
    scale_s: Ref
    full: Barriers
    free: Barriers


class DecodeLoader:
    """The warp that loads the queries of each segment, and the keys and values of each tile."""

    def __init__(self, inputs: DecodeInputs, smem: DecodeSmem, barriers: DecodeBarriers, span: Span):
        kv = inputs.kv
        self.inputs, self.q_s, self.barriers, self.span, self.spec = inputs, smem.q, barriers, span, span.spec
        has_k_scales, has_v_scales = self.spec.has_token_scales
        k_scale_g, v_scale_g = kv.k_scale if has_k_scales else None, kv.v_scale if has_v_scales else None
        self.tiling = self.spec.cache_tiling
        self.blocks = BlockTableRef(kv.block_table, self.spec.shape.block_size)
        self.streams = (
            KVStream(kv.k, k_scale_g, smem.k, smem.k_scale, barriers.k_full, barriers.k_free),
            KVStream(kv.v, v_scale_g, smem.v, smem.v_scale, barriers.v_full, barriers.v_free),
        )

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
            i: Scalar, ahead: tuple[TmaCopies, tuple[Scalar, ...]]
        ) -> tuple[TmaCopies, tuple[Scalar, ...]]:
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

    def tile_copies(self, segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...]) -> TmaCopies:
        """Return the TMA copies that load a tile.

        Args:
            segment: Segment of the tile.
            tile_index: Index of the tile in the segment; may exceed the number of tiles.
            entries: List entries of the tile; empty without lists.
        """
        entries = entries or read_entries(segment, tile_index, self.inputs.lists.ids, self.spec)
        keys = get_tile_keys(segment, tile_index, entries, self.spec)
        # Blocks outside of [first_key, end_key) may not be allocated. Another block is loaded instead, and
        # masked.
        blocks = self.blocks.visible_blocks(segment.request, segment.first_key, segment.end_key)
        copies = []
        for first in keys.run_starts:
            column, copy = self.tiling.locate(first)
            copies += [(block, copy) for block in blocks.ids(column, self.tiling.num_copies)]
        return copies

    def load_tile(self, segment: Segment, step: Scalar, copies: TmaCopies) -> None:
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
