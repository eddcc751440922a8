"""The producer of the decode kernel: one warp that fills shared memory by TMA, a copy a block and chunk."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import Inputs, Pipeline, Smem, has_token_scales
from pallas_kernels.paged_decode.span import Segment, Span
from pallas_kernels.paged_decode.tile_keys import entries_of, keys_of
from pallas_kernels.shared.memory import BULK_COPY, padded_slice
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Ref, Scalar

type Copies = list[tuple[Scalar, Scalar]]
"""Block, and which copy of it, of each copy of a tile."""


class Stream(NamedTuple):
    """Keys or values on their way from the cache to the stages.

    Attributes:
        cache_g: The cache, as CacheRefs has it.
        scale_g: A scale per token and head, likewise, or None.
        tile_s: [stages, chunks, tile_kv, width] in SMEM.
        scale_s: [stages, tile_kv] f32 in SMEM, or None.
        full: Barriers that a stage's copies arrive at.
        free: Barriers that a stage's reader arrives at.
    """

    cache_g: Ref
    scale_g: Ref
    tile_s: Ref
    scale_s: Ref
    full: Barriers
    free: Barriers


class Loader:
    """The warp that loads: queries of each segment, keys and values of each tile."""

    def __init__(self, inputs: Inputs, smem: Smem, pipeline: Pipeline, span: Span):
        cache, of_tokens = inputs.cache, lambda scale: scale if has_token_scales(scale) else None
        self.inputs, self.q_s, self.pipeline, self.span, self.spec = inputs, smem.q, pipeline, span, span.spec
        self.cut = self.spec.cache_tiling
        self.blocks = BlockTableRef(cache.block_table, self.spec.shape.block_size)
        self.streams = (
            Stream(cache.k, of_tokens(cache.k_scale), smem.k, smem.k_scale, pipeline.k_full, pipeline.k_free),
            Stream(cache.v, of_tokens(cache.v_scale), smem.v, smem.v_scale, pipeline.v_full, pipeline.v_free),
        )

    def load_span(self) -> None:
        """All segments, one after the other."""

        def visit(segment: Segment, step: Scalar, nth: Scalar) -> None:
            num_tiles = jnp.where(segment.is_live, segment.num_tiles, 0)
            load_query = lambda: pl.when(segment.is_live)(lambda: self.load_query(segment, nth))
            self.load_segment(segment, num_tiles, step, load_query)

        steps, queries = self.span.walk(visit)
        stages, pipeline = self.spec.sizes.stages, self.pipeline
        # Interpret mode insists that every completion is awaited; to the hardware it is all one.
        await_last(steps, stages, (pipeline.k_free, pipeline.v_free))
        await_last(queries, 2, (pipeline.q_free,))

    def load_query(self, segment: Segment, nth: Scalar) -> None:
        """The queries of the `nth` live segment."""
        shape, pipeline, buffer = self.spec.shape, self.pipeline, lax.rem(nth, jnp.int32(2))
        rows = padded_slice(shape.tile_q, shape.rows, nth * 0)
        pl.when(nth >= 2)(functools.partial(plgpu.barrier_wait, pipeline.q_free.at[buffer]))
        for chunk in range(shape.cut.num_chunks):
            # Rows past the last load as zeros, and so do columns past the end of a chunk.
            at = segment.row, self.span.head_tile, rows, *shape.cut.gmem_index(chunk, nth * 0)
            plgpu.copy_gmem_to_smem(
                self.inputs.query.at[at], self.q_s.at[buffer, chunk], pipeline.q_full.at[buffer]
            )

    def load_segment(
        self, segment: Segment, num_tiles: Scalar, step: Scalar, meanwhile: Callable[[], None]
    ) -> None:
        """Its tiles into the stages from `step` on; calls `meanwhile` while it waits for the first blocks."""
        has_lists = self.spec.shape.list_block_size is not None
        read_entries = lambda i: entries_of(segment, i, self.inputs.lists.ids, self.spec) if has_lists else ()

        def one(i: Scalar, ahead: tuple[Copies, tuple[Scalar, ...]]) -> tuple[Copies, tuple[Scalar, ...]]:
            # The table is read a tile ahead, and a list, which says where in the table, two: their latencies
            # pass while a stage is waited for.
            copies, entries = ahead
            further = read_entries(i + 2)
            following = self.copies_of(segment, i + 1, entries)
            self.load_tile(segment, step + i, copies)
            return following, further

        entries = [read_entries(jnp.int32(i)) for i in range(2)]
        first = self.copies_of(segment, jnp.int32(0), entries[0])
        meanwhile()
        lax.fori_loop(0, num_tiles, one, (first, entries[1]))

    def copies_of(self, segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...]) -> Copies:
        """The copies that bring a tile, maybe one past the last; `entries`: its list's, if there is one."""
        entries = entries or entries_of(segment, tile_index, self.inputs.lists.ids, self.spec)
        keys = keys_of(segment, tile_index, entries, self.spec)
        seen = self.blocks.visible(
            segment.request, segment.low, segment.high
        )  # the mask hides what stands in
        found = []
        for first in keys.firsts:
            column, copy = self.cut.table_column(first), self.cut.copy_index(first)
            found += [(block, copy) for block in seen.ids(column, self.cut.num_copies)]
        return found

    def load_tile(self, segment: Segment, step: Scalar, copies: Copies) -> None:
        """Keys and values of a tile into the stage of `step`, once it is free."""
        stages, rows, head = self.spec.sizes.stages, self.cut.rows, self.spec.shape.cut
        stage = lax.rem(step, jnp.int32(stages))
        for stream in self.streams:
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            full = stream.full.at[stage]
            for j, (block, copy) in enumerate(copies):
                to, at = pl.ds(j * rows, rows), self.cut.gmem_index(block, copy, segment.kv_head)
                for chunk in range(head.num_chunks):
                    source = stream.cache_g.at[(*at, *head.gmem_index(chunk, copy * 0))]
                    plgpu.copy_gmem_to_smem(source, stream.tile_s.at[stage, chunk, to], full)
                if stream.scale_g is not None:
                    plgpu.copy_gmem_to_smem(
                        stream.scale_g.at[block, segment.kv_head, copy],
                        stream.scale_s.at[stage, to],
                        full,
                        oob_mode=BULK_COPY,
                    )


def await_last(count: Scalar, buffers: int, frees: tuple[Barriers, ...]) -> None:
    """Waits until the last of `count` uses of a ring of buffers are over."""

    @pl.loop(jnp.maximum(count - buffers, 0), count)
    def _(i: Scalar) -> None:
        for free in frees:
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(buffers))])
