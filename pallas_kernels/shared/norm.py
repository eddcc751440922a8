"""How an RMS norm rounds."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.shared.types import Tile


def weighted(normed: Tile, weight: Tile, dtype: DTypeLike, *, is_offset: bool) -> Tile:
    """What was divided by its root mean square, times a weight; rounded before, too, or once.

    Args:
        normed: f32.
        weight: f32.
        dtype: Of the result.
        is_offset: Gemma's: the factor is 1 + weight, and the product is rounded once. Else Llama's.
    """
    if is_offset:
        return (normed * (1.0 + weight)).astype(dtype)
    return (normed.astype(dtype).astype(jnp.float32) * weight).astype(dtype)
