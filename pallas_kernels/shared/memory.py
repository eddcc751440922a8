"""Slices of global memory that TMA copies."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.shared.types import Ref, Scalar, ScratchType, Slice

# A copy of what is contiguous and within bounds takes no tensor map: any length of 16 bytes and more will do,
# without alignment to 128.
BULK_COPY = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


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


def store_unoptimized(ref: Ref, value: jax.Array) -> None:
    """Stores registers where it may cost: rows shorter than a cache line, or conflicts of banks.

    jax 0.12 refuses such a store unless told that it is meant; jax 0.11 takes it and has no way to be told.

    Args:
        ref: Global or shared memory, `array.at[...]`.
        value: What it becomes.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


ALIGNED_BYTES = 256  # where Mosaic GPU wants the arrays of a kernel to begin


def copy_if_unaligned(x: jax.Array) -> jax.Array:
    """Rows that may be some of another array's, traced; behind a barrier where they may begin in between."""
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    return x if row % ALIGNED_BYTES == 0 else lax.optimization_barrier(x)


def swizzled_smem(shape: tuple[int, ...], dtype: DTypeLike, *, width: int = 64) -> ScratchType:
    """Shared memory that TMA fills and the tensor core reads; for `width`, see swizzle_of."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(jnp.dtype(dtype).itemsize, width))


def swizzle_transforms(
    itemsize: int, width: int = 64
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How swizzled_smem lies in memory."""
    swizzle = swizzle_of(itemsize, width)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def swizzle_of(itemsize: int, width: int = 64) -> int:
    """Bytes of a row of the swizzle; `width` columns stay together, up to 128 bytes of them."""
    return math.gcd(itemsize * width, 128)
