"""Rows of an array, where kernels can take them."""

import math
from typing import Any

import jax
from jax import lax

from pallas_kernels.shared import ALIGNED_BYTES


def rows_from(array: Any, first: int, end: int | None = None) -> Any:
    """`array[first:end]`, a copy where it does not begin at a multiple of ALIGNED_BYTES.

    Kernels cannot read others in place: see pallas_kernels.shared.slices.

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
