"""The k-th largest value of each row: one bit after the other, by counting."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

WIDTH = 128  # threads of a warpgroup
MAX_LEN = 16384  # of a row: it stays in registers


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
        count = lambda least: jnp.where(keys >= least, 1, 0).sum()
        start = jnp.where(count(jnp.int32(0)) >= k, jnp.int32(0), jnp.int32(-(2**31)))

        def with_bit(nth: Any, least: Any) -> Any:
            higher = least + lax.shift_left(jnp.int32(1), 30 - nth)
            return jnp.where(count(higher) >= k, higher, least)

        out_g[row] = lax.fori_loop(0, 31, with_bit, start)

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
