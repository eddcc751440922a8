"""Register layouts: of the tiles that a warpgroup multiplies, and of rows that no tensor core multiplies."""

import math

from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Layout

WARPGROUP_ROWS = 64  # rows of a matrix product per warpgroup: the M of a wgmma instruction
WGMMA = plgpu.Layout.WGMMA  # of a tile that a warpgroup multiplies: 16 rows per warp of each 64
ROW = WGMMA.reduce(1)  # of a vector with one number per row of such a tile
COLUMN = WGMMA.reduce(0)  # of a vector with one number per column of such a tile


def row_layout(rows: int, columns: int) -> Layout:
    """Return the layout of rows, such as a token's heads: one row per warp, or copies in several warps.

    The layout of a wgmma tile, 16 rows per warp, would be mostly padding for a token of few heads.
    """
    lanes = math.gcd(columns, 32)
    width, warps = math.gcd(columns // lanes, lanes // 8), math.gcd(rows, 4)
    warp_copies = () if warps == 4 else (Replicated(4 // warps),)
    lane_copies = () if lanes == 32 else (Replicated(32 // lanes),)
    return plgpu.Layout.TILED(
        Tiling(((warps, lanes * width), (width,))),  # [warps, lanes, width]
        warp_dims=(*warp_copies, *(() if warps == 1 else (-3,))),
        lane_dims=(*lane_copies, -2),
        vector_dim=-1,
    )
