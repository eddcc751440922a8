"""Stores from registers."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref


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
