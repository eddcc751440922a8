"""Stores from registers to global memory that do not use shared memory and TMA."""

import functools
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW_LAYOUT, SCALAR, require_layout
from pallas_kernels.ptx.mma import pack_16bit, transpose_8x8
from pallas_kernels.shared.layouts import ROW, WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Index, Ref, Rows, Scalar, Tile


def _store_transposed(ref: Ref, acc: Tile) -> None:
    rows, columns = ref.shape
    ref[...] = acc.T[:rows, :columns].astype(ref.dtype)


@with_fallback(_store_transposed)
def store_transposed(ref: Ref, acc: Tile) -> None:
    """Store an accumulator's columns as rows of a 16-bit array; elements beyond the array are dropped.

    Each store instruction writes two adjacent elements. A TMA copy would need the rows in shared memory, two
    barriers and a fence.

    Args:
        ref: Array [rows, columns] in global memory; the number of columns is even.
        acc: Accumulator, f32 [at least columns, at least rows], layout WGMMA.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=())
    run(functools.partial(_store_transposed_by_lanes, dtype=ref.dtype))(ref, acc)


def _store_transposed_by_lanes(
    _ctx: mgpu.LaunchContext, ref: ir.Value, acc: mgpu.FragmentedArray, *, dtype: np.dtype
) -> tuple[()]:
    ref_type = ir.MemRefType(ref.type)
    (rows, columns), (stride, _) = ref_type.shape, ref_type.get_strides_and_offset()[0]
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    # After a transpose in 8 x 8 matrices a lane has row g and columns 2 t and 2 t + 1 of the output.
    column = lanes.add(lanes.times(warp, 16), lanes.times(t, 2))
    offset = lanes.add(lanes.times(g, stride), column)
    first = lanes.element_pointer(ref, offset, 2)
    for m, row_tile in enumerate(fragments.row_tiles(acc)):
        for n, fragment in enumerate(row_tile):
            for half in (0, 1):
                row, start = 8 * n, WARPGROUP_ROWS * m + 8 * half
                if row >= rows or start >= columns:
                    continue
                is_valid = arith.andi(lanes.is_below(g, rows - row), lanes.is_below(column, columns - start))
                pair = pack_16bit(fragment[2 * half], fragment[2 * half + 1], dtype)
                code = f"st.global.b32 [$0 + {2 * (row * stride + start)}], $1;"
                lanes.run(code, first, transpose_8x8(pair), predicate=is_valid)
    return ()


def _store_heads(ref: Ref, values: Rows) -> None:
    kv_heads, blocks = ref.shape
    ref[...] = values.reshape(blocks, kv_heads).T


@with_fallback(_store_heads)
def store_heads(ref: Ref, values: Rows) -> None:
    """Store one number per row of a tile, whose rows are the heads of a block, then those of the next block.

    Args:
        ref: Array f32 [kv_heads, blocks] in global memory.
        values: One number per row of the tile, f32 [64].
    """
    kv_heads, _ = ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW), return_type=())
    def store(_ctx: mgpu.LaunchContext, ref: ir.Value, values: mgpu.FragmentedArray) -> None:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        for row, value, is_writer in _lane_rows(values):
            head, block = arith.remui(row, lanes.const(kv_heads)), arith.divui(row, lanes.const(kv_heads))
            pointer = lanes.element_pointer(ref, lanes.add(lanes.times(head, stride), block), 4)
            lanes.run("st.global.f32 [$0], $1;", pointer, value, predicate=is_writer)

    store(ref, values)


def _store_tokens(
    ref: Ref,
    values: Rows,
    head: Scalar,
    token: Scalar,
    first_row: Scalar,
    end_row: Scalar,
    *,
    tokens_per_head: int,
) -> None:
    """Store powers of two of rows, because rows outside [first_row, end_row) may belong to other blocks."""
    num = jnp.maximum(end_row - first_row, 0)
    offset, size = first_row, tokens_per_head
    while size:
        for i in range(values.shape[0] // tokens_per_head):

            @pl.when((num & size) != 0)
            def _(i: int = i, offset: Scalar = offset, size: int = size) -> None:
                rows = lax.dynamic_slice(values, (i * tokens_per_head + offset,), (size,))
                ref[head + i, pl.ds(token + offset, size)] = rows

        offset, size = offset + (num & size), size // 2


@with_fallback(_store_tokens)
def store_tokens(
    ref: Ref,
    values: Rows,
    head: Scalar,
    token: Scalar,
    first_row: Scalar,
    end_row: Scalar,
    *,
    tokens_per_head: int,
) -> None:
    """Store one number per valid row of a tile, whose rows are the tokens of a head, then of the next head.

    Args:
        ref: Array f32 [heads, tokens] in global memory with fewer than 2^32 elements.
        values: One number per row of the tile, f32 [64 or 128].
        head: Head of the first rows.
        token: Token of each head's first row; may be negative if that row is not valid.
        first_row: Index of the first valid row among a head's rows.
        end_row: One past the index of the last valid row among a head's rows.
        tokens_per_head: Static: number of rows of a head, a power of two.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, *[SCALAR] * 4), return_type=())
    def store(
        _ctx: mgpu.LaunchContext,
        ref: ir.Value,
        values: mgpu.FragmentedArray,
        head: mgpu.FragmentedArray,
        token: mgpu.FragmentedArray,
        first_row: mgpu.FragmentedArray,
        end_row: mgpu.FragmentedArray,
    ) -> None:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        first_head, first_token, begin, end = map(fragments.scalar, (head, token, first_row, end_row))
        for row, value, is_writer in _lane_rows(values):
            head_index = arith.divui(row, lanes.const(tokens_per_head))
            token_index = arith.remui(row, lanes.const(tokens_per_head))
            is_valid = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, token_index, begin),
                arith.cmpi(arith.CmpIPredicate.slt, token_index, end),
            )
            index = lanes.add(
                lanes.times(lanes.add(first_head, head_index), stride), first_token, token_index
            )
            predicate = arith.andi(is_writer, is_valid)
            pointer = lanes.element_pointer(ref, index, 4)
            lanes.run("st.global.f32 [$0], $1;", pointer, value, predicate=predicate)

    store(ref, values, head, token, first_row, end_row)


