"""Stores from registers to global memory, without shared memory and TMA between."""

import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW, ROW_LAYOUT, SCALAR, TILE, require_layout
from pallas_kernels.ptx.mma import pack_16bit, transpose_8x8
from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile


def _transposed(ref: Ref, acc: Tile) -> None:
    rows, columns = ref.shape
    ref[...] = acc.T[:rows, :columns].astype(ref.dtype)


@with_fallback(_transposed)
def store_transposed(ref: Ref, acc: Tile) -> None:
    """Stores an accumulator's columns as 16-bit rows; what is past the reference's end is dropped.

    By registers, two neighbours at once: there is nothing to wait for, as there is after a copy by TMA, which
    needs the rows in shared memory, two barriers and a fence first.

    Args:
        ref: [rows, columns] of global memory; rows end where columns end on 4 bytes.
        acc: f32 [at least columns, at least rows], 64 times 8 wide tiles in the layout WGMMA.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE), return_type=())
    run(functools.partial(_store_transposed, dtype=ref.dtype))(ref, acc)


def _store_transposed(
    _ctx: mgpu.LaunchContext, ref: ir.Value, acc: mgpu.FragmentedArray, *, dtype: np.dtype
) -> tuple[()]:
    of_ref = ir.MemRefType(ref.type)
    (rows, columns), (stride, _) = of_ref.shape, of_ref.get_strides_and_offset()[0]
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    column = lanes.add(lanes.times(warp, 16), lanes.times(t, 2))
    offset = lanes.add(lanes.times(g, stride), column)
    first = lanes.element(ref, offset, 2)
    for m, row_tile in enumerate(fragments.tiles(acc)):
        for n, four in enumerate(row_tile):
            for half in (0, 1):
                row, start = 8 * n, 64 * m + 8 * half
                if row >= rows or start >= columns:
                    continue
                is_live = arith.andi(lanes.is_below(g, rows - row), lanes.is_below(column, columns - start))
                pair = pack_16bit(four[2 * half], four[2 * half + 1], dtype)
                code = f"st.global.b32 [$0 + {2 * (row * stride + start)}], $1;"
                lanes.run(code, first, transpose_8x8(pair), predicate=is_live)
    return ()


def _by_head(ref: Ref, values: Rows) -> None:
    kv_heads, blocks = ref.shape
    ref[...] = values.reshape(blocks, kv_heads).T


@with_fallback(_by_head)
def store_heads(ref: Ref, values: Rows) -> None:
    """Stores a number for each row of a tile, which are a block's heads, then the next block's.

    Args:
        ref: [kv_heads, blocks] of global memory.
        values: f32 [64].
    """
    kv_heads, _ = ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=())
    def store(_ctx: mgpu.LaunchContext, ref: ir.Value, values: mgpu.FragmentedArray) -> None:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        for row, value, is_mine in _rows(values):
            head, block = arith.remui(row, lanes.const(kv_heads)), arith.divui(row, lanes.const(kv_heads))
            at = lanes.element(ref, lanes.add(lanes.times(head, stride), block), 4)
            lanes.run("st.global.f32 [$0], $1;", at, value, predicate=is_mine)

    store(ref, values)


def _piece_by_piece(
    ref: Ref, values: Rows, head: Scalar, token: Scalar, begin: Scalar, end: Scalar, *, each: int
) -> None:
    """By powers of two: nothing is stored that is not to be, for it may be another thread block's."""
    num = jnp.maximum(end - begin, 0)
    offset, size = begin, each
    while size:
        for nth in range(values.shape[0] // each):

            @pl.when((num & size) != 0)
            def _(nth: int = nth, offset: Scalar = offset, size: int = size) -> None:
                piece = lax.dynamic_slice(values, (nth * each + offset,), (size,))
                ref[head + nth, pl.ds(token + offset, size)] = piece

        offset, size = offset + (num & size), size // 2


@with_fallback(_piece_by_piece)
def store_tokens(
    ref: Ref, values: Rows, head: Scalar, token: Scalar, begin: Scalar, end: Scalar, *, each: int
) -> None:
    """Stores a number for each row of a tile that is live; rows are `each` tokens of a head, then the next's.

    Args:
        ref: f32 [heads, tokens] of global memory, less than 2^32 numbers.
        values: f32 [64].
        head: Of the first rows.
        token: Of each head's first row; may be below 0 where that is not live.
        begin: Of each head's rows the first live one.
        end: One past the last live one.
        each: Static: a power of two.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, *[SCALAR] * 4), return_type=())
    def store(
        _ctx: mgpu.LaunchContext, ref: ir.Value, values: mgpu.FragmentedArray, *of_item: mgpu.FragmentedArray
    ) -> None:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        head, token, begin, end = map(fragments.scalar, of_item)
        for row, value, is_mine in _rows(values):
            nth, here = arith.divui(row, lanes.const(each)), arith.remui(row, lanes.const(each))
            from_begin, to_end = arith.CmpIPredicate.sge, arith.CmpIPredicate.slt
            is_live = arith.andi(arith.cmpi(from_begin, here, begin), arith.cmpi(to_end, here, end))
            at = lanes.add(lanes.times(lanes.add(head, nth), stride), token, here)
            is_stored = arith.andi(is_mine, is_live)
            lanes.run("st.global.f32 [$0], $1;", lanes.element(ref, at, 4), value, predicate=is_stored)

    store(ref, values, head, token, begin, end)


def _rows(values: mgpu.FragmentedArray) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """The numbers that a lane has: of which row, the number, and whether this lane is the one to store it."""
    require_layout(values.layout, ROW_LAYOUT)
    lane, warp = lanes.lane_and_warp(anew=True)
    g, t = arith.shrui(lane, lanes.const(2)), arith.andi(lane, lanes.const(3))
    for half, register in enumerate(values.registers.flatten()):
        value = vector.extract(register, dynamic_position=[], static_position=[0])
        is_mine = arith.cmpi(arith.CmpIPredicate.eq, t, lanes.const(half))
        yield lanes.add(lanes.times(warp, 16), g, 8 * half), value, is_mine
