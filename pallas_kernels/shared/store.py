"""Stores from registers to global memory."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store_short(ref: Any, value: Any) -> None:
    """Stores a few numbers in a row, which need not be whole cache lines.

    jax 0.12 refuses such a store unless told that it is meant; jax 0.11 takes it and has no way to be told.

    Args:
        ref: The row of global memory, `array_g.at[...]`.
        value: What it becomes, in registers.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
