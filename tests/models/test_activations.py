"""Activations compute what their names say."""

import jax.numpy as jnp
import numpy as np

from jattn.models.activations import ACTIVATIONS

PLAIN = {"gelu_fast": "gelu_new", "gelu_python": "gelu", "swish": "silu"}


def test_activations_compute_what_their_names_say():
    x = jnp.linspace(-4.0, 8.0, 25)
    for name, same in PLAIN.items():
        np.testing.assert_array_equal(ACTIVATIONS[name](x), ACTIVATIONS[same](x))
    np.testing.assert_allclose(ACTIVATIONS["quick_gelu"](x), x / (1 + np.exp(-1.702 * x)), atol=1e-5)
    np.testing.assert_allclose(ACTIVATIONS["relu2"](x), np.maximum(x, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(ACTIVATIONS["relu6"](x), np.clip(x, 0, 6), rtol=1e-6)
