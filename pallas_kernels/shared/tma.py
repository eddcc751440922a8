"""Slices of global memory that TMA copies."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Scalar, Slice

# A copy of what is contiguous and within bounds takes no tensor map: any length of 16 bytes and more will do,
# without alignment to 128.
BULK = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def padded_slice(size: int, length: int, zero: Scalar) -> Slice:
    """The first `size` of `length` elements of an axis; past the end TMA reads zeros and writes nothing.

    JAX refuses a slice that is known to reach past the end, so such a one begins at a zero that it does not
    know; the division tells the compiler that tiles of shared memory divide it.

    Args:
        size: Static.
        length: Static.
        zero: A traced int32 0.
    """
    if size <= length:
        return pl.ds(0, size)
    return pl.ds(lax.div(zero, 64) * 64, size)
