"""8-bit quantization rounds the exact quotients, however the compiler divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.cache.quantization import MIN_SCALE, largest, quantize_token_head, saturate


@pytest.mark.parametrize("stored", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_quantization_rounds_the_exact_quotient_with_ties_to_even(stored, dtype):
    values = np.random.default_rng(0).normal(size=(20_000, 1, 8)).astype(dtype)
    values[:, 0, 1] = values[:, 0, 0] / values.dtype.type(2)  # half of the largest, often: 63.5, a tie
    actual, scale = jax.jit(quantize_token_head, static_argnums=1)(jnp.asarray(values), stored)
    exact = values.astype(np.float64)
    amax = np.abs(exact).max(-1, keepdims=True)
    quotient = exact * largest(stored) / amax
    expected = np.round(quotient) if stored == jnp.int8 else quotient.astype(np.float32).astype(stored)
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_allclose(scale, amax[..., 0] / largest(stored), rtol=2e-7)


@pytest.mark.parametrize("context_name", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_cast_back_in_the_same_program_are_rounded(dtype, stored, context_name):
    """XLA must not elide the pair of casts; the values include subnormal fp8 numbers."""
    assert jax.default_backend() == context_name
    every = np.arange(256, dtype=np.uint8).view(stored).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    draw = np.random.default_rng(0)
    values = draw.normal(size=4000) * 2.0 ** draw.integers(-18, 9, 4000)
    values = np.clip(values, every[0], every[-1]).astype(dtype)
    actual = jax.jit(lambda x: saturate(x, stored).astype(jnp.float32) * 2)(jnp.asarray(values))
    nearest = np.abs(values.astype(np.float64)[:, None] - every[None]).min(axis=1)
    np.testing.assert_array_equal(
        np.abs(np.asarray(actual, np.float64) / 2 - values.astype(np.float64)), nearest
    )


@pytest.mark.parametrize("amax", [0.0, 1e-5, 1e30, 3e38])
def test_smallest_scale_and_largest_values_are_finite(amax):
    values = jnp.asarray([[[amax, -amax / 2, 0.0]]], jnp.float32)
    actual, scale = quantize_token_head(values, jnp.int8)
    np.testing.assert_allclose(scale, [[max(amax / 127, MIN_SCALE)]], rtol=1e-6)
    np.testing.assert_allclose(
        np.asarray(actual[0, 0], float) * scale[0, 0], values[0, 0], atol=0.51 * scale[0, 0]
    )
