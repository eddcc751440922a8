"""The register and memory layouts that this package assumes, and checks that JAX uses them.

JAX describes a register layout by a tiling and by the tiled dimensions that warps, lanes and a register's
elements are spread over; registers are ordered by the remaining dimensions. The tests derive from these
descriptions which thread holds which element. In comments, lane 4 g + t of a warp has row index g (0 to 7)
and pair index t (0 to 3), as in the PTX ISA's "Matrix Fragments".
"""

import math
from collections.abc import Sequence

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

SCALAR = plgpu.Layout.WG_SPLAT(())
THREADS = 128  # threads of a warpgroup

# WGMMA of shared/layouts.py: for each 64 rows and 8 columns, lane 4 g + t of warp w has two registers: rows
# 16 w + g and 16 w + g + 8, columns 2 t and 2 t + 1. Registers are ordered by 64 rows, then by 8 columns,
# then by these two.
WGMMA_LAYOUT = mgpu.TiledLayout(
    Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
# ROW of shared/layouts.py: one value per row, for the same rows as WGMMA, one register each; all four t hold
# the same value.
ROW_LAYOUT = mgpu.TiledLayout(
    Tiling(((64,), (16,), (8,), (1,))), warp_dims=(-4,), lane_dims=(-2, Replicated(4)), vector_dim=-1
)
# B operand of mma.m16n8k16, the same in every warp: for each 16 rows and 8 columns, lane 4 g + t has two
# registers of column g: rows 2 t and 2 t + 1, and the rows 8 further. Registers are ordered by 16 rows, 8
# columns, these two.
MMA_RHS_LAYOUT = mgpu.TiledLayout(
    Tiling(((16, 8), (8, 8), (2, 1))), warp_dims=(Replicated(4),), lane_dims=(-3, -4), vector_dim=-2
)
# SCALAR: every thread has the value.
SCALAR_LAYOUT = mgpu.WGSplatFragLayout(())


def require_layout(actual: mgpu.FragmentedLayout, expected: mgpu.FragmentedLayout) -> None:
    """Assert that JAX gives an array the register layout that the code here was written for.

    Args:
        actual: JAX's description of the array's layout.
        expected: One of the layouts above.
    """
    assert actual == expected, (
        f"JAX {jax.__version__} lays an array out as {actual}, but pallas_kernels/ptx expects {expected} "
        "and would read the wrong registers. Use jax 0.11.2, or adapt the code that reads the registers."
    )


def require_tiles(ref_type: ir.MemRefType, *, rows: int, row_bytes: int, swizzle: int) -> None:
    """Assert that a tile of shared memory consists of contiguous swizzle atoms of 8 rows, in row-major order.

    Args:
        ref_type: JAX's type of the reference [..., rows, columns].
        rows: Number of rows of a tile.
        row_bytes: Bytes of a tile's row.
        swizzle: Bytes of an atom's row.
    """
    itemsize = mgpu.bytewidth(ref_type.element_type)
    expected = [rows // 8, row_bytes // swizzle, 8, swizzle // itemsize]
    is_expected = list(ref_type.shape)[-4:] == expected and is_contiguous(ref_type)
    assert is_expected, (
        f"JAX {jax.__version__} stores a tile of shared memory as {ref_type}, but pallas_kernels/ptx expects "
        f"contiguous pieces {expected} and would read the wrong bytes. Use jax 0.11.2, or adapt the code "
        "that reads the tile."
    )


def is_contiguous(ref_type: ir.MemRefType) -> bool:
    """Return whether a memory reference is contiguous; a dimension of size 1 may have any stride."""
    strides, _ = ref_type.get_strides_and_offset()
    expected = contiguous_strides(ref_type.shape)
    return all(a == b or size == 1 for a, b, size in zip(strides, expected, ref_type.shape, strict=True))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major stride of each dimension in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