def _store_token_rows(
    ref: Ref,
    acc: Tile,
    head: Scalar,
    token: Scalar,
    first_row: Scalar,
    end_row: Scalar,
    *,
    tokens_per_head: int,
    columns: int,
) -> None:
    num = jnp.maximum(end_row - first_row, 0)
    acc = acc[:, :columns].astype(ref.dtype)
    offset, size = first_row, tokens_per_head
    while size:
        for i in range(acc.shape[0] // tokens_per_head):

            @pl.when((num & size) != 0)
            def _(i: int = i, offset: Scalar = offset, size: int = size) -> None:
                start = i * tokens_per_head + offset
                rows = lax.dynamic_slice(acc, (start, start * 0), (size, columns))
                ref[pl.ds(token + offset, size), head + i] = rows

        offset, size = offset + (num & size), size // 2


@with_fallback(_store_token_rows)
def store_token_rows(
    ref: Ref,
    acc: Tile,
    head: Scalar,
    token: Scalar,
    first_row: Scalar,
    end_row: Scalar,
    *,
    tokens_per_head: int,
    columns: int,
) -> None:
    """Store the valid rows of an accumulator, which are the tokens of a head, then of the next head.

    Args:
        ref: 16-bit array [tokens, heads, columns] in global memory.
        acc: Accumulator, f32 [64 or 128, at least columns].
        head: Head of the first rows.
        token: Token of each head's first row; may be negative if that row is not valid.
        first_row: Index of the first valid row among a head's rows.
        end_row: One past the index of the last valid row among a head's rows.
        tokens_per_head: Static: number of rows of a head, a power of two.
        columns: Static: number of columns to store, a multiple of 8.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, *[SCALAR] * 4), return_type=())
    body = functools.partial(
        _store_token_rows_by_lanes, dtype=ref.dtype, tokens_per_head=tokens_per_head, columns=columns
    )
    run(body)(ref, acc, head, token, first_row, end_row)


def _store_token_rows_by_lanes(
    _ctx: mgpu.LaunchContext,
    ref: ir.Value,
    acc: mgpu.FragmentedArray,
    *scalars: mgpu.FragmentedArray,
    dtype: np.dtype,
    tokens_per_head: int,
    columns: int,
) -> tuple[()]:
    (stride, head_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    head, token, begin, end = map(fragments.scalar, scalars)
    lane, warp = lanes.lane_and_warp()
    g, t = arith.shrui(lane, lanes.const(2)), arith.andi(lane, lanes.const(3))
    for m, half in itertools.product(range(acc.shape[0] // WARPGROUP_ROWS), (0, 1)):
        row = lanes.add(lanes.times(warp, 16), g, WARPGROUP_ROWS * m + 8 * half)
        head_index = lanes.add(head, arith.divui(row, lanes.const(tokens_per_head)))
        token_index = arith.remui(row, lanes.const(tokens_per_head))
        is_valid = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, token_index, begin),
            arith.cmpi(arith.CmpIPredicate.slt, token_index, end),
        )
        offset = lanes.add(lanes.times(head_index, 2 * head_stride), lanes.times(t, 4))
        first = lanes.advance(lanes.pointer(ref), lanes.add(token, token_index), 2 * stride, offset)
        for n, fragment in enumerate(fragments.row_tiles(acc)[m][: columns // 8]):
            pair = pack_16bit(fragment[2 * half], fragment[2 * half + 1], dtype)
            lanes.run(f"st.global.b32 [$0 + {16 * n}], $1;", first, pair, predicate=is_valid)
    return ()


def _lane_rows(values: mgpu.FragmentedArray) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Yield, for each row of a lane, its index, its number, and whether this lane is the one to store it."""
    require_layout(values.layout, ROW_LAYOUT)
    lane, warp = lanes.lane_and_warp(reread=True)
    g, t = arith.shrui(lane, lanes.const(2)), arith.andi(lane, lanes.const(3))
    for index, register in enumerate(values.registers.flatten()):
        value = vector.extract(register, dynamic_position=[], static_position=[0])
        # All four lanes with the same g hold the value: lane t = 0 stores row g, lane t = 1 row g + 8, and
        # of 128 rows lane t = 2 row g + 64, lane t = 3 row g + 72.
        is_writer = arith.cmpi(arith.CmpIPredicate.eq, t, lanes.const(index))
        row = lanes.add(lanes.times(warp, 16), g, index // 2 * WARPGROUP_ROWS + index % 2 * 8)
        yield row, value, is_writer


def _store_tiles(ref: Ref, tiles_s: Ref, index: Index) -> None:
    plgpu.copy_smem_to_gmem(tiles_s, ref.at[index])


@with_fallback(_store_tiles)
def store_tiles(ref: Ref, tiles_s: Ref, index: Index) -> None:
    """Start to copy swizzled shared memory by TMA to an array whose number of rows is no multiple of 8.

    `plgpu.copy_smem_to_gmem` refuses such an array. Here TMA leaves out the rows past the last multiple of 8,
    to which no whole tile belongs.

    Args:
        ref: 16-bit array [rows, ...] of global memory.
        tiles_s: [a multiple of 8, columns] of swizzled shared memory.
        index: Where to store the tiles: slices of rows and columns, numbers between; the rows start at a
            multiple of 8.
    """
    starts = [jnp.int32(place.start if isinstance(place, pl.Slice) else place) for place in index]
    sizes = [int(place.size) if isinstance(place, pl.Slice) else None for place in index]
    tiling, swizzle = swizzle_transforms(jnp.dtype(ref.dtype).itemsize)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType((tiling, swizzle)), *[SCALAR] * len(index)), return_type=()
    )
    def store(
        ctx: mgpu.LaunchContext, ref: ir.Value, tiles_s: ir.Value, *starts: mgpu.FragmentedArray
    ) -> None:
        places = [arith.index_cast(ir.IndexType.get(), fragments.scalar(start)) for start in starts]
        slices = [
            place if size is None else mgpu.ds(place, size) for place, size in zip(places, sizes, strict=True)
        ]
        array, batch_index = _split_batch_index(ref)
        ctx.async_copy(
            src_ref=tiles_s,
            dst_ref=array,
            gmem_slice=(*batch_index, *slices),
            gmem_transform=mgpu.TileTransform(tiling.tiling, rounding=launch_context.Rounding.DOWN),
            swizzle=swizzle.swizzle,
            oob_mode=plgpu.OOBFillMode.UNDEFINED,
        )

    store(ref, tiles_s, *starts)


def _split_batch_index(ref: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """Return the kernel's array and the index of `ref` in it; under jax.vmap `ref` is a part of the array."""
    while isinstance(ref, ir.BlockArgument):
        ref = ref.owner.owner.operands[ref.arg_number]
    operation = ref.owner
    if isinstance(operation, ir.Block) or operation.name != "memref.subview":
        return ref, []
    array, *index = operation.operands
    assert len(index) == ir.MemRefType(array.type).rank - ir.MemRefType(ref.type).rank, operation
    return array, index
