"""Gradients of attention by the formula of the softmax, one request and head at a time, in float64 numpy.

The loss is `sum(weights.out * out) + sum(weights.lse * lse)` over live tokens; LSEs of -inf do not count.
"""

from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests import oracle
from tests.attention_problems import AttentionProblem

F32_TOLERANCE = 1e-4  # of an array's largest gradient, or of 1 where that is less
NAMES = ("query", "k", "v", "sinks", "alibi_slopes")


class LossWeights(NamedTuple):
    """Weights of outputs and log-sum-exps in the loss."""

    out: np.ndarray  # [tokens, q_heads, head_dim]
    lse: np.ndarray  # [tokens, q_heads]


def draw_weights(problem: AttentionProblem, seed: int = 7) -> LossWeights:
    """Return random loss weights; those of outputs are exact in the problem's dtype."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=problem.query.shape).astype(problem.dtype).astype(np.float32)
    return LossWeights(out, rng.normal(size=problem.query.shape[:2]).astype(np.float32))


def gradients(
    problem: AttentionProblem, loss_weights: LossWeights, rounded=lambda x: x
) -> dict[str, np.ndarray]:
    """Return the gradients of query, k, v, sinks and alibi_slopes; of k and v by slot.

    Args:
        problem: Problem with unquantized keys and values.
        loss_weights: Weights of the loss.
        rounded: Applied to probabilities, to gradients of scores, and to the gradients of queries, keys and
            values, to simulate an implementation in 16 bits.
    """
    return _gradients(problem, loss_weights, rounded)[0]


def _gradients(problem: AttentionProblem, loss_weights: LossWeights, rounded) -> tuple[dict, dict]:
    """Return the gradients, and the rounding errors of sums over all queries, modelled as a random walk."""
    spec, step = problem.spec, problem.step
    query, slots = np.zeros(problem.query.shape), problem.num_blocks * problem.setting.block_size
    k, v = np.zeros((2, slots, spec.num_kv_heads, spec.head_dim))
    sinks, slopes, sink_variance, slope_variance = np.zeros((4, spec.num_q_heads))
    for r, start in enumerate(problem.starts):
        for h in range(spec.num_q_heads):
            g, token_slice = h // spec.q_heads_per_kv_head, slice(start, start + len(step.q[r]))
            w, w_lse = (
                loss_weights.out[token_slice, h].astype(np.float64),
                loss_weights.lse[token_slice, h].astype(np.float64),
            )
            probs, lse = oracle.weights(spec, step, r, h)
            w_lse = np.where(np.isneginf(lse), 0.0, w_lse)
            grad_probs = w @ step.v[r][:, g].T
            out = rounded(rounded(probs) @ step.v[r][:, g])
            mean, spread = (w * out).sum(axis=1, keepdims=True), np.square(w * out).sum(axis=1)
            grad_scores = probs * (grad_probs - mean + w_lse[:, None])
            if step.sinks is not None and len(step.k[r]):
                sink_prob = np.exp(step.sinks[h] - lse)
                sinks[h] += (sink_prob * (w_lse - mean[:, 0])).sum()
                sink_variance[h] += (sink_prob**2 * spread).sum()
            if step.score_mod is not None:
                derivative = step.score_mod.derivative(*oracle.biased_scores(spec, step, r, h))
                grad_scores = np.where(probs > 0, grad_scores * derivative, 0.0)
            if step.alibi_slopes is not None:
                i = len(step.k[r]) - len(w) + np.arange(len(w))[:, None]
                bias_of_unit_slope = oracle.bias(spec, 1.0, i, np.arange(len(step.k[r]))[None, :])
                slopes[h] += (grad_scores * bias_of_unit_slope).sum()
                slope_variance[h] += ((probs * bias_of_unit_slope).sum(axis=1) ** 2 * spread).sum()
            if spec.soft_cap is not None:
                s = step.q[r][:, h] @ step.k[r][:, g].T * spec.softmax_scale
                grad_scores = grad_scores * (1 - np.tanh(s / spec.soft_cap) ** 2)
            grad_scores = rounded(grad_scores * spec.softmax_scale)
            query[token_slice, h] = grad_scores @ step.k[r][:, g]
            np.add.at(k, (problem.slots[r], g), grad_scores.T @ step.q[r][:, h])
            np.add.at(v, (problem.slots[r], g), rounded(probs).T @ w)
    gradients_by_name = {"query": rounded(query), "k": rounded(k), "v": rounded(v)}
    walk_lengths = {"sinks": sink_variance**0.5, "alibi_slopes": slope_variance**0.5}
    return gradients_by_name | {"sinks": sinks, "alibi_slopes": slopes}, walk_lengths


def packed(problem: AttentionProblem, per_slot: np.ndarray) -> np.ndarray:
    """Return per-slot gradients in the order of the PackedKV; its last five keys are in no request."""
    per_request = [per_slot[slots] for slots in problem.slots]
    return np.concatenate([*per_request, np.zeros((5, *per_slot.shape[1:]))])


def bounds(
    problem: AttentionProblem, loss_weights: LossWeights, exact: dict[str, np.ndarray]
) -> dict[str, float]:
    """Return the allowed error of each gradient: twice the largest error of an implementation in 16 bits.

    There are too few heads for a reliable largest error of per-head gradients, so twice the length of their
    random walk is added.
    """
    if problem.dtype.itemsize >= 4:
        return {name: F32_TOLERANCE * max(np.abs(x).max(initial=0.0), 1.0) for name, x in exact.items()}
    in_16_bits = lambda x: np.asarray(x, problem.dtype).astype(np.float64)
    rounded_gradients, walk_lengths = _gradients(problem, loss_weights, in_16_bits)
    eps = float(ml_dtypes.finfo(problem.dtype).eps)
    allowed = {}
    for name, x in exact.items():
        error = np.abs(rounded_gradients[name] - x).max(initial=0.0)
        rounding = np.abs(x).max(initial=0.0) + 2 * np.max(walk_lengths.get(name, 0.0))
        allowed[name] = 2 * error + eps * rounding + F32_TOLERANCE
    return allowed


def check(problem: AttentionProblem, loss_weights: LossWeights, actual: dict[str, jnp.ndarray]) -> None:
    """Assert that gradients over PackedKV are right, and zero for padding and keys without a request."""
    float64_gradients = gradients(problem, loss_weights)
    allowed = bounds(problem, loss_weights, float64_gradients)
    for name, array in actual.items():
        expected = packed(problem, float64_gradients[name]) if name in "kv" else float64_gradients[name]
        array = np.asarray(array, np.float64)
        assert np.isfinite(array).all(), f"gradient of {name} is not finite"
        np.testing.assert_allclose(array, expected, rtol=0, atol=allowed[name], err_msg=f"gradient of {name}")
        assert (array[expected == 0][..., None] == 0).all() or name in ("sinks", "alibi_slopes"), name
