"""Stores from registers."""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.shared import lanes


def store_unoptimized(ref: Any, value: Any) -> None:
    """Stores registers where it may cost: rows shorter than a cache line, or conflicts of banks.

    jax 0.12 refuses such a store unless told that it is meant; jax 0.11 takes it and has no way to be told.

    Args:
        ref: Global or shared memory, `array.at[...]`.
        value: What it becomes.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_transposed(ref: Any, acc: Any, *, is_interpreted: bool) -> None:
    """Stores an accumulator's columns as 16-bit rows; what is past the reference's end is dropped.

    By registers, two neighbours at once: there is nothing to wait for, as there is after a copy by TMA, which
    needs the rows in shared memory, two barriers and a fence first.

    Args:
        ref: [rows, columns] of global memory; rows end where columns end on 4 bytes.
        acc: f32 [at least columns, at least rows], 64 times 8 wide tiles in the layout WGMMA.
        is_interpreted: Without lanes.
    """
    rows, columns = ref.shape
    if is_interpreted:
        ref[...] = acc.T[:rows, :columns].astype(ref.dtype)
        return
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=())
    run(functools.partial(store_by_lanes, dtype=ref.dtype))(ref, acc)


def store_by_lanes(_: Any, ref: Any, acc: Any, *, dtype: Any) -> Any:
    """See store_transposed."""
    of_ref = ir.MemRefType(ref.type)
    (rows, columns), (stride, _) = of_ref.shape, of_ref.get_strides_and_offset()[0]
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    column = lanes.add(lanes.times(warp, 16), lanes.times(t, 2))
    offset = lanes.add(lanes.times(g, stride), column)
    first = lanes.ptx("mad.wide.u32 $0, $2, 2, $1;", utils.memref_ptr(ref), offset, of=lanes.i64())
    is_below = lambda x, limit: arith.cmpi(arith.CmpIPredicate.slt, x, lanes.const(limit))
    for m, row_tile in enumerate(lanes.tiles(acc)):
        for n, four in enumerate(row_tile):
            for half in (0, 1):
                row, start = 8 * n, 64 * m + 8 * half
                if row >= rows or start >= columns:
                    continue
                is_live = arith.andi(is_below(g, rows - row), is_below(column, columns - start))
                pair = lanes.rounded(four[2 * half], four[2 * half + 1], dtype)
                code = f"st.global.b32 [$0 + {2 * (row * stride + start)}], $1;"
                utils.inline_ptx(
                    code, first, lanes.transposed(pair), predicate=is_live, has_side_effects=True
                )
    return ()
