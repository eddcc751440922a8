"""top_p_threshold: the score per row from which on the highest scores have a given share of the softmax.

The threshold is found one bit at a time, by summing the probabilities above each candidate.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.checks import forbid_kernel_derivative, require, require_axes
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.types import Interpret, Layout, Ref, Rows, Scalar, Tile, f32

WIDTH = 128  # threads per warpgroup
MAX_TOP_P_LEN = 8192  # scores per row: scores and probabilities stay in registers
# Up to this length 64 rows share a warpgroup, with four threads per row, whose sums need no barrier.
MAX_SHORT_ROW_LEN = 128
ROWS_TOGETHER = 64
TOP_BIT = 29  # highest bit of an f32 probability, which is at most 1.0


def top_p_threshold(
    scores: Float[Array, "rows len"], mass: float, *, interpret: Interpret = None
) -> Float[Array, " rows"]:
    """Return the largest score such that it and all higher scores have at least `mass` of the row's softmax.

    Args:
        scores: At most MAX_TOP_P_LEN scores per row, without NaN and inf. The result for a row of -inf is
            inf.
        mass: Static share of the softmax, between 0 and 1.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: If a row has too many scores, or mass is not between 0 and 1.
        NotImplementedError: If it is differentiated.
    """
    require_axes(2, scores=scores)
    num_rows, length = scores.shape
    require(length <= MAX_TOP_P_LEN, "scores", f"have at most {MAX_TOP_P_LEN} elements per row", scores.shape)
    require(0 < mass < 1, "mass", "lie in (0, 1)", mass)
    if 0 in scores.shape:
        return jnp.full(num_rows, jnp.inf, f32)
    fix = "Sort the scores and use the cumulative sum of their softmax"
    scores = forbid_kernel_derivative(scores, "top_p_threshold", fix)
    # Pad rows to a multiple of the threads with -inf, whose probability is 0.
    width = -(-length // WIDTH) * WIDTH
    together = ROWS_TOGETHER if width <= MAX_SHORT_ROW_LEN else 1
    num_padding = -num_rows % together
    scores = jnp.pad(scores, ((0, num_padding), (0, width - length)), constant_values=-jnp.inf)
    tile_layout: Layout = WGMMA
    row_layout: Layout = ROW
    if together == 1:
        tile_layout, row_layout = plgpu.Layout.WG_STRIDED((width,), 1), None

    def body(scores_g: Ref, out_g: Ref) -> None:
        cta = lax.axis_index("cta")
        rows = cta if together == 1 else pl.ds(cta * together, together)
        scores = plgpu.load(scores_g.at[rows], layout=tile_layout, optimized=False)

        def over_row(x: Rows) -> Tile:
            return x if row_layout is None else lax.broadcast_in_dim(x, (together, width), [0])

        row_max = scores.max(axis=-1)
        p = jnp.exp(scores - over_row(jnp.where(row_max == -jnp.inf, 0.0, row_max)))
        # The bits of non-negative floats, read as integers, are ordered as the floats are.
        bits = lax.bitcast_convert_type(p, jnp.int32)

        def sum_from(threshold: Rows) -> Rows:
            return jnp.where(bits >= over_row(threshold), p, 0.0).sum(axis=-1)

        target = p.sum(axis=-1) * mass

        # Set each bit of the threshold, from the highest on, if the sum above it is still large enough.
        def with_bit(i: Scalar, threshold: Rows) -> Rows:
            larger = threshold + lax.shift_left(jnp.int32(1), TOP_BIT - i)
            return jnp.where(sum_from(larger) >= target, larger, threshold)

        zero = jnp.int32(0)
        if row_layout is not None:
            zero = plgpu.layout_cast(jnp.zeros(together, jnp.int32), row_layout)
        threshold = lax.fori_loop(0, TOP_BIT + 1, with_bit, zero)
        out_g[rows] = jnp.where(bits >= over_row(threshold), scores, jnp.inf).min(axis=-1)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows + num_padding,), f32),
        grid=((num_rows + num_padding) // together,),
        grid_names=("cta",),
        kernel_name="top_p_threshold",
        interpret=interpret,
    )
    return kernel(scores)[:num_rows]
