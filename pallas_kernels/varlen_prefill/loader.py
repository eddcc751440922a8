"""The loading warp: keys and values into a ring of stages, queries of an item into a buffer of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.tma import padded_slice
from pallas_kernels.varlen_prefill.items import Item, Shape, aligned, stage_of
from pallas_kernels.varlen_prefill.tiles import WARPGROUP_ROWS, Tiles

M = WARPGROUP_ROWS
BLOCKS_AT_ONCE = 8


def make_kv_loader(
    k_g: Any, v_g: Any, table_g: Any, ring: Any, tiles: Tiles, shape: Shape, team: int
) -> Callable:
    """The function that fills the next stage: `load(item, tile, step, between)`; between follows the keys."""
    k_s, v_s, k_full, v_full, k_free, v_free = ring
    tile, cut, size = tiles.tile_kv, shape.cut, shape.block_size

    def packed_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        rows = pl.ds(aligned(item["kv_start"] - item.skew + index * tile), tile)  # past the end: zeros
        return [((rows, kv_head), pl.ds(0, tile))]

    def paged_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        assert size is not None
        rows, first_key = min(tile, size), index * tile
        # Keys that no query sees may have no block: the nearest that one does see stands in.
        low, high = lax.div(item.low, jnp.int32(size)), lax.div(item.high - 1, jnp.int32(size))
        column = lax.div(first_key, jnp.int32(size))
        blocks = [table_g[item["req"], jnp.clip(column + (begin + j), low, high)] for j in range(count)]
        part = lax.div(lax.rem(first_key, jnp.int32(size)), jnp.int32(rows))
        tokens = pl.ds(0, rows)
        at = lambda block: (block, kv_head, part, tokens) if shape.is_hnd else (block, part, tokens, kv_head)
        return [(at(block), pl.ds((begin + j) * rows, rows)) for j, block in enumerate(blocks)]

    windows_of = packed_windows if size is None else paged_windows
    num_windows = 1 if size is None else max(tile // size, 1)

    def load(item: Item, index: Any, step: Any, between: Callable | None = None) -> None:
        stage = stage_of(step, tiles, team)
        kv_head = lax.div(item.head, jnp.int32(shape.group))
        columns = padded_slice(cut.width, cut.chunk, stage * 0)
        # Block ids together and before the wait, so that their latencies overlap; as many as registers hold.
        at_once = min(num_windows, BLOCKS_AT_ONCE)
        for kv_g, smem, full, free in ((k_g, k_s, k_full, k_free), (v_g, v_s, v_full, v_free)):
            wait = functools.partial(plgpu.barrier_wait, free.at[stage])

            def copy(windows: Any, kv_g: Any = kv_g, smem: Any = smem, full: Any = full) -> None:
                for index, rows in windows:
                    for chunk in range(cut.chunks):
                        source = kv_g.at[(*index, chunk, columns) if cut.is_padded else index]
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
        columns = padded_slice(cut.width, cut.chunk, nth * 0)
        for rank in range(tiles.team_size):
            wg = team * tiles.team_size + rank
            nth_barrier = wg * tiles.query_buffers + buffer
            pl.when(nth >= tiles.query_buffers)(functools.partial(plgpu.barrier_wait, q_free.at[nth_barrier]))
            # A warpgroup without rows may stand before the first.
            rows = pl.ds(aligned(jnp.maximum(item["first_row"] + rank * M, 0)), M)
            for chunk in range(cut.chunks):
                index = (rows, item.head, chunk, columns) if cut.is_padded else (rows, item.head)
                plgpu.copy_gmem_to_smem(q_g.at[index], q_s.at[wg, buffer, chunk], q_full.at[nth_barrier])
            plgpu.copy_gmem_to_smem(table_g.at[table_row], item_s.at[wg, buffer], q_full.at[nth_barrier])

    return load
