"""Conversion of 8-bit tiles to 16 bits in registers."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.shared.types import Ref, Tile

QUANTIZED_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def load_dequantized(ref: Ref, dtype: DTypeLike) -> Tile:
    """Load an 8-bit tile and convert it exactly to a 16-bit dtype, in the layout of a wgmma operand."""
    return plgpu.layout_cast(dequantize(plgpu.load(ref, layout=QUANTIZED_LAYOUT), dtype), plgpu.Layout.WGMMA)


def dequantize(x: Tile, dtype: DTypeLike, apply_scale: Callable[[Tile], Tile] | None = None) -> Tile:
    """Convert an 8-bit tile to a 16-bit dtype in the same register layout.

    Args:
        x: 8-bit tile.
        dtype: Static: bfloat16 or float16.
        apply_scale: Function of the f32 tile, applied before it is rounded; None keeps the stored numbers,
            which 16 bits represent exactly.
    """
    # The hardware converts int8 to bf16 and fp8 to f16 directly; other pairs go through f32.
    has_direct_conversion = dtype == (jnp.bfloat16 if x.dtype == jnp.int8 else jnp.float16)
    if apply_scale is not None or not has_direct_conversion:
        x = x.astype(jnp.bfloat16) if x.dtype == jnp.int8 else x
        x = x.astype(jnp.float32)
    return (x if apply_scale is None else apply_scale(x)).astype(dtype)
