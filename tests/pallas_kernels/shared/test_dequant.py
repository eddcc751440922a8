"""Conversion of 8-bit numbers with integer instructions, for each of the 256 numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.shared.dequant import dequantize_to_f32


@pytest.mark.parametrize("has_fp8_conversion", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_dequantize_to_f32_is_exact(dtype, has_fp8_conversion):
    x = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    expected = np.asarray(x).astype(np.float32)
    actual = np.asarray(dequantize_to_f32(x, has_fp8_conversion=has_fp8_conversion))
    np.testing.assert_array_equal(actual, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual)[is_number], np.signbit(expected)[is_number])
