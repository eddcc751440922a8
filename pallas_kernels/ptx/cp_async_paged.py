"""Copies of keys, values and their scales from a paged cache to shared memory by cp.async.

`copy_tile`, `copy_listed_keys` and `copy_token_scales` copy a tile of 64 keys for four warps, each of which
copies the 16 rows that it multiplies itself and so waits for no other warp.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.cp_async import UNIT, WARPS, SwizzledRows, byte_strides
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import SCALAR
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.types import Ref, Scalar

WARP_ROWS = 16  # rows of a tile of 64 keys that a warp copies


# ------------------------------------------------------------------------------------- keys and values
def _copy_tile(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    copies: Sequence[Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    head, num_rows = tiling.head, tiling.tokens_per_copy
    padding = ((0, 0), (0, head.width - head.chunk_dim))
    for i, block in enumerate(blocks):
        index = tiling.gmem_index(block, copies[i], kv_head)
        for chunk in range(head.num_chunks):
            rows = cache_g[(*index, chunk)] if head.is_padded else cache_g[index]
            tile_s[chunk, pl.ds(i * num_rows, num_rows)] = jnp.pad(rows, padding)


@with_fallback(_copy_tile)
def copy_tile(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    copies: Sequence[Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    """Start to copy a tile of 64 keys or values into shared memory; each warp copies its 16 rows.

    Args:
        tile_s: Tile in SMEM, [chunks, 64, width].
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        blocks: Block id of each `tiling.tokens_per_copy` tokens of the tile.
        copies: Index within the block of these tokens, in units of `tiling.tokens_per_copy`.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks and heads.
    """
    itemsize, width = jnp.dtype(tile_s.dtype).itemsize, tiling.head.width
    types = (
        plgpu.RefType(swizzle_transforms(itemsize, width)),
        plgpu.RefType(),
        [SCALAR] * (2 * len(blocks) + 1),
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_copy_tile_by_lanes, tiling=tiling))(tile_s, cache_g, [kv_head, *blocks, *copies])


def _copy_tile_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tiling: CacheTiling,
) -> tuple[()]:
    kv_head, *registers = map(fragments.scalar, scalars)
    blocks, copies = registers[: len(registers) // 2], registers[len(registers) // 2 :]
    tile = SwizzledRows(tile_s, WARPS * WARP_ROWS, tiling.head)
    lane, warp = lanes.lane_and_warp()
    unit, first_row = tile.unit_and_row(lane)
    tokens = tiling.tokens_per_copy
    for start in range(0, WARP_ROWS, tile.rows_at_once):
        row = lanes.add(first_row, start)
        # The block of tokens that holds this row of each warp, and the row's index in these tokens.
        indices = [(WARP_ROWS * w + start) // tokens for w in range(WARPS)]
        token = row
        if tokens < WARP_ROWS:
            token = lanes.add(first_row, start % tokens)
        elif tokens > WARP_ROWS:
            offset = arith.andi(lanes.times(warp, WARP_ROWS), lanes.const(tokens - 1))
            token = lanes.add(row, offset)
        block, copy = (_select_by_warp([values[i] for i in indices], warp) for values in (blocks, copies))
        source = _cache_pointer(cache_g, block, copy, token, kv_head, tiling=tiling)
        tile.copy_row(lanes.add(lanes.times(warp, WARP_ROWS), row), unit, source)
    return ()


def _select_by_warp(values: Sequence[ir.Value], warp: ir.Value) -> ir.Value:
    """Return the element of `values` whose index is the warp's."""
    value = values[0]
    for index, other in enumerate(values[1:], 1):
        if other is not values[index - 1]:
            is_at_least = arith.cmpi(arith.CmpIPredicate.sge, warp, lanes.const(index))
            value = arith.select(is_at_least, other, value)
    return value


def _cache_pointer(
    cache_g: ir.Value,
    block: ir.Value,
    copy: ir.Value,
    token: ir.Value,
    kv_head: ir.Value,
    *,
    tiling: CacheTiling,
) -> ir.Value:
    """Return the address of a token's first element in an array that `CacheTiling.tile_cache` returned."""
    strides = byte_strides(cache_g)
    indices = (kv_head, copy, token) if tiling.is_hnd else (copy, token, kv_head)
    offset = lanes.add(*(lanes.times(x, stride) for x, stride in zip(indices, strides[1:4], strict=True)))
    return lanes.advance(lanes.pointer(cache_g), block, strides[0], offset)


