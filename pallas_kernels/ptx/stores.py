"""Stores from registers to global memory, without shared memory and TMA between."""

import functools

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.assumptions import ROW, ROW_LAYOUT, TILE, require_layout
from pallas_kernels.ptx.tensor_core import rounded, transposed
from pallas_kernels.ptx.twins import with_twin
from pallas_kernels.shared.types import Ref, Rows, Tile


def _transposed(ref: Ref, acc: Tile) -> None:
    rows, columns = ref.shape
    ref[...] = acc.T[:rows, :columns].astype(ref.dtype)


@with_twin(_transposed)
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
                pair = rounded(four[2 * half], four[2 * half + 1], dtype)
                code = f"st.global.b32 [$0 + {2 * (row * stride + start)}], $1;"
                lanes.run(code, first, transposed(pair), predicate=is_live)
    return ()


def _by_head(ref: Ref, values: Rows) -> None:
    kv_heads, blocks = ref.shape
    ref[...] = values.reshape(blocks, kv_heads).T


@with_twin(_by_head)
def store_heads(ref: Ref, values: Rows) -> None:
    """Stores a number for each row of a tile, which are a block's heads, then the next block's.

    Args:
        ref: [kv_heads, blocks] of global memory.
        values: f32 [64].
    """
    kv_heads, _ = ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=())
    def store(_ctx: mgpu.LaunchContext, ref: ir.Value, values: mgpu.FragmentedArray) -> None:
        require_layout(values.layout, ROW_LAYOUT)
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        g, t = lanes.lane_row_and_pair()
        _, warp = lanes.lane_and_warp()
        for half, register in enumerate(values.registers.flatten()):
            value = vector.extract(register, dynamic_position=[], static_position=[0])
            row = lanes.add(lanes.times(warp, 16), g, 8 * half)
            head, block = arith.remui(row, lanes.const(kv_heads)), arith.divui(row, lanes.const(kv_heads))
            at = lanes.element(ref, lanes.add(lanes.times(head, stride), block), 4)
            is_mine = arith.cmpi(arith.CmpIPredicate.eq, t, lanes.const(half))
            lanes.run("st.global.f32 [$0], $1;", at, value, predicate=is_mine)

    store(ref, values)
