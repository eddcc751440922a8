"""Memory of a kernel: the alignment of its arrays, slices for TMA, swizzled shared memory and stores."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.shared.types import Ref, Scalar, ScratchType, Slice

# A copy of a contiguous range within bounds needs no tensor map: any length from 16 bytes works, without the
# alignment to 128 bytes that a tensor map requires.
BULK_COPY = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
ALIGN = 8  # TMA fills shared memory in units of 8 rows, so tiles start at rows that are multiples of 8
ALIGNED_BYTES = 256  # alignment that Mosaic GPU requires of a kernel's arrays


def copy_if_unaligned(x: jax.Array) -> jax.Array:
    """Return `x`, copied if it may be a slice that starts at an address a kernel does not accept.

    XLA for GPUs passes a slice of rows to a kernel without a copy if it starts at a multiple of 128 bytes,
    but a kernel refuses a start between two multiples of ALIGNED_BYTES ("Input buffer 3 is not 256-byte
    aligned"). Across an optimization barrier XLA makes the copy.
    """
    row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    return x if row_bytes % ALIGNED_BYTES == 0 else lax.optimization_barrier(x)


def padded_slice(size: int, length: int, zero: Scalar) -> Slice:
    """Return a slice of the first `size` elements of an axis of `length`; TMA reads zeros past the end.

    A write through the slice drops what is past the end. JAX rejects a slice that is known to exceed the
    axis, so such a slice starts at a traced zero; the division tells the compiler that shared memory tiles
    divide it.

    Args:
        size: Static number of elements of the slice; may exceed `length`.
        length: Static length of the axis.
        zero: Traced int32 that is 0.
    """
    if size <= length:
        return pl.ds(0, size)
    return pl.ds(lax.div(zero, 64) * 64, size)


def swizzled_smem(shape: tuple[int, ...], dtype: DTypeLike, *, width: int = 64) -> ScratchType:
    """Return the type of shared memory that TMA fills and the tensor core reads; see `swizzle_bytes`."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(jnp.dtype(dtype).itemsize, width))


def swizzle_transforms(
    itemsize: int, width: int = 64
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the tiling and the swizzle of `swizzled_smem`."""
    swizzle = swizzle_bytes(itemsize, width)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def swizzle_bytes(itemsize: int, width: int = 64) -> int:
    """Return the bytes per row of the swizzle: the greatest common divisor of a row and 128."""
    return math.gcd(itemsize * width, 128)


def store_unoptimized(ref: Ref, value: jax.Array) -> None:
    """Store registers although the store is slow: rows shorter than a cache line, or bank conflicts.

    jax 0.12 requires `optimized=False` for such a store; jax 0.11 accepts the store and has no such argument.

    Args:
        ref: Slice of global or shared memory to overwrite.
        value: Registers of the same shape.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
