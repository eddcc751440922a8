"""Each device function of the PTX code in a kernel of its own, and its fallback on the same arrays."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx import (
    bit_mask,
    cp_async,
    cp_async_paged,
    lane_sums,
    look_up,
    split_signs,
    stores,
    tile_mma,
    warp_votes,
)
from pallas_kernels.ptx.fallback import DeviceFunction
from pallas_kernels.ptx.warp_mma import (
    WARPS,
    WarpTile,
    load_query_fragments,
    pv_mma,
    qk_mma,
    store_warp_outputs,
    warp_row_max,
)
from pallas_kernels.shared.layouts import COLUMN, ROW, WGMMA
from pallas_kernels.shared.memory import head_chunks, store_unoptimized, swizzled_smem
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.types import f32

TEAM_COPIES = (
    cp_async_paged.copy_block_rows,
    cp_async.copy_token_rows,
    cp_async.copy_numbers,
    cp_async.wait_for_team,
    cp_async.warp_index,
)


class Case(NamedTuple):
    """A kernel and its fallback on the same arrays; both return a tuple of arrays."""

    arrays: tuple[Any, ...]
    on_gpu: Callable[..., tuple[Any, ...]]
    fallback: Callable[..., tuple[Any, ...]]
    functions: tuple[Any, ...]  # the device functions that it runs
    tolerance: float = 0.0


def kernel(
    body: Any, *outs: Any, scratch: tuple[Any, ...] = (), grid: int = 1
) -> Callable[..., tuple[Any, ...]]:
    """Return a kernel with one warpgroup per thread block; `body` gets input, output and scratch refs."""
    out_type = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outs)
    return plgpu.kernel(body, out_type=out_type, scratch_types=scratch, grid=(grid,), grid_names=("nth",))


def load(ref: Any, layout: Any = WGMMA) -> Any:
    return plgpu.load(ref, layout=layout, optimized=False)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stored(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return random values in a cache dtype."""
    if jnp.dtype(dtype) == jnp.int8:
        return np.asarray(np.clip(np.round(x * 40), -128, 127), jnp.int8)
    return np.asarray(x, f32).astype(jnp.dtype(dtype))


def tile_of(
    tile_q: int, head_dim: int, dtype: Any, cache_dtype: Any, has_fp8_conversion: bool = True
) -> WarpTile:
    cut, cache_dtype = head_chunks(head_dim, itemsize=jnp.dtype(cache_dtype).itemsize), jnp.dtype(cache_dtype)
    return WarpTile(tile_q, cut, jnp.dtype(dtype), cache_dtype, cache_dtype, has_fp8_conversion)


def scores(tile_q: int, head_dim: int, dtype: Any, cache_dtype: Any, has_fp8_conversion: bool = True) -> Case:
    """Return the case of scores from shared memory; the result is converted, since only MMA reads its
    register layout.
    """
    tile = tile_of(tile_q, head_dim, dtype, cache_dtype, has_fp8_conversion)
    cut = tile.head_chunks
    q = np.asarray(drawn(cut.num_chunks, tile_q, cut.width) * 30, dtype)
    k = stored(drawn(cut.num_chunks, 64, cut.width, seed=1), cache_dtype)

    def body(q_g, k_g, s_g, factor_g, q_s, k_s, loaded):
        plgpu.copy_gmem_to_smem(q_g, q_s, loaded)
        plgpu.copy_gmem_to_smem(k_g, k_s, loaded)
        plgpu.barrier_wait(loaded)
        operand, factor = load_query_fragments.on_gpu(q_s, tile=tile)
        store_unoptimized(s_g, qk_mma.on_gpu(k_s, operand, tile=tile))
        store_unoptimized(factor_g, factor)

    def fallback(q, k):
        operand, factor = load_query_fragments.fallback(jax.new_ref(q), tile=tile)
        return qk_mma.fallback(jax.new_ref(k), operand, tile=tile), factor

    scratch = (
        swizzled_smem(q.shape, q.dtype),
        swizzled_smem(k.shape, k.dtype, width=cut.width),
        plgpu.Barrier(num_arrivals=2),
    )
    run = kernel(body, (tile.shape, f32), (tile.shape, f32), scratch=scratch)
    return Case((q, k), run, fallback, (load_query_fragments, qk_mma), 1e-4)


