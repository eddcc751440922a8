"""The loading warp: keys and values into a ring of stages, queries of an item into a buffer of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.paged_kv import BlockTable
from pallas_kernels.varlen_prefill.items import Item, Shape, aligned, stage_of
from pallas_kernels.varlen_prefill.tiles import WARPGROUP_ROWS, Tiles

M = WARPGROUP_ROWS
BLOCKS_AT_ONCE = 8


def make_kv_loader(
    k_g: Any, v_g: Any, blocks: BlockTable | None, ring: Any, tiles: Tiles, shape: Shape, team: int
) -> Callable:
    """The function that fills the next stage: `load(item, tile, step, between)`; between follows the keys."""
    k_s, v_s, k_full, v_full, k_free, v_free = ring
    tile, cut = tiles.tile_kv, shape.cut
    in_cache = None if shape.block_size is None else shape.in_cache(tile)

    def packed_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        rows = pl.ds(aligned(item["kv_start"] - item.skew + index * tile), tile)  # past the end: zeros
        return [((rows, kv_head), pl.ds(0, tile))]

    def paged_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        assert blocks is not None
        assert in_cache is not None
        first_key = index * tile
        seen = blocks.seen(item["req"], item.low, item.high, is_checked=True)
        ids = seen.ids(in_cache.column_of(first_key) + begin, count)
        at = lambda block: in_cache.at(block, in_cache.copy_of(first_key), kv_head)
        rows = in_cache.rows
        return [(at(block), pl.ds((begin + j) * rows, rows)) for j, block in enumerate(ids)]

    windows_of = packed_windows if in_cache is None else paged_windows
    num_windows = 1 if in_cache is None else in_cache.copies

    def load(item: Item, index: Any, step: Any, between: Callable | None = None) -> None:
        stage = stage_of(step, tiles, team)
        kv_head = lax.div(item.head, jnp.int32(shape.group))
        # Block ids together and before the wait, so that their latencies overlap; as many as registers hold.
        at_once = min(num_windows, BLOCKS_AT_ONCE)
        for kv_g, smem, full, free in ((k_g, k_s, k_full, k_free), (v_g, v_s, v_full, v_free)):
            wait = functools.partial(plgpu.barrier_wait, free.at[stage])

            def copy(windows: Any, kv_g: Any = kv_g, smem: Any = smem, full: Any = full) -> None:
                for index, rows in windows:
                    for chunk in range(cut.chunks):
                        source = kv_g.at[(*index, *cut.at(chunk, stage * 0))]
                        plgpu.copy_gmem_to_smem(source, smem.at[stage, chunk, rows], full.at[stage])

            if num_windows == at_once:
                if kv_g is k_g:
                    windows = windows_of(item, index, kv_head, 0, at_once)
                pl.when(step >= tiles.stages)(wait)
                copy(windows)
            else:
                pl.when(step >= tiles.stages)(wait)

                # A bound that the compiler does not see through: unrolled, ids would not fit the registers.
                @pl.loop(0, num_windows // at_once + jnp.minimum(step, 0))
                def _(n: Any, copy: Any = copy) -> None:
                    copy(windows_of(item, index, kv_head, n * at_once, at_once))

            if between is not None and kv_g is k_g:
                between()

    return load


def make_query_loader(refs: Any, tiles: Tiles, shape: Shape, team: int) -> Callable:
    """The function that loads an item's queries and columns, `load(item, row of the table, nth)`."""
    q_g, table_g, q_s, item_s, q_full, q_free = refs
    cut = shape.cut

    def load(item: Item, table_row: Any, nth: Any) -> None:
        buffer = lax.rem(nth, jnp.int32(tiles.query_buffers))
        for rank in range(tiles.team_size):
            wg = team * tiles.team_size + rank
            nth_barrier = wg * tiles.query_buffers + buffer
            pl.when(nth >= tiles.query_buffers)(functools.partial(plgpu.barrier_wait, q_free.at[nth_barrier]))
            # A warpgroup without rows may stand before the first.
            rows = pl.ds(aligned(jnp.maximum(item["first_row"] + rank * M, 0)), M)
            for chunk in range(cut.chunks):
                source = q_g.at[(rows, item.head, *cut.at(chunk, nth * 0))]
                plgpu.copy_gmem_to_smem(source, q_s.at[wg, buffer, chunk], q_full.at[nth_barrier])
            plgpu.copy_gmem_to_smem(table_g.at[table_row], item_s.at[wg, buffer], q_full.at[nth_barrier])

    return load
