"""The gradient of an embedding against a sum in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jattn.models.embedding import take_rows


def test_a_row_that_many_tokens_share_has_the_gradient_of_float64():
    ids = np.array([3] * 2000 + [0, 5, 9, -1])  # 9 and -1 are beyond the table: its last row, its first
    weights = jax.random.uniform(jax.random.key(0), (len(ids), 8), minval=0.5, maxval=1.0).astype(
        jnp.bfloat16
    )
    _, pull = jax.vjp(lambda table: take_rows(table, jnp.asarray(ids)), jnp.ones((6, 8), jnp.bfloat16))
    (gradient,) = pull(weights)
    expected = np.zeros((6, 8))
    np.add.at(expected, np.clip(ids, 0, 5), np.asarray(weights, np.float64))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=2**-8)  # rounded once


def test_rows_are_those_of_take():
    table = jax.random.normal(jax.random.key(1), (6, 8), jnp.bfloat16)
    ids = jnp.array([3, 0, 5, 9, -1])
    np.testing.assert_array_equal(take_rows(table, ids), table[jnp.array([3, 0, 5, 5, 0])])