def values(
    tile_q: int, head_dim: int, dtype: Any, cache_dtype: Any, piece: int, has_fp8_conversion: bool = True
) -> Case:
    """Return the case of values in shared memory, in place of accumulators whose column layout is private."""
    tile = tile_of(tile_q, head_dim, dtype, cache_dtype, has_fp8_conversion)
    cut, dim = tile.head_chunks, tile.head_chunks.padded_dim
    v = stored(drawn(cut.num_chunks, 64, cut.width), cache_dtype)
    p = np.asarray(np.abs(drawn(64, tile_q, seed=1)))
    row_max = np.asarray(np.repeat(drawn(WARPS, tile_q, seed=2), 16, axis=0))
    firsts = np.arange(64 // piece, dtype=np.int32) * (piece + 100)
    ends = np.asarray([5, firsts[-1] + piece - 3, *firsts], jnp.int32)
    out = WARPS, dim + 2, tile_q

    def results(code: str, v_s: Any, p: Any, row_max: Any, merge_s: Any, ends: list[Any], accs: Any) -> None:
        for _ in range(2):  # what was there counts, too
            accs = getattr(pv_mma, code)(v_s, p, accs, *ends[:2], ends[2:], run_length=piece, tile=tile)
        getattr(store_warp_outputs, code)(merge_s, accs, row_max, p, tile=tile)

    def body(v_g, p_g, top_g, ends_g, out_g, v_s, merge_s, loaded):
        plgpu.copy_gmem_to_smem(v_g, v_s, loaded)
        plgpu.barrier_wait(loaded)
        accs = [plgpu.layout_cast(jnp.zeros(tile.shape, f32), WGMMA)] * tile.num_accs
        ends_here = [ends_g[i] for i in range(len(ends))]
        results("on_gpu", v_s, load(p_g), load(top_g), merge_s, ends_here, accs)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(merge_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    def fallback(v, p, row_max, ends_here):
        merge_s = jax.new_ref(jnp.full(out, jnp.nan, f32))
        accs = [jnp.zeros(tile.shape, f32)] * tile.num_accs
        results("fallback", jax.new_ref(v), p, row_max, merge_s, list(ends_here), accs)
        return (merge_s[...],)

    scratch = swizzled_smem(v.shape, v.dtype, width=cut.width), plgpu.SMEM(out, f32), plgpu.Barrier()
    run = kernel(body, (out, f32), scratch=scratch)
    return Case((v, p, row_max, ends), run, fallback, (pv_mma, store_warp_outputs), 1e-4)


def largest() -> Case:
    tile = tile_of(24, 64, jnp.bfloat16, jnp.bfloat16)

    def body(x_g, out_g):
        store_unoptimized(out_g, warp_row_max.on_gpu(load(x_g), tile=tile))

    fallback = lambda x: (warp_row_max.fallback(x, tile=tile),)
    return Case((np.asarray(drawn(64, 24)),), kernel(body, ((64, 24), f32)), fallback, (warp_row_max,))


def votes_of(y: np.ndarray, row_max: np.ndarray) -> Case:
    """Return the case of warps that vote for their own 16 rows; the fallback computes one vote per warp."""

    def body(y_g, top_g, due_g):
        spread = lambda x: plgpu.layout_cast(
            lax.broadcast_in_dim(x.astype(jnp.int32), row_max.shape, []), ROW
        )
        due = warp_votes.needs_rescale.on_gpu(load(y_g), load(top_g, ROW))
        store_unoptimized(due_g, spread(due))

    def fallback(y, row_max):
        return (warp_votes.needs_rescale.fallback(y, row_max),)

    ran = kernel(body, (row_max.shape, jnp.int32))
    any_of = lambda *arrays: tuple((x != 0).any() for x in ran(*arrays))
    return Case((np.asarray(y), np.asarray(row_max)), any_of, fallback, (warp_votes.needs_rescale,))


def masked_scores(rows: int) -> Case:
    s = np.asarray(drawn(rows, 64))
    words = np.asarray(np.random.default_rng(1).integers(-(2**31), 2**31, (2, rows)), jnp.int32)

    def body(s_g, words_g, out_g, bits_g):
        both = tuple(load(words_g.at[w], ROW) for w in range(2))
        store_unoptimized(out_g, bit_mask.apply_bit_mask.on_gpu(load(s_g), both))
        ones = plgpu.layout_cast(jnp.ones((rows, 64), f32), WGMMA)
        store_unoptimized(
            bits_g, jnp.where(bit_mask.unpack_bit_mask.on_gpu(both, shape=(rows, 64)), ones, ones * 0.0)
        )

    def fallback(s, words):
        both = tuple(words)
        return bit_mask.apply_bit_mask.fallback(s, both), bit_mask.unpack_bit_mask.fallback(
            both, shape=(rows, 64)
        ).astype(f32)

    run = kernel(body, ((rows, 64), f32), ((rows, 64), f32))
    return Case((s, words), run, fallback, (bit_mask.apply_bit_mask, bit_mask.unpack_bit_mask))


def row_sums(rows: int) -> Case:
    def body(x_g, out_g):
        sums = lane_sums.sum_lane_columns.on_gpu(load(x_g))
        store_unoptimized(out_g, lane_sums.add_lanes.on_gpu(sums))

    def fallback(x):
        return (lane_sums.add_lanes.fallback(lane_sums.sum_lane_columns.fallback(x)),)

    run = kernel(body, ((rows,), f32))
    functions = lane_sums.sum_lane_columns, lane_sums.add_lanes
    return Case((np.asarray(drawn(rows, 64)),), run, fallback, functions, 1e-6)


def rows_out(rows: int, columns: int, acc: tuple[int, int], dtype: Any) -> Case:
    def body(acc_g, out_g):
        stores.store_transposed.on_gpu(out_g, load(acc_g))

    def fallback(acc):
        out = jax.new_ref(jnp.zeros((rows, columns), dtype))
        stores.store_transposed.fallback(out, acc)
        return (out[...],)

    run = kernel(body, ((rows, columns), dtype))
    return Case((np.asarray(drawn(*acc)),), run, fallback, (stores.store_transposed,))


def heads_out(kv_heads: int) -> Case:
    shape = kv_heads, 64 // kv_heads

    def body(x_g, out_g):
        stores.store_heads.on_gpu(out_g, load(x_g, ROW))

    def fallback(x):
        out = jax.new_ref(jnp.zeros(shape, f32))
        stores.store_heads.fallback(out, x)
        return (out[...],)

    return Case((np.asarray(drawn(64)),), kernel(body, (shape, f32)), fallback, (stores.store_heads,))


def tokens_out(token: int, begin: int, end: int, tokens_per_head: int, rows: int = 64) -> Case:
    """Return the case of heads that share a tile; other rows must stay unchanged."""
    shape = 1 + rows // tokens_per_head, 128
    bounds = 1, token, begin, end

    def body(x_g, before_g, at_g, out_g):
        for head in range(shape[0]):
            out_g[head] = before_g[head]
        stores.store_tokens.on_gpu(
            out_g, load(x_g, ROW), *(at_g[i] for i in range(4)), tokens_per_head=tokens_per_head
        )

    def fallback(x, before, bounds):
        out = jax.new_ref(before)
        stores.store_tokens.fallback(out, x, *bounds, tokens_per_head=tokens_per_head)
        return (out[...],)

    arrays = np.asarray(drawn(rows)), np.asarray(drawn(*shape)), np.asarray(bounds, jnp.int32)
    return Case(arrays, kernel(body, (shape, f32)), fallback, (stores.store_tokens,))


def token_rows_out(
    token: int, begin: int, end: int, tokens_per_head: int, columns: int, dtype: Any, rows: int = 64
) -> Case:
    """Return the case of output rows of heads that share a tile; other rows must stay unchanged."""
    shape, bounds = (128, 1 + rows // tokens_per_head, columns), (1, token, begin, end)
    static = {"tokens_per_head": tokens_per_head, "columns": columns}

    def body(x_g, before_g, at_g, out_g):
        for start, head in itertools.product((0, 64), range(shape[1])):
            place = pl.ds(start, 64), head
            store_unoptimized(out_g.at[place], load(before_g.at[place]))
        stores.store_token_rows.on_gpu(out_g, load(x_g), *(at_g[i] for i in range(4)), **static)

    def fallback(x, before, bounds):
        out = jax.new_ref(before)
        stores.store_token_rows.fallback(out, x, *bounds, **static)
        return (out[...],)

    arrays = np.asarray(drawn(rows, 64)), np.asarray(drawn(*shape), dtype), np.asarray(bounds, jnp.int32)
    return Case(arrays, kernel(body, (shape, dtype)), fallback, (stores.store_token_rows,))


def register_products(rows: int, n: int, k: int, dtype: Any) -> Case:
    """Return the case of a product whose left operand is in registers."""
    a, acc = np.asarray(np.abs(drawn(rows, k))), np.asarray(drawn(rows, n, seed=1))
    b = np.asarray(drawn(k, n, seed=2), dtype)

    def body(a_g, b_g, acc_g, out_g, b_s, loaded):
        plgpu.copy_gmem_to_smem(b_g, b_s, loaded)
        plgpu.barrier_wait(loaded)
        store_unoptimized(out_g, tile_mma.multiply_registers.on_gpu(load(acc_g), load(a_g), b_s))

    def fallback(a, b, acc):
        return (tile_mma.multiply_registers.fallback(acc, a, jax.new_ref(b)),)

    run = kernel(body, ((rows, n), f32), scratch=(swizzled_smem((k, n), dtype), plgpu.Barrier()))
    return Case((a, b, acc), run, fallback, (tile_mma.multiply_registers,), 1e-4)


def team_copies(block_size: int, head_dim: int, *, is_hnd: bool) -> Case:
    """Return the case of copies of which each warp of a team finds its own rows: of a cache and of tokens."""
    head, rng, heads, num_blocks = head_chunks(head_dim), np.random.default_rng(3), 3, 9
    tiling = CacheTiling(block_size=block_size, run_length=64, is_hnd=is_hnd, head=head)
    shape = (heads, block_size) if is_hnd else (block_size, heads)
    cache = tiling.tile_cache(jnp.asarray(np.asarray(drawn(num_blocks, *shape, head_dim), jnp.bfloat16)))
    tokens = head.split(jnp.asarray(np.asarray(drawn(70, heads, head_dim, seed=1), jnp.bfloat16)))
    table = np.asarray(rng.integers(num_blocks, size=8), jnp.int32)
    numbers = np.asarray(drawn(3, 2, 200, seed=2))
    out, numbers_out = ((head.num_chunks, 64, head.width), cache.dtype), ((2, 64), f32)
    runs, token_rows = max(16 // block_size, 1), {"head": head, "rows_per_head": 32}

    def body(
        cache_g, tokens_g, table_g, numbers_g, tile_g, token_tile_g, copied_g, tile_s, token_tile_s, copied_s
    ):
        first = cp_async.warp_index.on_gpu(num_warps=4) * 16
        column = lax.div(first, jnp.int32(block_size))
        blocks = [table_g[column + i] for i in range(runs)]
        offset, kv_head = lax.rem(first, jnp.int32(block_size)), jnp.int32(1)
        cp_async_paged.copy_block_rows.on_gpu(
            tile_s, cache_g, blocks, offset, kv_head, tiling=tiling, num_warps=4
        )
        cp_async.copy_token_rows.on_gpu(
            token_tile_s, tokens_g, jnp.int32(50), kv_head, num_warps=4, **token_rows
        )
        cp_async.copy_numbers.on_gpu(copied_s, numbers_g, kv_head, jnp.int32(24), num_warps=4)
        cp_async.commit_copies.on_gpu()
        cp_async.wait_for_team.on_gpu(num_pending=0, num_warpgroups=1)
        plgpu.commit_smem()
        for source, result in ((tile_s, tile_g), (token_tile_s, token_tile_g), (copied_s, copied_g)):
            plgpu.copy_smem_to_gmem(source, result)
        plgpu.wait_smem_to_gmem(0)

    def fallback(cache, tokens, table, numbers):
        results = [jax.new_ref(jnp.zeros(*result)) for result in (out, out, numbers_out)]
        blocks, zero, kv_head = list(table[: tiling.copies_per_run]), jnp.int32(0), jnp.int32(1)
        cp_async_paged.copy_block_rows.fallback(
            results[0], jax.new_ref(cache), blocks, zero, kv_head, tiling=tiling, num_warps=1
        )
        cp_async.copy_token_rows.fallback(
            results[1], jax.new_ref(tokens), jnp.int32(50), kv_head, num_warps=1, **token_rows
        )
        cp_async.copy_numbers.fallback(results[2], jax.new_ref(numbers), kv_head, jnp.int32(24), num_warps=1)
        return tuple(result[...] for result in results)

    scratch = swizzled_smem(*out), swizzled_smem(*out), plgpu.SMEM(*numbers_out)
    run = kernel(body, out, out, numbers_out, scratch=scratch)
    return Case((cache, tokens, table, numbers), run, fallback, TEAM_COPIES)


def lookups(axes: tuple[int, ...], dtype: Any) -> Case:
    """Return the case of one element of a vector per element along some axes of a tile."""
    table, shape = np.asarray(10 * drawn(70), dtype), tuple((64, 128)[axis] for axis in axes)
    index = np.asarray(np.random.default_rng(1).integers(70, size=shape), jnp.int32)
    layout = {(0,): ROW, (1,): COLUMN, (0, 1): WGMMA}[axes]

    def body(table_g, index_g, out_g):
        found = look_up.look_up.on_gpu(table_g, load(index_g, layout), layout=layout)
        store_unoptimized(out_g, found)

    def fallback(table, index):
        return (look_up.look_up.fallback(jax.new_ref(table), index, layout=layout),)

    return Case((table, index), kernel(body, (shape, dtype)), fallback, (look_up.look_up,))


def listed_copies(dim: int, dtype: Any, block_size: int, *, is_hnd: bool) -> Case:
    """Return the case of the second tile of a list of 100 keys, of which the last 7 are not visible."""
    head = head_chunks(dim, itemsize=jnp.dtype(dtype).itemsize)
    tiling = CacheTiling(block_size=block_size, run_length=1, is_hnd=is_hnd, head=head)
    per_block = (3, block_size) if is_hnd else (block_size, 3)
    cache = tiling.tile_cache(jnp.asarray(np.asarray(20 * drawn(7, *per_block, dim), dtype)))
    ids = np.asarray(np.sort(np.random.default_rng(1).permutation(400)[:100]), jnp.int32)
    table = np.asarray(np.random.default_rng(2).integers(7, size=-(-400 // block_size)), jnp.int32)
    out = (head.num_chunks, 64, head.width), cache.dtype
    end_key = int(ids[93])

    def copy(code, tile_s, *refs):
        first, num_listed, first_key, end, kv_head = map(jnp.int32, (64, 100, 0, end_key, 2))
        getattr(cp_async_paged.copy_listed_keys, code)(
            tile_s, *refs, first, num_listed, (first_key, end), kv_head, tiling=tiling
        )

    def body(cache_g, ids_g, table_g, tile_g, tile_s):
        copy("on_gpu", tile_s, cache_g, ids_g, table_g)
        cp_async.commit_copies.on_gpu()
        cp_async.wait_for_warpgroup.on_gpu(num_pending=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_s, tile_g)
        plgpu.wait_smem_to_gmem(0)

    def fallback(*arrays):
        result = jax.new_ref(jnp.zeros(*out))
        copy("fallback", result, *(jax.new_ref(array) for array in arrays))
        return (result[...],)

    run = kernel(body, out, scratch=(swizzled_smem(*out, width=head.width),))
    return Case((cache, ids, table), run, fallback, (cp_async_paged.copy_listed_keys,))


def tiles_out(dtype: Any) -> Case:
    """Return the case of an array of 30 rows, whose last 6 rows no tile contains."""
    tiles, last_rows = np.asarray(drawn(2, 24, 64), dtype), np.asarray(drawn(6, 2, 64, seed=1), dtype)

    def body(tiles_g, last_rows_g, out_g, tiles_s, loaded):
        plgpu.copy_gmem_to_smem(tiles_g, tiles_s, loaded)
        plgpu.barrier_wait(loaded)
        out_g[pl.ds(24, 6)] = last_rows_g[...]
        for head in range(2):
            index = pl.ds(0, 24), head, pl.ds(0, 64)
            stores.store_tiles.on_gpu(out_g, tiles_s.at[head], index)
        plgpu.wait_smem_to_gmem(0)

    def fallback(tiles, last_rows):  # that of store_tiles only works in a kernel
        return (jnp.concatenate([jnp.swapaxes(tiles, 0, 1), last_rows]),)

    scratch = swizzled_smem((2, 24, 64), dtype), plgpu.Barrier()
    run = kernel(body, ((30, 2, 64), dtype), scratch=scratch)
    return Case((tiles, last_rows), run, fallback, (stores.store_tiles,))


def products(rows: int, n: int, k: int, dtype: Any, *, is_transposed: bool) -> Case:
    a, start = np.asarray(drawn(rows, k), dtype), np.asarray(drawn(rows, n, seed=2))
    b = np.asarray(drawn(*((n, k) if is_transposed else (k, n)), seed=1), dtype)
    options = {"is_transposed": is_transposed}

    def body(a_g, b_g, start_g, out_g, a_s, b_s, after_s, loaded):
        plgpu.copy_gmem_to_smem(a_g, a_s, loaded)
        plgpu.copy_gmem_to_smem(b_g, b_s, loaded)
        plgpu.barrier_wait(loaded)
        store_unoptimized(out_g, tile_mma.multiply_tiles.on_gpu(load(start_g), a_s, b_s, **options))

    def fallback(a, b, start):
        refs = jax.new_ref(a), jax.new_ref(b)
        return (tile_mma.multiply_tiles.fallback(start, *refs, **options),)

    rest = swizzled_smem((8, k), dtype)  # an odd number of 8 columns is read with 8 more
    scratch = (
        swizzled_smem(a.shape, dtype),
        swizzled_smem(b.shape, dtype),
        rest,
        plgpu.Barrier(num_arrivals=2),
    )
    run = kernel(body, (start.shape, f32), scratch=scratch)
    return Case((a, b, start), run, fallback, (tile_mma.multiply_tiles,), 1e-4)


def split(rows: int, columns: int, dtype: Any) -> Case:
    x = np.asarray(drawn(rows, columns), dtype)

    def body(x_g, out_g, x_s, loaded):
        plgpu.copy_gmem_to_smem(x_g, x_s.at[0], loaded)
        plgpu.barrier_wait(loaded)
        split_signs.split_signs.on_gpu(x_s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    def fallback(x):
        both = jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))
        split_signs.split_signs.fallback(both)
        return (both[...],)

    scratch = swizzled_smem((2, rows, columns), dtype), plgpu.Barrier()
    run = kernel(body, ((2, rows, columns), dtype), scratch=scratch)
    return Case((x,), run, fallback, (split_signs.split_signs,))


def copies(block_size: int, head_dim: int, cache_dtype: Any, *, is_hnd: bool) -> Case:
    """Return the case of cp.async copies of a tile of a paged cache, its scales and a tile of queries."""
    head = head_chunks(head_dim, itemsize=jnp.dtype(cache_dtype).itemsize)
    tiling = CacheTiling(block_size=block_size, run_length=64, is_hnd=is_hnd, head=head)
    rng, heads, num_blocks = np.random.default_rng(3), 3, 9
    shape = (heads, block_size) if is_hnd else (block_size, heads)
    cache = tiling.tile_cache(jnp.asarray(stored(drawn(num_blocks, *shape, head_dim), cache_dtype)))
    scale = tiling.tile_scale(jnp.asarray(np.asarray(drawn(num_blocks, heads, block_size, seed=1))))
    query = head.split(jnp.asarray(np.asarray(drawn(5, head_dim, seed=2), jnp.bfloat16)))
    num_copies = tiling.copies_per_run
    places = (
        rng.integers(num_blocks, size=num_copies),
        rng.integers(max(block_size // 64, 1), size=num_copies),
        [1],
    )
    places = np.asarray(np.concatenate(places), jnp.int32)
    wide, window = np.asarray(drawn(16, 192, seed=4), jnp.bfloat16), (slice(None), pl.ds(64, 64))
    outs = (
        ((head.num_chunks, 64, head.width), cache.dtype),
        ((64,), f32),
        ((head.num_chunks, 8, head.width), query.dtype),
        ((16, 64), wide.dtype),
    )

    def body(
        cache_g, scale_g, query_g, places_g, wide_g, tile_g, tile_scale_g, q_g, rows_g, tile_s, scale_s, q_s,
        rows_s,
    ):  # fmt: skip
        blocks, indices = [[places_g[first + i] for i in range(num_copies)] for first in (0, num_copies)]
        where = blocks, indices, places_g[2 * num_copies]
        cp_async.copy_queries.on_gpu(q_s, query_g, head=head)
        cp_async.copy_rows.on_gpu(rows_s, wide_g.at[window])
        cp_async.commit_copies.on_gpu()
        cp_async_paged.copy_tile.on_gpu(tile_s, cache_g, *where, tiling=tiling)
        cp_async.release_to_warp.on_gpu()
        cp_async_paged.copy_token_scales.on_gpu(scale_s, scale_g, *where)
        cp_async.commit_copies.on_gpu()
        cp_async.wait_for_warp.on_gpu(num_pending=1)
        cp_async.wait_for_warpgroup.on_gpu(num_pending=0)
        plgpu.commit_smem()
        for source, result in ((tile_s, tile_g), (scale_s, tile_scale_g), (q_s, q_g), (rows_s, rows_g)):
            plgpu.copy_smem_to_gmem(source, result)
        plgpu.wait_smem_to_gmem(0)

    def fallback(cache, scale, query, places, wide):
        results = [jax.new_ref(jnp.zeros(shape, dtype)) for shape, dtype in outs]
        where = list(places[:num_copies]), list(places[num_copies : 2 * num_copies]), places[2 * num_copies]
        cp_async_paged.copy_tile.fallback(results[0], jax.new_ref(cache), *where, tiling=tiling)
        cp_async_paged.copy_token_scales.fallback(results[1], jax.new_ref(scale), *where)
        cp_async.copy_queries.fallback(results[2], jax.new_ref(query), head=head)
        cp_async.copy_rows.fallback(results[3], jax.new_ref(wide[:, 64:128]))
        return tuple(result[...] for result in results)

    scratch = (
        swizzled_smem(outs[0][0], cache.dtype, width=head.width),
        plgpu.SMEM((64,), f32),
        swizzled_smem(outs[2][0], query.dtype),
        swizzled_smem(outs[3][0], wide.dtype),
    )
    others = *TEAM_COPIES, cp_async_paged.copy_listed_keys
    members = *vars(cp_async).values(), *vars(cp_async_paged).values()
    functions = [x for x in members if isinstance(x, DeviceFunction) and x not in others]
    arrays = cache, scale, query, places, wide
    return Case(arrays, kernel(body, *outs, scratch=scratch), fallback, (*functions,))


def all_cases() -> dict[str, Case]:
    bf16, f16 = jnp.bfloat16, jnp.float16
    cases = {
        f"{name}-{tile_q}-{dim}-{jnp.dtype(dtype)}-{jnp.dtype(cache)}": make(tile_q, dim, dtype, cache)
        for tile_q, dim, dtype, cache in (
            (8, 128, bf16, bf16), (16, 64, f16, f16), (8, 80, bf16, bf16), (8, 256, bf16, jnp.int8),
            (16, 128, bf16, jnp.float8_e4m3fn), (8, 64, f16, jnp.float8_e5m2), (24, 96, bf16, jnp.int8),
        )
        for name, make in (
            ("scores", scores),
            ("values", functools.partial(values, piece=16 if dim == 64 else 64)),
        )
        if name == "scores" or dim < 256
    }  # fmt: skip
    quiet, row_max = -np.abs(drawn(64, 128)) - 0.1, np.zeros(64, np.float32)
    due, lowest = quiet.copy(), row_max.copy()
    due[37, 101], lowest[60] = 0.0, -np.inf
    quiet_128, row_max_128 = np.concatenate([quiet, quiet]), np.concatenate([row_max, row_max])
    fp8 = 8, 128, bf16, jnp.float8_e4m3fn
    return cases | {
        "scores-fp8-without-conversion": scores(*fp8, has_fp8_conversion=False),
        "values-fp8-without-conversion": values(*fp8, piece=64, has_fp8_conversion=False),
        "largest": largest(),
        "votes-quiet": votes_of(quiet, row_max),
        "votes-due": votes_of(due, row_max),
        "votes-lowest": votes_of(quiet, lowest),
        "votes-lowest-128": votes_of(quiet_128, np.concatenate([row_max, lowest])),
        "votes-due-128": votes_of(np.concatenate([quiet, due]), row_max_128),
        "votes-quiet-128": votes_of(quiet_128, row_max_128),
        "masked": masked_scores(64),
        "masked-128": masked_scores(128),
        "row-sums": row_sums(64),
        "row-sums-128": row_sums(128),
        "rows-4-of-8": rows_out(4, 128, (128, 8), bf16),
        "rows-24": rows_out(24, 40, (64, 24), f16),
        "heads-8": heads_out(8),
        "heads-64": heads_out(64),
        "tokens-whole": tokens_out(0, 0, 64, 64),
        "tokens-16": tokens_out(-3, 5, 14, 16),
        "tokens-none": tokens_out(60, 7, 3, 32),
        "tokens-128": tokens_out(-3, 5, 101, 128, rows=128),
        "token-rows-128": token_rows_out(-3, 5, 101, 128, 64, bf16, rows=128),
        "token-rows-32-of-128": token_rows_out(4, 0, 31, 32, 64, f16, rows=128),
        "token-rows-40": token_rows_out(0, 0, 64, 64, 40, f16),
        "token-rows-16": token_rows_out(-3, 5, 14, 16, 64, bf16),
        "register-products": register_products(64, 64, 128, bf16),
        "register-products-f16": register_products(64, 256, 64, f16),
        "register-products-128": register_products(128, 64, 64, bf16),
        "team-copies-8": team_copies(8, 80, is_hnd=True),
        "team-copies-32": team_copies(32, 128, is_hnd=False),
        "lookups": lookups((0, 1), f32),
        "lookups-rows": lookups((0,), jnp.int32),
        "lookups-columns": lookups((1,), f32),
        "tiles": tiles_out(bf16),
        "listed-copies-8": listed_copies(80, bf16, 8, is_hnd=True),
        "listed-copies-64": listed_copies(128, jnp.int8, 64, is_hnd=False),
        "copies-8": copies(8, 64, bf16, is_hnd=False),
        "copies-16-80": copies(16, 80, jnp.int8, is_hnd=True),
        "copies-32-120": copies(32, 120, f16, is_hnd=False),
        "copies-64-192": copies(64, 192, jnp.int8, is_hnd=False),
        "copies-256-256": copies(256, 256, bf16, is_hnd=True),
        "products": products(128, 128, 64, bf16, is_transposed=False),
        "products-transposed": products(64, 40, 128, f16, is_transposed=True),
        "signs": split(16, 128, bf16),
        "signs-f16": split(40, 64, f16),
    }
