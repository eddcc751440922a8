"""The least score of each row that a share of its softmax needs: a bit at a time, by summing."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.checks import require, require_axes
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.types import Interpret, Layout, Rows, Scalar

WIDTH = 128  # threads of a warpgroup
MAX_TOP_P_LEN = 8192  # of a row: scores and probabilities stay in registers
MAX_SHORT_ROW_LEN = 128  # rows so short share a warpgroup, four threads each, whose sums need no barrier
TOGETHER = 64
TOP_BIT = 29  # of a probability: at most 1.0
f32 = jnp.float32


def top_p_threshold(
    scores: Float[Array, "rows len"], mass: float, *, interpret: Interpret = None
) -> Float[Array, " rows"]:
    """The largest score such that it and all that score more have `mass` of the row's softmax.

    Args:
        scores: At most MAX_TOP_P_LEN a row, no NaN and no inf. A row of -inf has no such score: inf.
        mass: Static: more than 0, less than 1.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: A row has more scores than fit, or mass is not between 0 and 1.
        NotImplementedError: It is differentiated.
    """
    require_axes(2, scores=scores)
    num_rows, length = scores.shape
    require(length <= MAX_TOP_P_LEN, "scores", f"have at most {MAX_TOP_P_LEN} a row", scores.shape)
    require(0 < mass < 1, "mass", "lie in (0, 1)", mass)
    if 0 in scores.shape:
        return jnp.full(num_rows, jnp.inf, f32)
    scores = forbid_kernel_derivative(scores, "top_p_threshold", "Sort the scores and add up their softmax")
    width = -(-length // WIDTH) * WIDTH
    together = TOGETHER if width <= MAX_SHORT_ROW_LEN else 1
    spare = -num_rows % together
    scores = jnp.pad(scores, ((0, spare), (0, width - length)), constant_values=-jnp.inf)
    layout: Layout = plgpu.Layout.WGMMA
    one_each: Layout = plgpu.Layout.WGMMA.reduce(1)
    if together == 1:
        layout, one_each = plgpu.Layout.WG_STRIDED((width,), 1), None

    def body(scores_g, out_g):  # type: ignore[no-untyped-def]
        nth = lax.axis_index("cta")
        rows = nth if together == 1 else pl.ds(nth * together, together)
        scores = plgpu.load(scores_g.at[rows], layout=layout, optimized=False)
        wide = lambda x: x if one_each is None else lax.broadcast_in_dim(x, (together, width), [0])
        top = scores.max(axis=-1)
        p = jnp.exp(scores - wide(jnp.where(top == -jnp.inf, 0.0, top)))
        bits = lax.bitcast_convert_type(p, jnp.int32)  # ordered as the probabilities are
        sum_from = lambda least: jnp.where(bits >= wide(least), p, 0.0).sum(axis=-1)
        wanted = p.sum(axis=-1) * mass

        def with_bit(nth: Scalar, least: Rows) -> Rows:
            larger = least + lax.shift_left(jnp.int32(1), TOP_BIT - nth)
            return jnp.where(sum_from(larger) >= wanted, larger, least)

        zero = (
            jnp.int32(0) if one_each is None else plgpu.layout_cast(jnp.zeros(together, jnp.int32), one_each)
        )
        least = lax.fori_loop(0, TOP_BIT + 1, with_bit, zero)
        out_g[rows] = jnp.where(bits >= wide(least), scores, jnp.inf).min(axis=-1)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows + spare,), f32),
        grid=((num_rows + spare) // together,),
        grid_names=("cta",),
        kernel_name="top_p_threshold",
        interpret=interpret,
    )
    return kernel(scores)[:num_rows]
