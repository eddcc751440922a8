"""Gradients of attention by the softmax's formula, one request and head at a time, in float64 numpy.

Of `sum(weights * out) + sum(lse_weights * lse)` over live tokens; LSEs of -inf do not count.
"""

from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests import oracle
from tests.attention_problems import AttentionProblem

F32_TOLERANCE = 1e-4  # of an array's largest gradient, or of 1 where that is less
NAMES = ("query", "k", "v", "sinks", "alibi_slopes")


class Wanted(NamedTuple):
    """What the loss weighs by."""

    out: np.ndarray  # [tokens, q_heads, head_dim]
    lse: np.ndarray  # [tokens, q_heads]


def draw_weights(problem: AttentionProblem, seed: int = 7) -> Wanted:
    """Weights of a loss; those of outputs are exact in the problem's dtype."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=problem.query.shape).astype(problem.dtype).astype(np.float32)
    return Wanted(out, rng.normal(size=problem.query.shape[:2]).astype(np.float32))


def gradients(problem: AttentionProblem, expected: Wanted, rounded=lambda x: x) -> dict[str, np.ndarray]:
    """By query, k, v, sinks and alibi_slopes; of keys and values by slot [slots, kv_heads, head_dim].

    Args:
        problem: Its keys and values are not quantised.
        wanted: The loss's weights.
        rounded: Applied to probabilities, to gradients of scores, and to what comes out of queries, keys and
            values: as an implementation in 16 bits rounds.
    """
    return _gradients(problem, expected, rounded)[0]


def _gradients(problem: AttentionProblem, expected: Wanted, rounded) -> tuple[dict, dict]:
    """And, for what is a sum over all queries: how far rounded outputs lead it astray, as random steps do."""
    spec, step = problem.spec, problem.step
    query, slots = np.zeros(problem.query.shape), problem.num_blocks * problem.setting.block_size
    k, v = np.zeros((2, slots, spec.num_kv_heads, spec.head_dim))
    sinks, slopes, of_sinks, of_slopes = np.zeros((4, spec.num_q_heads))
    for r, start in enumerate(problem.starts):
        for h in range(spec.num_q_heads):
            g, here = h // spec.q_heads_per_kv_head, slice(start, start + len(step.q[r]))
            w, w_lse = expected.out[here, h].astype(np.float64), expected.lse[here, h].astype(np.float64)
            shares, lse = oracle.weights(spec, step, r, h)
            w_lse = np.where(np.isneginf(lse), 0.0, w_lse)
            of_shares = w @ step.v[r][:, g].T
            out = rounded(rounded(shares) @ step.v[r][:, g])
            mean, spread = (w * out).sum(axis=1, keepdims=True), np.square(w * out).sum(axis=1)
            of_scores = shares * (of_shares - mean + w_lse[:, None])
            if step.sinks is not None and len(step.k[r]):
                share = np.exp(step.sinks[h] - lse)
                sinks[h] += (share * (w_lse - mean[:, 0])).sum()
                of_sinks[h] += (share**2 * spread).sum()
            if step.alibi_slopes is not None:
                i = len(step.k[r]) - len(w) + np.arange(len(w))[:, None]
                of_one = oracle.bias(spec, 1.0, i, np.arange(len(step.k[r]))[None, :])
                slopes[h] += (of_scores * of_one).sum()
                of_slopes[h] += ((shares * of_one).sum(axis=1) ** 2 * spread).sum()
            if spec.soft_cap is not None:
                s = step.q[r][:, h] @ step.k[r][:, g].T * spec.softmax_scale
                of_scores = of_scores * (1 - np.tanh(s / spec.soft_cap) ** 2)
            of_scores = rounded(of_scores * spec.softmax_scale)
            query[here, h] = of_scores @ step.k[r][:, g]
            np.add.at(k, (problem.slots[r], g), of_scores.T @ step.q[r][:, h])
            np.add.at(v, (problem.slots[r], g), rounded(shares).T @ w)
    found = {"query": rounded(query), "k": rounded(k), "v": rounded(v)}
    steps = {"sinks": of_sinks**0.5, "alibi_slopes": of_slopes**0.5}
    return found | {"sinks": sinks, "alibi_slopes": slopes}, steps


def packed(problem: AttentionProblem, of_slots: np.ndarray) -> np.ndarray:
    """From slots to the problem's PackedKV, whose last five keys are nobody's."""
    of_keys = [of_slots[slots] for slots in problem.slots]
    return np.concatenate([*of_keys, np.zeros((5, *of_slots.shape[1:]))])


def bounds(problem: AttentionProblem, expected: Wanted, exact: dict[str, np.ndarray]) -> dict[str, float]:
    """How far each gradient may be from float64: twice the largest error of one in 16 bits.

    There are too few heads for such a largest one to say much of what is one number a head: twice the
    length of its random steps comes on top.
    """
    if problem.dtype.itemsize >= 4:
        return {name: F32_TOLERANCE * max(np.abs(x).max(initial=0.0), 1.0) for name, x in exact.items()}
    in_16_bits = lambda x: np.asarray(x, problem.dtype).astype(np.float64)
    plain, steps = _gradients(problem, expected, in_16_bits)
    eps = float(ml_dtypes.finfo(problem.dtype).eps)
    found = {}
    for name, x in exact.items():
        error = np.abs(plain[name] - x).max(initial=0.0)
        rounding = np.abs(x).max(initial=0.0) + 2 * np.max(steps.get(name, 0.0))
        found[name] = 2 * error + eps * rounding + F32_TOLERANCE
    return found


def check(problem: AttentionProblem, wanted: Wanted, actual: dict[str, jnp.ndarray]) -> None:
    """Gradients over PackedKV must be right, and those of padding and of nobody's keys 0."""
    exact = gradients(problem, wanted)
    allowed = bounds(problem, wanted, exact)
    for name, array in actual.items():
        expected = packed(problem, exact[name]) if name in "kv" else exact[name]
        array = np.asarray(array, np.float64)
        assert np.isfinite(array).all(), f"gradient of {name} is not finite"
        np.testing.assert_allclose(array, expected, rtol=0, atol=allowed[name], err_msg=f"gradient of {name}")
        assert (array[expected == 0][..., None] == 0).all() or name in ("sinks", "alibi_slopes"), name
