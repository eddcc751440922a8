"""Rows of an array, where kernels can take them."""

import math
from typing import Any

import jax
from jax import lax

ALIGNED_BYTES = 256  # where Mosaic GPU wants the arrays of a kernel to begin


def rows_from(array: Any, first: int, end: int | None = None) -> Any:
    """`array[first:end]`, a copy where it does not begin at a multiple of ALIGNED_BYTES.

    XLA for GPUs hands a kernel the middle of an array in the place of a slice that begins at a multiple of
    128 bytes, and the kernel refuses to run: "Input buffer 3 is not 256-byte aligned". Not across a barrier.

    Args:
        array: Traced, numpy's, or JAX's; traced, it begins at such a multiple itself.
        first: Static.
        end: Static.
    """
    rows = array[first:end]
    offset = first * math.prod(array.shape[1:]) * array.dtype.itemsize
    if offset % ALIGNED_BYTES == 0 or not isinstance(array, jax.core.Tracer):
        return rows
    return lax.optimization_barrier(rows)
