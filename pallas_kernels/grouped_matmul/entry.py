"""grouped_matmul: rows in tiles, each times its group's matrix."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.checks import require, require_axes, require_shape, unsupported
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.grouped_matmul.kernel import TILE_ROWS, Shape, multiply_tiles
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_grouped_matmul


def grouped_matmul(
    x: Float[Array, "rows inputs"],
    weights: Float[Array, "groups _ _"],
    group_of_tile: Int32[Array, " tiles"],
    *,
    outputs_first: bool = False,
    interpret: Interpret = None,
) -> Float[Array, "rows outputs"]:
    """`x[rows of a tile] @ weights[group of the tile]`, for each TILE_ROWS rows.

    Sums in f32. The time follows the tiles that have a group.

    Args:
        x: Rows, a multiple of TILE_ROWS of them, so laid out that a tile's are of one group. What a tile has
            besides may be anything: no row sees another.
        weights: A matrix [inputs, outputs] a group.
        group_of_tile: Below 0 of a tile that nobody wants: its results are garbage, and it takes no time.
        outputs_first: Static: matrices are [outputs, inputs].
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for these sizes, or it is differentiated.
    """
    require_axes(2, x=x)
    require_axes(3, weights=weights)
    require_axes(1, group_of_tile=group_of_tile)
    rows, inputs = x.shape
    require(rows % TILE_ROWS == 0, "x", f"have a multiple of {TILE_ROWS} rows", x.shape)
    outputs, summed = weights.shape[1:] if outputs_first else weights.shape[:0:-1]
    require(summed == inputs, "weights", f"have {inputs} inputs, as x", weights.shape)
    require_shape("group_of_tile", group_of_tile.shape, (rows // TILE_ROWS,), "one group per tile")
    reason = why_not_grouped_matmul(
        dtype=x.dtype, weights_dtype=weights.dtype, inputs=inputs, outputs=outputs
    )
    if reason is not None:
        raise unsupported("grouped_matmul", reason, "Use another implementation")
    if 0 in (rows, len(weights)):
        return jnp.zeros((rows, outputs), x.dtype)
    way_out = "Ask jattn.models.experts.Experts for implementation='xla'"
    x, weights = forbid_kernel_derivative((x, weights), "grouped_matmul", way_out)
    shape = Shape(inputs=inputs, outputs=outputs, outputs_first=outputs_first)
    return multiply_tiles(x, weights, group_of_tile, shape=shape, interpret=interpret)
