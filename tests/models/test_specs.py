"""Specifications of layer parts."""

import jax.numpy as jnp
import numpy as np

from jattn.models.specs import AttentionTemperature


def test_an_attention_temperature_may_start_at_position_0():
    positions = jnp.arange(9, dtype=jnp.int32)
    tuned = AttentionTemperature(floor_scale=4.0, attn_scale=0.5, first=0)
    expected = 1 + 0.5 * np.log1p(np.arange(9) // 4)
    np.testing.assert_allclose(tuned(positions), expected, rtol=1e-6)
