"""Conversion of 8-bit tiles to 16 bits in registers."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.shared.layouts import WGMMA
from pallas_kernels.shared.types import Ref, Tile, f32

QUANTIZED_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def load_dequantized(ref: Ref, dtype: DTypeLike) -> Tile:
    """Load an 8-bit tile and convert it exactly to a 16-bit dtype, in the layout of a wgmma operand."""
    return plgpu.layout_cast(dequantize(plgpu.load(ref, layout=QUANTIZED_LAYOUT), dtype), WGMMA)


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


def dequantize_to_f32(x: Tile, *, has_fp8_conversion: bool) -> Tile:
    """Convert an 8-bit tile to f32 exactly, with instructions that every GPU since Ampere has.

    Args:
        x: 8-bit tile.
        has_fp8_conversion: Static: whether the GPU has an instruction that converts float8.
    """
    if x.dtype == jnp.int8:
        return x.astype(jnp.int32).astype(f32)
    if has_fp8_conversion:
        return x.astype(f32)
    # Move the bits without the sign into exponent and mantissa of an f32. A subnormal number then is 2 ** (e
    # - 1) * (1 + m) instead of 2 ** e * m, where 2 ** e is the smallest normal number and m the mantissa.
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    magnitude = bits & 0x7F
    exponent_offset = 127 - 1 + info.minexp
    moved = (magnitude + (exponent_offset << info.nmant)) << (23 - info.nmant)
    number = lax.bitcast_convert_type(moved, f32)
    is_subnormal = magnitude < (1 << info.nmant)
    number = jnp.where(is_subnormal, 2 * (number - 2.0 ** (info.minexp - 1)), number)
    # The largest exponent of float8_e5m2, and the largest number of float8_e4m3fn, are infinite or NaN.
    if x.dtype == jnp.float8_e5m2:
        number = jnp.where(magnitude == 0x7C, jnp.inf, number)
        number = jnp.where(magnitude > 0x7C, jnp.nan, number)
    else:
        number = jnp.where(magnitude == 0x7F, jnp.nan, number)
    return jnp.where(bits < 0, -number, number)
