"""8-bit keys and values: how a number becomes stored bits and a scale, and back."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

# Below this a token's scale says nothing any more; vLLM's floor.
MIN_SCALE = 1e-6


def largest(dtype: DTypeLike) -> float:
    """The largest magnitude a scale maps to: 127 for int8 (symmetric), the largest finite number for fp8."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def quantize_static(
    values: Float[Array, "tokens heads head_dim"], scale: Float[Array, "..."] | None, dtype: DTypeLike
) -> Shaped[Array, "tokens heads head_dim"]:
    """`values / scale` as `dtype`: 8-bit types saturate, integers round half to even, int8 keeps [-128, 127].

    Args:
        values: What to store.
        scale: One number, one per head, or per channel [heads, head_dim]: value = stored * scale. None = 1.
        dtype: What to store them as.
    """
    if scale is not None:
        scale = jnp.asarray(scale, jnp.float32)
        values = values.astype(jnp.float32) / scale.reshape(1, *scale.shape, *(1,) * (2 - scale.ndim))
    return values.astype(dtype) if jnp.dtype(dtype).itemsize > 1 else saturate(values, dtype)


def quantize_token_head(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> tuple[Shaped[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Stores each token's head with its own scale, `max(amax / largest, 1e-6)`.

    Source: vLLM's int8_per_token_head and fp8_per_token_head caches; rounds half to even.
    """
    is_16_bit = values.dtype.itemsize == 2
    values = values.astype(jnp.float32)
    amax = jnp.max(jnp.abs(values), axis=-1)
    scale = jnp.maximum(amax / largest(dtype), MIN_SCALE)
    quotient = values / scale[..., None]
    if is_16_bit:
        # XLA divides by multiplying with reciprocals, 2^-22 off, so that a tie (half of amax is 63.5) fell to
        # either side. In 20 bits it is a tie again; no other quotient of 16-bit numbers is as near to one.
        quotient = jax.lax.reduce_precision(quotient, exponent_bits=8, mantissa_bits=19)
    return saturate(quotient, dtype), scale


def rounded_token_head(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> Float[Array, "tokens heads head_dim"]:
    """What `quantize_token_head` stores, read back: f32."""
    stored, scale = quantize_token_head(values, dtype)
    return stored.astype(jnp.float32) * scale[..., None]


def saturate(values: Float[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Casts to `dtype`, clamping what it cannot hold."""
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.clip(jnp.round(values), -128, 127).astype(jnp.int8)
    info, clamped = jnp.finfo(dtype), jnp.clip(values, -largest(dtype), largest(dtype))
    # XLA for GPUs leaves out a cast to fp8 that is cast back in the same program. What is rounded already is
    # right without it.
    rounded = jax.lax.reduce_precision(clamped, exponent_bits=8, mantissa_bits=info.nmant)
    unit = jnp.asarray(info.smallest_subnormal, values.dtype)
    is_small = jnp.abs(clamped) < jnp.asarray(info.smallest_normal, values.dtype)
    return jnp.where(is_small, jnp.round(clamped / unit) * unit, rounded).astype(dtype)
