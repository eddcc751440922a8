"""The loading warp: blocks of the cache into the stages of shared memory, one TMA copy a block and chunk."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Segment, Shape, entries_of, place_of
from pallas_kernels.shared import lanes
from pallas_kernels.shared.paged_kv import BlockTable, CacheCut


class Stream(NamedTuple):
    """Keys or values on their way from the cache to the stages.

    Attributes:
        cache_g: The cache.
        scale_g: [blocks, kv_heads, parts, block_size / parts] f32: a scale per token and head, or None.
        tile_s: [stages, chunks, tile_kv, width] in SMEM.
        scale_s: [stages, tile_kv] f32 in SMEM, or None.
        full: Barriers that a stage's copies arrive at.
        free: Barriers that a stage's reader arrives at.
    """

    cache_g: Any
    scale_g: Any
    tile_s: Any
    scale_s: Any
    full: Any
    free: Any


def make_loader(
    streams: tuple[Stream, Stream], table_g: Any, ids_g: Any, tiles: Tiles, shape: Shape
) -> Callable:
    """The function that fills stages of shared memory from the blocks of a segment's tiles.

    It calls `meanwhile` while it waits for the first blocks' numbers.
    """
    cut, in_cache = shape.cut, cache_cut(tiles, shape)
    rows, blocks_of = in_cache.rows, BlockTable(table_g, shape.block_size)

    def read_entries(segment: Segment, tile_index: Any) -> tuple[Any, ...]:
        return entries_of(segment, tile_index, ids_g, tiles.tile_kv, shape)

    def sources(segment: Segment, tile_index: Any, entries: tuple[Any, ...] = ()) -> list[Any]:
        """The block of each copy of a tile, and the part of it; the tile may be past the last."""
        entries = entries or read_entries(segment, tile_index)
        place = place_of(segment, tile_index, entries, tiles.tile_kv, shape)
        seen = blocks_of.seen(segment.request, segment.low, segment.high)  # the softmax masks what stands in
        found = []
        for first in place.firsts:
            ids = seen.ids(in_cache.column_of(first), in_cache.copies)
            found += [(block, in_cache.copy_of(first)) for block in ids]
        return found

    def copy(segment: Segment, step: Any, blocks: list[Any]) -> None:
        stage = lax.rem(step, jnp.int32(tiles.stages))
        for stream in streams:
            pl.when(step >= tiles.stages)(functools.partial(plgpu.barrier_wait, stream.free.at[stage]))
            full = stream.full.at[stage]
            for j, (block, part) in enumerate(blocks):
                to, at = pl.ds(j * rows, rows), in_cache.at(block, part, segment.kv_head)
                for chunk in range(cut.chunks):
                    keys = stream.cache_g.at[(*at, *cut.at(chunk, part * 0))]
                    plgpu.copy_gmem_to_smem(keys, stream.tile_s.at[stage, chunk, to], full)
                if stream.scale_g is not None:
                    plgpu.copy_gmem_to_smem(
                        stream.scale_g.at[block, segment.kv_head, part],
                        stream.scale_s.at[stage, to],
                        full,
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # no tensor map, so no alignment to 128
                    )

    def load(segment: Segment, num_tiles: Any, step: Any, meanwhile: Callable[[], None]) -> None:
        def one(i: Any, ahead: tuple[list[Any], tuple[Any, ...]]) -> tuple[list[Any], tuple[Any, ...]]:
            # The table is read a tile ahead, and a list, which says where in the table, two: their latencies
            # pass while a stage is waited for.
            blocks, entries = ahead
            further = read_entries(segment, i + 2) if shape.listed else ()
            following = sources(segment, i + 1, entries)
            copy(segment, step + i, blocks)
            return following, further

        entries = [read_entries(segment, jnp.int32(i)) if shape.listed else () for i in range(2)]
        first = sources(segment, jnp.int32(0), entries[0])
        meanwhile()
        lax.fori_loop(0, num_tiles, one, (first, entries[1]))

    return load


def prefetch_blocks(table_g: Any, slot: Any, slots: int) -> None:
    """Sends for the part of the block table that a span needs first, while the span is being looked for.

    Guessed: right where requests fill their rows, and elsewhere the page's translation is there at least.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=())
    run(lambda _, ref, index: lanes.prefetch(ref, index.registers.item()))(
        table_g, slot * (math.prod(table_g.shape) // slots)
    )


def cache_cut(tiles: Tiles, shape: Shape) -> CacheCut:
    """How a tile's neighbours are fetched from the cache."""
    piece = shape.piece(tiles.tile_kv)
    return CacheCut(block_size=shape.block_size, tile_kv=piece, is_hnd=shape.is_hnd, head=shape.cut)


def copies_per_stage(tiles: Tiles, shape: Shape, *, has_token_scale: bool) -> int:
    """Copies that arrive at a stage's barrier."""
    return tiles.tile_kv // cache_cut(tiles, shape).rows * (shape.cut.chunks + has_token_scale)
