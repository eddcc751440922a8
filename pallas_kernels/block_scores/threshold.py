"""The k-th largest value of each row: two bits at a time, by counting."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

WIDTH = 128  # threads of a warpgroup
MAX_LEN = 16384  # of a row: it stays in registers
HALF = 2**16  # of a register


def kth_largest(values: Float[Array, "rows len"], k: int, *, interpret: Any = None) -> Float[Array, " rows"]:
    """The k-th largest value of each row, which has no NaN.

    Args:
        values: At most MAX_LEN a row.
        k: Static.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.
    """
    rows, length = values.shape
    bits = lax.bitcast_convert_type(values, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)  # ordered as the values are
    keys = jnp.pad(keys, ((0, 0), (0, -length % WIDTH)), constant_values=-(2**31))

    def body(keys_g, out_g):  # type: ignore[no-untyped-def]
        row = lax.axis_index("row")
        keys = plgpu.load(keys_g.at[row], layout=plgpu.Layout.WG_STRIDED((keys_g.shape[1],), 1))
        weighed = lambda least, weight: jnp.where(keys >= least, weight, 0)
        count = lambda least: weighed(least, 1).sum()
        start = jnp.where(count(jnp.int32(0)) >= k, jnp.int32(0), jnp.int32(-(2**31)))
        top_bit = start + (1 << 30)
        start = jnp.where(count(top_bit) >= k, top_bit, start)

        def with_bits(nth: Any, least: Any) -> Any:
            shift = 28 - 2 * nth
            first, second, third = (least + lax.shift_left(jnp.int32(n), shift) for n in (1, 2, 3))
            # Two counts in a register: a sum over the warpgroup costs more than its addends.
            both = (weighed(first, 1) + weighed(second, HALF)).sum()
            reached = [both & (HALF - 1), lax.shift_right_logical(both, 16), count(third)]
            return least + lax.shift_left(sum((n >= k).astype(jnp.int32) for n in reached), shift)

        out_g[row] = lax.fori_loop(0, 15, with_bits, start)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="kth_largest",
        interpret=interpret,
    )
    found = kernel(keys)
    return lax.bitcast_convert_type(jnp.where(found < 0, found ^ jnp.int32(2**31 - 1), found), jnp.float32)