def _copy_block_rows(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    offset: Scalar,
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
    num_warps: int,
) -> None:
    copy = lax.div(offset, jnp.int32(tiling.tokens_per_copy))
    _copy_tile(tile_s, cache_g, blocks, [copy] * len(blocks), kv_head, tiling=tiling)


@with_fallback(_copy_block_rows)
def copy_block_rows(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    offset: Scalar,
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
    num_warps: int,
) -> None:
    """Start to copy a tile of keys or values into shared memory; each of several warps copies its own rows.

    Args:
        tile_s: Tile in SMEM, [chunks, tile_kv, width] in 16 bits.
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        blocks: Block id of each run of tokens among the warp's rows; these scalars differ between warps.
        offset: Index within its block of the first token of each run; this, too, differs between warps.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks and heads.
        num_warps: Static: number of warps that copy; the fallback requires 1.
    """
    types = plgpu.RefType(swizzle_transforms(2)), plgpu.RefType(), [SCALAR] * (2 + len(blocks))
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    body = functools.partial(
        _copy_block_rows_by_lanes, num_rows=tile_s.shape[1], tiling=tiling, num_warps=num_warps
    )
    run(body)(tile_s, cache_g, [kv_head, offset, *blocks])


def _copy_block_rows_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    num_rows: int,
    tiling: CacheTiling,
    num_warps: int,
) -> tuple[()]:
    kv_head, offset, *blocks = map(fragments.scalar, scalars)
    tile = SwizzledRows(tile_s, num_rows, tiling.head)
    lane, warp = lanes.lane_and_warp(num_warps=num_warps)
    unit, lane_row = tile.unit_and_row(lane)
    warp_rows = num_rows // num_warps
    run_length, first_row = warp_rows // len(blocks), lanes.times(warp, warp_rows)
    for start in range(0, warp_rows, tile.rows_at_once):
        token, copy = lanes.add(offset, lane_row, start % run_length), lanes.const(0)
        source = _cache_pointer(cache_g, blocks[start // run_length], copy, token, kv_head, tiling=tiling)
        tile.copy_row(lanes.add(first_row, lane_row), unit, source, start=start)
    return ()


def _copy_listed_keys(
    tile_s: Ref,
    cache_g: Ref,
    ids_g: Ref,
    table_g: Ref,
    first: Scalar,
    num_listed: Scalar,
    visible: tuple[Scalar, Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    head, (first_key, end_key) = tiling.head, visible
    index = jnp.minimum(jnp.arange(tile_s.shape[1], dtype=jnp.int32) + first, num_listed - 1)
    key = ids_g[...][index]
    is_visible = (key >= first_key) & (key < end_key)
    key = jnp.where(is_visible, key, end_key - 1)
    block, token = table_g[...][key // tiling.block_size], key % tiling.block_size
    cache = cache_g[...]
    rows = cache[block, kv_head, token, 0] if tiling.is_hnd else cache[block, token, 0, kv_head]
    rows = jnp.where(is_visible.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
    for chunk in range(head.num_chunks):
        row = rows[:, chunk] if head.is_padded else rows
        tile_s[chunk] = jnp.pad(row, ((0, 0), (0, head.width - head.chunk_dim)))


@with_fallback(_copy_listed_keys)
def copy_listed_keys(
    tile_s: Ref,
    cache_g: Ref,
    ids_g: Ref,
    table_g: Ref,
    first: Scalar,
    num_listed: Scalar,
    visible: tuple[Scalar, Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    """Start to copy 64 listed keys or values into shared memory; each warp copies its 16 rows.

    Rows of listed keys that are not visible hold zeros. Rows past the list's end repeat the last listed key.

    Args:
        tile_s: Tile in SMEM, [chunks, 64, width].
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        ids_g: Positions of the listed keys in the request.
        table_g: Block id of each `tiling.block_size` keys of the request.
        first: Index in the list of the tile's first key.
        num_listed: Length of the list, at least 1.
        visible: Position of the first visible key, and one past that of the last.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks, in copies of one token, and of heads.
    """
    assert tiling.tokens_per_copy == 1
    itemsize, width = jnp.dtype(tile_s.dtype).itemsize, tiling.head.width
    types = (
        plgpu.RefType(swizzle_transforms(itemsize, width)),
        *[plgpu.RefType()] * 3,
        [SCALAR] * 5,
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    scalars = [first, num_listed, *visible, kv_head]
    run(functools.partial(_copy_listed_keys_by_lanes, tiling=tiling))(
        tile_s, cache_g, ids_g, table_g, scalars
    )


def _copy_listed_keys_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    ids_g: ir.Value,
    table_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tiling: CacheTiling,
) -> tuple[()]:
    first, num_listed, first_key, end_key, kv_head = map(fragments.scalar, scalars)
    tile = SwizzledRows(tile_s, WARPS * WARP_ROWS, tiling.head)
    lane, warp = lanes.lane_and_warp()
    unit, lane_row = tile.unit_and_row(lane)
    last = arith.subi(num_listed, lanes.const(1))
    rows, keys, sources, sizes = [], [], [], []
    # Loads of the same kind follow each other, so that their latencies overlap.
    for start in range(0, WARP_ROWS, tile.rows_at_once):
        row = lanes.add(lanes.times(warp, WARP_ROWS), lane_row, start)
        rows.append(row)
        keys.append(lanes.load(ids_g, arith.minsi(lanes.add(first, row), last), lanes.i32()))
    shift = tiling.block_size.bit_length() - 1
    for key in keys:
        is_visible = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, key, first_key),
            arith.cmpi(arith.CmpIPredicate.slt, key, end_key),
        )
        visible_key = arith.select(is_visible, key, arith.subi(end_key, lanes.const(1)))
        block = lanes.load(table_g, arith.shrui(visible_key, lanes.const(shift)), lanes.i32())
        token = arith.andi(visible_key, lanes.const(tiling.block_size - 1))
        sources.append(_cache_pointer(cache_g, block, token, lanes.const(0), kv_head, tiling=tiling))
        sizes.append(arith.select(is_visible, lanes.const(UNIT), lanes.const(0)))
    for row, source, size in zip(rows, sources, sizes, strict=True):
        tile.copy_row(row, unit, source, size)
    return ()


# ------------------------------------------------------------------------------------- scales
def _copy_token_scales(
    scale_s: Ref, scale_g: Ref, blocks: Sequence[Scalar], copies: Sequence[Scalar], kv_head: Scalar
) -> None:
    num = scale_g.shape[3]
    for i, block in enumerate(blocks):
        scale_s[pl.ds(i * num, num)] = scale_g[block, kv_head, copies[i]]


@with_fallback(_copy_token_scales)
def copy_token_scales(
    scale_s: Ref, scale_g: Ref, blocks: Sequence[Scalar], copies: Sequence[Scalar], kv_head: Scalar
) -> None:
    """Start to copy the scales per token of a tile of 64 keys; each warp copies those of its 16 keys.

    Args:
        scale_s: Scales in SMEM, f32 [64].
        scale_g: Scales [blocks, kv_heads, copies, tokens_per_copy]; see `copy_tile` for the other arguments.
        blocks: Block ids.
        copies: Indices within the blocks.
        kv_head: Index of the KV head.
    """
    types = plgpu.RefType(), plgpu.RefType(), [SCALAR] * (2 * len(blocks) + 1)
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(_copy_token_scales_by_lanes)(scale_s, scale_g, [kv_head, *blocks, *copies])


def _copy_token_scales_by_lanes(
    _ctx: mgpu.LaunchContext, scale_s: ir.Value, scale_g: ir.Value, scalars: Sequence[mgpu.FragmentedArray]
) -> tuple[()]:
    kv_head, *registers = map(fragments.scalar, scalars)
    blocks, copies = registers[: len(registers) // 2], registers[len(registers) // 2 :]
    tokens = WARPS * WARP_ROWS // len(blocks)
    lane, warp = lanes.lane_and_warp()
    row = lanes.add(lanes.times(warp, WARP_ROWS), arith.andi(lane, lanes.const(WARP_ROWS - 1)))
    block, copy = blocks[0], copies[0]
    for i in range(1, len(blocks)):
        is_reached = arith.cmpi(arith.CmpIPredicate.sge, row, lanes.const(i * tokens))
        block, copy = (
            arith.select(is_reached, values[i], value) for values, value in ((blocks, block), (copies, copy))
        )
    token = arith.andi(row, lanes.const(tokens - 1))
    strides = byte_strides(scale_g)
    indices = (kv_head, copy, token)
    offset = lanes.add(*(lanes.times(x, stride) for x, stride in zip(indices, strides[1:], strict=True)))
    source = lanes.advance(lanes.pointer(scale_g), block, strides[0], offset)
    target = lanes.add(lanes.address(scale_s), lanes.times(row, 4))
    # The upper half of the lanes would copy the same numbers again.
    code = "cp.async.ca.shared.global [$0], [$1], 4;"
    lanes.run(code, target, source, predicate=lanes.is_below(lane, WARP_ROWS))
    return ()
