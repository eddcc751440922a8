"""grouped_matmul: multiply each tile of rows by the matrix of its group."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.checks import forbid_kernel_derivative, require, require_axes, require_shape, unsupported
from pallas_kernels.grouped_matmul.kernel import TILE_ROWS, GroupedMatmulDims, multiply_tiles
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_grouped_matmul

FIX = "Pass implementation='xla' to jattn.models.experts.Experts"


def grouped_matmul(
    x: Float[Array, "rows inputs"],
    weights: Float[Array, "groups _ _"],
    group_of_tile: Int32[Array, " tiles"],
    *,
    outputs_first: bool = False,
    interpret: Interpret = None,
) -> Float[Array, "rows outputs"]:
    """Return `x[rows of a tile] @ weights[group of the tile]` for each tile of TILE_ROWS rows.

    Sums are in f32. The time is proportional to the number of tiles that have a group.

    Args:
        x: Rows, a multiple of TILE_ROWS, sorted such that all rows of a tile belong to one group. Padding
            rows of a tile may have any value: rows do not depend on each other.
        weights: One matrix [inputs, outputs] per group.
        group_of_tile: Group of each tile. A tile with a negative group takes no time, and its result is
            undefined.
        outputs_first: Static: matrices are [outputs, inputs].
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: If shapes disagree.
        NotImplementedError: If the kernel does not support these sizes, or is differentiated.
    """
    require_axes(2, x=x)
    require_axes(3, weights=weights)
    require_axes(1, group_of_tile=group_of_tile)
    rows, inputs = x.shape
    require(rows % TILE_ROWS == 0, "x", f"have a multiple of {TILE_ROWS} rows", x.shape)
    outputs, weight_inputs = weights.shape[1:] if outputs_first else weights.shape[:0:-1]
    require(weight_inputs == inputs, "weights", f"have {inputs} inputs, as x", weights.shape)
    require_shape("group_of_tile", group_of_tile.shape, (rows // TILE_ROWS,), "one group per tile")
    reason = why_not_grouped_matmul(
        dtype=x.dtype, weights_dtype=weights.dtype, inputs=inputs, outputs=outputs
    )
    if reason is not None:
        raise unsupported("grouped_matmul", reason, FIX)
    if 0 in (rows, len(weights)):
        return jnp.zeros((rows, outputs), x.dtype)
    x, weights = forbid_kernel_derivative((x, weights), "grouped_matmul", FIX)
    dims = GroupedMatmulDims(
        inputs=inputs, outputs=outputs, outputs_first=outputs_first, gpu=kernel_architecture(weights)
    )
    return multiply_tiles(x, weights, group_of_tile, dims=dims, interpret=interpret)
