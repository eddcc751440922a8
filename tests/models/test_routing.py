"""Routers select and weight experts as transformers defines."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models.routing import Routing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scores": "tanh"},
            "scores must be one of 'softmax', 'softmax_of_top_k', 'sigmoid', 'sparsemixer', got 'tanh'",
        ),
        ({"scale_target": "both"}, "scale_target must be one of 'output', 'input', got 'both'"),
    ],
)
def test_an_unknown_routing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Routing(**change)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_correction_bias_affects_the_selection_only(scores):
    routing = Routing(scores=scores, renormalize=True, has_correction_bias=True, factor=1.5)
    logits = np.float32([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 2.9]])
    correction = np.float32([0.9, 0.0, 0.0, 0.0])
    plain = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    all_scores = plain if scores == "softmax" else 1 / (1 + np.exp(-logits))
    choices = routing.route(jnp.asarray(logits), 2, jnp.asarray(correction))
    np.testing.assert_array_equal(choices.experts, [[0, 1], [0, 3]])  # by logits the first would have 1 and 2
    chosen = np.take_along_axis(all_scores, np.asarray(choices.experts), axis=1)
    np.testing.assert_allclose(choices.scores, 1.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


def test_sparsemixer_scores():
    routing = Routing(scores="sparsemixer", margin=0.4)
    logits = np.float32([[2.0, 1.5, 1.3, -3.0]])
    choices = routing.route(jnp.asarray(logits), 2)
    np.testing.assert_array_equal(choices.experts, [[0, 1]])
    probability = lambda *scores: (
        np.exp(scores[0]) / np.exp(scores).sum()
    )  # scores 1.5 and 1.3 together with 2.0
    np.testing.assert_allclose(
        choices.scores, [[probability(2.0, 1.5, 1.3), probability(1.5, 1.3)]], rtol=1e-6
    )
    alone = Routing(scores="sparsemixer", margin=0.1).route(jnp.asarray(logits), 2)
    np.testing.assert_allclose(alone.scores, [[1.0, 1.0]], rtol=1e-6)


def test_top_k_softmax_supports_no_correction_bias():
    with pytest.raises(ValueError, match=r"scores with a correction bias must be .* got 'softmax_of_top_k'"):
        Routing(scores="softmax_of_top_k", has_correction_bias=True)
