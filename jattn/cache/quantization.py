"""Quantization of keys and values to 8 bits."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

# Minimum scale of a token: vLLM's floor.
MIN_SCALE = 1e-6


def largest(dtype: DTypeLike) -> float:
    """Return the largest magnitude that a dtype represents: 127 for int8 (symmetric)."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def quantize_static(
    values: Float[Array, "tokens heads head_dim"], scale: Float[Array, "..."] | None, dtype: DTypeLike
) -> Shaped[Array, "tokens heads head_dim"]:
    """Quantize `values / scale` to `dtype`, saturating; int8 rounds half to even.

    Args:
        values: Values to quantize.
        scale: Scale, such that value = stored * scale: a scalar, [heads], or [heads, head_dim]; None is 1.
        dtype: Dtype to store.
    """
    if scale is not None:
        scale = jnp.asarray(scale, jnp.float32)
        values = values.astype(jnp.float32) / scale.reshape(1, *scale.shape, *(1,) * (2 - scale.ndim))
    return values.astype(dtype) if jnp.dtype(dtype).itemsize > 1 else saturate(values, dtype)


def quantize_token_head(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> tuple[Shaped[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Quantize with one scale per token and head, `max(amax / largest, 1e-6)`.

    Source: vLLM's int8_per_token_head and fp8_per_token_head caches; rounds half to even.
    """
    is_16_bit = values.dtype.itemsize == 2
    values = values.astype(jnp.float32)
    amax = jnp.max(jnp.abs(values), axis=-1)
    scale = jnp.maximum(amax / largest(dtype), MIN_SCALE)
    quotient = values / scale[..., None]
    if is_16_bit:
        # XLA divides by multiplying with a reciprocal, with an error of 2^-22, which would round ties (half
        # of amax is 63.5) to either side. Rounded to 20 bits they are ties again; no other quotient of 16-bit
        # numbers is that close to a tie.
        quotient = jax.lax.reduce_precision(quotient, exponent_bits=8, mantissa_bits=19)
    return saturate(quotient, dtype), scale


def round_token_head(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> Float[Array, "tokens heads head_dim"]:
    """Quantize with `quantize_token_head` and dequantize again, to f32."""
    stored, scale = quantize_token_head(values, dtype)
    return stored.astype(jnp.float32) * scale[..., None]


def saturate(values: Float[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Cast to an 8-bit dtype, clamping values that are out of range."""
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.clip(jnp.round(values), -128, 127).astype(jnp.int8)
    info, clamped = jnp.finfo(dtype), jnp.clip(values, -largest(dtype), largest(dtype))
    # XLA for GPUs drops a cast to fp8 that is cast back in the same program, so values are rounded
    # explicitly.
    rounded = jax.lax.reduce_precision(clamped, exponent_bits=8, mantissa_bits=info.nmant)
    unit = jnp.asarray(info.smallest_subnormal, values.dtype)
    is_small = jnp.abs(clamped) < jnp.asarray(info.smallest_normal, values.dtype)
    return jnp.where(is_small, jnp.round(clamped / unit) * unit, rounded).astype(dtype)
