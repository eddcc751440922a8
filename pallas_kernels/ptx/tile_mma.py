"""Products of tiles by mma.sync, which every GPU since Ampere has; for GPUs without wgmma.

Each warp multiplies the 16 of each 64 rows that it holds in the layout of a wgmma accumulator, and reads all
columns of the right operand from shared memory: once for all of its rows. No warp waits for another.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.mma import LdmatrixTile, mma_m16n8k16, pack_16bit
from pallas_kernels.shared.layouts import WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Ref, Tile, f32

STEP = 16  # elements that one mma.sync sums over
SWIZZLE = 128


def _multiply_tiles(acc: Tile, a_s: Ref, b_s: Ref, *, is_transposed: bool) -> Tile:
    a, b = a_s[...].astype(f32), b_s[...].astype(f32)
    return acc + jnp.matmul(a, b.T if is_transposed else b, precision="highest")


@with_fallback(_multiply_tiles, reads_smem=True)
def multiply_tiles(acc: Tile, a_s: Ref, b_s: Ref, *, is_transposed: bool) -> Tile:
    """Return acc + A B, or acc + A B^T.

    Args:
        acc: f32 [rows, n] with rows a multiple of 64.
        a_s: A in 16 bits in swizzled SMEM, [rows, k] with k a multiple of 64.
        b_s: B in 16 bits in swizzled SMEM, [k, n] with n a multiple of 64, or with `is_transposed` [n, k]
            with n a multiple of 8. If n is no multiple of 16, 8 rows more are read, which must be inside the
            shared memory of the kernel; their content does not matter.
        is_transposed: Static: whether B is [n, k].
    """
    ref_type = plgpu.RefType(swizzle_transforms(2))
    result = plgpu.ShapeDtypeStruct(acc.shape, f32, WGMMA)
    run = plgpu.inline_mgpu(arg_types=(WGMMA, ref_type, ref_type), return_type=result)
    sizes, dtype = (*acc.shape, a_s.shape[1]), jnp.dtype(a_s.dtype)
    body = functools.partial(_multiply_by_lanes, sizes=sizes, dtype=dtype, is_transposed=is_transposed)
    return run(body)(acc, a_s, b_s)


def multiply_chunks(a_s: Ref, b_s: Ref, *, is_interpreted: bool) -> Tile:
    """Return the sum of A B^T over the chunks, f32 [rows, n]: the products of heads, for instance.

    Args:
        a_s: A of each chunk in SMEM, [chunks, rows, k]; see multiply_tiles.
        b_s: B of each chunk in SMEM, [chunks, n, k].
        is_interpreted: Static: whether the kernel runs in interpret mode.
    """
    product = plgpu.layout_cast(jnp.zeros((a_s.shape[1], b_s.shape[1]), f32), WGMMA)
    for chunk in range(a_s.shape[0]):
        operands = a_s.at[chunk], b_s.at[chunk]
        product = multiply_tiles(product, *operands, is_transposed=True, is_interpreted=is_interpreted)
    return product


def _multiply_by_lanes(
    _ctx: mgpu.LaunchContext,
    acc: mgpu.FragmentedArray,
    a_s: ir.Value,
    b_s: ir.Value,
    *,
    sizes: tuple[int, int, int],
    dtype: np.dtype,
    is_transposed: bool,
) -> mgpu.FragmentedArray:
    rows, n, k = sizes
    left = LdmatrixTile(a_s, rows=rows, row_bytes=2 * k, swizzle=SWIZZLE, keeps_addresses=False)
    right = _right_operand(b_s, *((n, k) if is_transposed else (k, n)), is_transposed=is_transposed)
    sums: list[list[Sequence[ir.Value]]] = [list(columns) for columns in fragments.row_tiles(acc)]
    for step in range(k // STEP):
        a_operands = [left.load(0, step, first_row=first_row) for first_row in range(0, rows, WARPGROUP_ROWS)]
        for first in range(0, n, 16):
            # Four matrices of 8 x 8 are two B operands of 16 rows and 8 columns, low and high rows.
            if is_transposed:
                low, high, next_low, next_high = right.load(0, step, first_row=first)
            else:
                low, high, next_low, next_high = right.load(
                    0, first // 16, first_row=STEP * step, transpose=True
                )
            operands = ((low, high), (next_low, next_high))[: n // 8 - first // 8]
            _add_products(sums, a_operands, operands, first // 8, dtype)
    return fragments.tile_from_row_tiles(sums)


def _right_operand(b_s: ir.Value, rows: int, columns: int, *, is_transposed: bool) -> LdmatrixTile:
    """Return a right operand in shared memory, all of whose rows each warp loads."""
    return LdmatrixTile(
        b_s, rows=rows, row_bytes=2 * columns, swizzle=SWIZZLE,
        by_warp=False, units_first=is_transposed, keeps_addresses=False,
    )  # fmt: skip


def _add_products(
    sums: Sequence[list[Sequence[ir.Value]]],
    a_operands: Sequence[Sequence[ir.Value]],
    b_operands: Sequence[Sequence[ir.Value]],
    first_column: int,
    dtype: np.dtype,
) -> None:
    """Add to the fragments of each 64 rows the product of their A operand and each B operand.

    Args:
        sums: Fragments of each 8 columns, for each 64 rows.
        a_operands: A operand of each 64 rows.
        b_operands: B operand of each 8 columns, from `first_column` on.
        first_column: Index among the fragments of a row tile.
        dtype: Dtype of the operands.
    """
    for column, b in enumerate(b_operands, first_column):
        for columns, a in zip(sums, a_operands, strict=True):
            columns[column] = mma_m16n8k16(columns[column], a, b, dtype)


def _multiply_registers(acc: Tile, a: Tile, b_s: Ref) -> Tile:
    return acc + jnp.matmul(round_to(a, b_s.dtype), b_s[...].astype(f32), precision="highest")


@with_fallback(_multiply_registers, reads_smem=True)
def multiply_registers(acc: Tile, a: Tile, b_s: Ref) -> Tile:
    """Return acc + A B with A in registers, in the layout of an accumulator: that of an operand when rounded.

    Args:
        acc: f32 [rows, n] with rows a multiple of 64.
        a: A, f32 [rows, k], which is rounded to the dtype of B.
        b_s: B in 16 bits in swizzled SMEM, [k, n] with k a multiple of 16 and n a multiple of 64.
    """
    result = plgpu.ShapeDtypeStruct(acc.shape, f32, WGMMA)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, plgpu.RefType(swizzle_transforms(2))), return_type=result
    )
    body = functools.partial(_multiply_registers_by_lanes, shape=b_s.shape, dtype=jnp.dtype(b_s.dtype))
    return run(body)(acc, a, b_s)


def _multiply_registers_by_lanes(
    _ctx: mgpu.LaunchContext,
    acc: mgpu.FragmentedArray,
    a: mgpu.FragmentedArray,
    b_s: ir.Value,
    *,
    shape: tuple[int, int],
    dtype: np.dtype,
) -> mgpu.FragmentedArray:
    k, n = shape
    right = _right_operand(b_s, k, n, is_transposed=False)
    sums: list[list[Sequence[ir.Value]]] = [list(columns) for columns in fragments.row_tiles(acc)]
    # Two fragments of 8 columns are an operand of 16 columns: rows g and g + 8 of the first, then the second.
    halves = [
        [[pack_16bit(w, x, dtype), pack_16bit(y, z, dtype)] for w, x, y, z in columns]
        for columns in fragments.row_tiles(a)
    ]
    for step in range(k // STEP):
        a_operands = [row_tile[2 * step] + row_tile[2 * step + 1] for row_tile in halves]
        for first in range(0, n, 16):
            low, high, next_low, next_high = right.load(0, first // 16, first_row=STEP * step, transpose=True)
            _add_products(sums, a_operands, ((low, high), (next_low, next_high)), first // 8, dtype)
    return fragments.tile_from_row_tiles(sums)
