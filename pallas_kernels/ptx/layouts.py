"""What this room takes for granted of JAX, compared with what JAX says of itself when code is built.

JAX describes a layout by a tiling, and which of the tiled dimensions warps, lanes and a register's elements
are; registers come in the order of the others. Tests spell out which element is where by these descriptions.
"""

import math
from collections.abc import Sequence

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
SCALAR = plgpu.Layout.WG_SPLAT(())
THREADS = 128  # of a warpgroup
BY_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

# Lane 4 g + t of warp w: of each 64 rows and 8 columns two registers, rows 16 w + g and 16 w + g + 8, columns
# 2 t and 2 t + 1 in each. Registers by 64 rows, then 8 columns, then those two.
TILE_LAYOUT = mgpu.TiledLayout(
    Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
# The same rows, a register each; all t have the same.
ROW_LAYOUT = mgpu.TiledLayout(
    Tiling(((64,), (16,), (8,), (1,))), warp_dims=(-4,), lane_dims=(-2, Replicated(4)), vector_dim=-1
)
# Lane 4 g + t of every warp: of each 16 rows and 8 columns two registers, rows 2 t and 2 t + 1, and 8 further
# on, of column g. Registers by 16 rows, then 8 columns, then those two.
RIGHT_LAYOUT = mgpu.TiledLayout(
    Tiling(((16, 8), (8, 8), (2, 1))), warp_dims=(Replicated(4),), lane_dims=(-3, -4), vector_dim=-2
)
# Thread i has element i.
BY_THREAD_LAYOUT = mgpu.WGStridedFragLayout((THREADS,), vec_size=1)
# Every thread has it.
SCALAR_LAYOUT = mgpu.WGSplatFragLayout(())


def require_layout(found: mgpu.FragmentedLayout, known: mgpu.FragmentedLayout) -> None:
    """That JAX lays an array out as the code here was written for.

    Args:
        found: JAX's description.
        known: One of those above.
    """
    assert found == known, (
        f"JAX {jax.__version__} lays an array out as {found}, and pallas_kernels/ptx knows {known}: "
        "registers would be taken for others. Use jax 0.11.2, or mend what reads them."
    )


def require_tiles(of_ref: ir.MemRefType, *, rows: int, row_bytes: int, swizzle: int) -> None:
    """That a tile of shared memory lies in pieces of 8 rows, `swizzle` bytes each, row by row of pieces.

    Args:
        of_ref: What JAX hands over for [..., rows, columns].
        rows: Of a tile.
        row_bytes: Bytes of a tile's row.
        swizzle: Bytes of a piece's row.
    """
    itemsize = mgpu.bytewidth(of_ref.element_type)
    known = [rows // 8, row_bytes // swizzle, 8, swizzle // itemsize]
    is_known = list(of_ref.shape)[-4:] == known and is_contiguous(of_ref)
    assert is_known, (
        f"JAX {jax.__version__} hands a tile of shared memory over as {of_ref}, and pallas_kernels/ptx knows "
        f"pieces {known}, one after the other: bytes would be taken for others. Use jax 0.11.2, or mend "
        "what reads them."
    )


def is_contiguous(of_ref: ir.MemRefType) -> bool:
    """Whether a memory reference's elements follow each other; a dimension of 1 may have any stride."""
    strides, _ = of_ref.get_strides_and_offset()
    wanted = contiguous_strides(of_ref.shape)
    return all(a == b or size == 1 for a, b, size in zip(strides, wanted, of_ref.shape, strict=True))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours of each dimension."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
