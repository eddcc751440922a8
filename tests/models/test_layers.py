"""Norms and other layer parts match their definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.models.layers import make_norm, make_qk_norm, take_rows
from jattn.models.specs import NormSpec, QKNorm

X = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)


def normalised(x, axes, centred):
    x = x - x.mean(axes, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("kind", "over", "axes"), [("rms_f32", "all_heads", (1, 2)), ("layer_no_bias", "own_head", 2)]
)
def test_qk_norms_with_weights_per_head_or_over_all_heads(kind, over, axes):
    norm = make_qk_norm(QKNorm(norm=NormSpec(kind, 1e-5), over=over), 4, 6, dtype=jnp.float32)
    (param,) = nnx.to_flat_state(nnx.state(norm))
    param[1].set_value(jnp.asarray(WEIGHT.reshape(param[1].get_value().shape)))
    nnx.update(norm, nnx.from_flat_state([param]))
    expected = normalised(X, axes, centred=kind.startswith("layer")) * WEIGHT
    np.testing.assert_allclose(norm(jnp.asarray(X)), expected, atol=1e-5)


def test_invalid_qk_norms_are_refused():
    with pytest.raises(ValueError, match=r"the norm for over='own_head' must be one of 'layer'.*got 'rms'"):
        QKNorm(norm=NormSpec("rms", 1e-5), over="own_head")
    with pytest.raises(ValueError, match=r"the norm for over='all_heads' must be one of 'rms'.*got 'layer'"):
        QKNorm(norm=NormSpec("layer", 1e-5), over="all_heads")
    with pytest.raises(ValueError, match=r"over must be one of 'head'.*got 'heads'"):
        QKNorm(norm=NormSpec("rms", 1e-5), over="heads")


def test_a_norm_after_the_rope_normalizes_each_head():
    norm_after_rope = QKNorm(norm=NormSpec("rms", 1e-5), comes_after_rope=True)
    assert make_qk_norm(norm_after_rope, 4, 6, dtype=jnp.float32).follows_rope
    with pytest.raises(ValueError, match=r"over of a norm after the rope must be .* got 'all_heads'"):
        QKNorm(norm=NormSpec("rms", 1e-5), comes_after_rope=True, over="all_heads")
    with pytest.raises(ValueError, match=r"has_weight=False is supported only for a norm after the rope"):
        QKNorm(norm=NormSpec("rms", 1e-5), has_weight=False)


def test_layer_norms_with_an_offset_and_without_weights():
    x = jnp.asarray(X[0])
    offset = make_norm(NormSpec("layer_offset", 1e-5), 6, dtype=jnp.float32)
    offset.weight.set_value(jnp.full(6, 0.5))
    np.testing.assert_allclose(offset(x), 1.5 * normalised(X[0], -1, True), atol=1e-5)
    bare = make_norm(NormSpec("layer_no_weight", 1e-5), 6, dtype=jnp.float32)
    assert (bare.weight, bare.bias) == (None, None)
    np.testing.assert_allclose(bare(x), normalised(X[0], -1, True), atol=1e-5)


def test_gradients_of_shared_embedding_rows_match_float64():
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


def test_take_rows_matches_jnp_take():
    table = jax.random.normal(jax.random.key(1), (6, 8), jnp.bfloat16)
    ids = jnp.array([3, 0, 5, 9, -1])
    np.testing.assert_array_equal(take_rows(table, ids), table[jnp.array([3, 0, 5, 5, 0])])
