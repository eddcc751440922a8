"""The loader of the decode kernel: one warp that fills shared memory by TMA, one copy per block and chunk."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import DecodeBarriers, DecodeInputs, DecodeSmem, has_token_scales
from pallas_kernels.paged_decode.span import Segment, Span
from pallas_kernels.paged_decode.tile_keys import keys_of, read_entries
from pallas_kernels.shared.memory import BULK_COPY, padded_slice
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Ref, Scalar

type Copies = list[tuple[Scalar, Scalar]]
"""The copies of a tile: (block, index of the copy in the block)."""


class KVStream(NamedTuple):
    """The path of keys or of values from the cache to the stages.

    Attributes:
        cache_g: Cache, in the form of DecodeCacheRefs.
        scale_g: Scale per token and head, in the form of DecodeCacheRefs; None without.
        tile_s: Stages in SMEM, [stages, num_chunks, tile_kv, width].
        scale_s: Scales of the stages in SMEM, f32 [stages, tile_kv]; None without.
        full: Barriers that the copies into a stage arrive at.
        free: Barriers that the consumer of a stage arrives at.
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
        cache = inputs.cache
        k_scale_g = cache.k_scale if has_token_scales(cache.k_scale) else None
        v_scale_g = cache.v_scale if has_token_scales(cache.v_scale) else None
        self.inputs, self.q_s, self.barriers, self.span, self.spec = inputs, smem.q, barriers, span, span.spec
        self.tiling = self.spec.cache_tiling
        self.blocks = BlockTableRef(cache.block_table, self.spec.shape.block_size)
        self.streams = (
            KVStream(cache.k, k_scale_g, smem.k, smem.k_scale, barriers.k_full, barriers.k_free),
            KVStream(cache.v, v_scale_g, smem.v, smem.v_scale, barriers.v_full, barriers.v_free),
        )

    def load_span(self) -> None:
        """Load all segments, one after the other."""

        def visit(segment: Segment, step: Scalar, segment_index: Scalar) -> None:
            num_tiles = jnp.where(segment.is_nonempty, segment.num_tiles, 0)

            def load_query() -> None:
                pl.when(segment.is_nonempty)(lambda: self.load_query(segment, segment_index))

            self.load_segment(segment, num_tiles, step, load_query)

        num_steps, num_segments = self.span.walk(visit)
        # Interpret mode requires that every completion of a barrier is awaited; the hardware does not.
        stages, barriers = self.spec.sizes.stages, self.barriers
        await_last(num_steps, stages, (barriers.k_free, barriers.v_free))
        await_last(num_segments, 2, (barriers.q_free,))

    def load_query(self, segment: Segment, segment_index: Scalar) -> None:
        """Load the queries of a segment into one of two buffers, in turns."""
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

    def load_segment(
        self, segment: Segment, num_tiles: Scalar, step: Scalar, load_query: Callable[[], None]
    ) -> None:
        """Load the tiles of a segment.

        Args:
            segment: Segment to load.
            num_tiles: Number of its tiles; 0 if it is empty.
            step: Index of its first tile in the span.
            load_query: Loads the queries; called while the first block ids are on their way.
        """
        has_lists = self.spec.shape.list_block_size is not None

        def entries_of(tile_index: Scalar) -> tuple[Scalar, ...]:
            if not has_lists:
                return ()
            return read_entries(segment, tile_index, self.inputs.lists.ids, self.spec)

        def load(i: Scalar, ahead: tuple[Copies, tuple[Scalar, ...]]) -> tuple[Copies, tuple[Scalar, ...]]:
            # The block table is read one tile ahead, and a list, which selects its columns, two tiles ahead:
            # their latencies pass while this warp waits for a free stage.
            copies, next_entries = ahead
            entries_after_next = entries_of(i + 2)
            next_copies = self.copies_of(segment, i + 1, next_entries)
            self.load_tile(segment, step + i, copies)
            return next_copies, entries_after_next

        entries = [entries_of(jnp.int32(i)) for i in range(2)]
        first_copies = self.copies_of(segment, jnp.int32(0), entries[0])
        load_query()
        lax.fori_loop(0, num_tiles, load, (first_copies, entries[1]))

    def copies_of(self, segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...]) -> Copies:
        """Return the copies that fetch a tile, which may be one past the last.

        Args:
            segment: Segment of the tile.
            tile_index: Index of the tile in the segment.
            entries: List entries of the tile; empty without lists.
        """
        entries = entries or read_entries(segment, tile_index, self.inputs.lists.ids, self.spec)
        keys = keys_of(segment, tile_index, entries, self.spec)
        # Blocks outside of [low, high) may not be allocated: another block replaces them, and the mask hides
        # it.
        blocks = self.blocks.visible(segment.request, segment.low, segment.high)
        copies = []
        for first in keys.firsts:
            column, copy = self.tiling.table_column(first), self.tiling.copy_index(first)
            copies += [(block, copy) for block in blocks.ids(column, self.tiling.num_copies)]
        return copies

    def load_tile(self, segment: Segment, step: Scalar, copies: Copies) -> None:
        """Load the keys and the values of a tile into the stage of `step`."""
        stages, tokens_per_copy, head = self.spec.sizes.stages, self.tiling.rows, self.spec.shape.head
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


def await_last(count: Scalar, num_buffers: int, free: tuple[Barriers, ...]) -> None:
    """Wait until the last of `count` uses of a ring of buffers have ended."""

    @pl.loop(jnp.maximum(count - num_buffers, 0), count)
    def _(i: Scalar) -> None:
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(num_buffers))])
