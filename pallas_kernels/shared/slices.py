"""Slices of arrays, of which XLA for GPUs hands a kernel the middle of the array, without a copy.

It does where a slice begins at a multiple of 128 bytes, and what begins between two of ALIGNED_BYTES a kernel
refuses to run with: "Input buffer 3 is not 256-byte aligned". Not across a barrier: there it makes a copy.
"""

import math

import jax
from jax import lax

ALIGNED_BYTES = 256  # where Mosaic GPU wants the arrays of a kernel to begin


def unsliced(x: jax.Array) -> jax.Array:
    """Rows that may be some of another array's, traced; behind a barrier where they may begin in between."""
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    return x if row % ALIGNED_BYTES == 0 else lax.optimization_barrier(x)
