"""8-bit tiles in registers, and the shared memory that tiles stand in."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.shared.types import Ref, Tile

QUANTIZED_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def load_dequantized(ref: Ref, dtype: DTypeLike) -> Tile:
    """An 8-bit tile in registers, in a 16-bit dtype, exactly, as the tensor core wants it."""
    return plgpu.layout_cast(dequantize(plgpu.load(ref, layout=QUANTIZED_LAYOUT), dtype), plgpu.Layout.WGMMA)


def dequantize(x: Tile, dtype: DTypeLike, scaled: Callable[[Tile], Tile] | None = None) -> Tile:
    """An 8-bit tile in a 16-bit dtype, in the same layout.

    Args:
        x: Any.
        dtype: Static.
        scaled: What f32 becomes before it is rounded; None: the numbers are as they are stored, exactly.
    """
    # The ways that have instructions: int8 to bf16, fp8 to f16; the others go on through f32.
    has_direct = dtype == (jnp.bfloat16 if x.dtype == jnp.int8 else jnp.float16)
    if scaled is not None or not has_direct:
        x = x.astype(jnp.bfloat16) if x.dtype == jnp.int8 else x
        x = x.astype(jnp.float32)
    return (x if scaled is None else scaled(x)).astype(dtype)
