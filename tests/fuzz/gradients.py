"""Gradients of the reference against their formulas in float64, with NaN in padding queries.

In some cases keys that nobody sees are NaN, too; in the others they are 0.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from tests import oracle
from tests.fuzz import attention
from tests.fuzz import draw as drawing
from tests.problems import AttentionProblem, in_layout

TOLERANCE = 2e-4  # of the largest of an array


def draw(seed: int) -> dict:
    """A small case in float32 without 8 bits."""
    rng, nth = random.Random(f"gradients-{seed}"), 0
    while True:
        case = drawing.draw("reference", rng.randint(0, 10**9))
        is_small = sum(case["query_lens"]) <= 80 and sum(case["seq_lens"]) <= 200
        if is_small or nth > 500:
            break
        nth += 1
    case |= {
        "nan_keys": rng.random() < 0.2,
        "dtype": "float32",
        "cache_dtype": None,
        "stored": "plain",
        "query_quantization": None,
    }
    return case | {
        "head_dim": rng.choice([8, 16, 32]),
        "planned": None,
        "return_lse": True,
        "is_jitted": True,
    }


def check(case: dict) -> None:
    """Of a weighted sum of all outputs and LSEs, with respect to all that is differentiable."""
    problem, mask = attention.problem_of(case)
    rng = np.random.default_rng(case["seed"])
    is_live = np.zeros(len(problem.query), bool)
    for start, new in zip(problem.starts, problem.query_lens, strict=True):
        is_live[start : start + new] = True
    weights = rng.normal(size=problem.query.shape).astype(np.float32)
    lse_weights = rng.normal(size=problem.query.shape[:2]).astype(np.float32)
    per_head = {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
    clean = (lambda x: x) if case["nan_keys"] else jnp.nan_to_num
    given = {"query": problem.query, "k": clean(problem.kv.k), "v": clean(problem.kv.v)}
    given |= {name: x for name, x in per_head.items() if x is not None}

    def loss(given):
        kv = jattn.pytree.replace(problem.kv, k=given["k"], v=given["v"])
        numbers = {name: given.get(name) for name in per_head}
        out, lse = attention.attend(case, problem, given["query"], kv, problem.metadata, mask, **numbers)
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse).T
        return (out * weights).sum() + (finite * lse_weights).sum()

    got = jax.jit(jax.grad(loss))({name: jnp.asarray(x) for name, x in given.items()})
    want = gradients(problem, weights, lse_weights)
    for name, array in got.items():
        bound = TOLERANCE * max(np.abs(want[name]).max(initial=0.0), 1.0)
        np.testing.assert_allclose(array, want[name], rtol=0, atol=bound, err_msg=f"gradient of {name}")


def gradients(
    problem: AttentionProblem, weights: np.ndarray, lse_weights: np.ndarray
) -> dict[str, np.ndarray]:
    """By the softmax's formula."""
    spec, step, setting = problem.spec, problem.step, problem.setting
    query = np.zeros(problem.query.shape)
    slots = problem.num_blocks * setting.block_size
    k, v = np.zeros((2, slots, spec.num_kv_heads, spec.head_dim))
    sinks, slopes = np.zeros((2, spec.num_q_heads))
    for r, start in enumerate(problem.starts):
        for h in range(spec.num_q_heads):
            g, here = h // spec.q_heads_per_kv_head, slice(start, start + len(step.q[r]))
            shares, lse = oracle.weights(spec, step, r, h)
            w, w_lse = (
                weights[here, h].astype(np.float64),
                np.where(np.isneginf(lse), 0.0, lse_weights[here, h]),
            )
            of_shares = w @ step.v[r][:, g].T
            mean = (shares * of_shares).sum(axis=1, keepdims=True)
            of_scores = shares * (of_shares - mean + w_lse[:, None])
            if step.sinks is not None and len(step.k[r]):
                share = np.exp(step.sinks[h] - lse)
                sinks[h] += (share * (w_lse - mean[:, 0])).sum()
            if step.alibi_slopes is not None:
                i = len(step.k[r]) - len(w) + np.arange(len(w))[:, None]
                slopes[h] += (of_scores * oracle.bias(spec, 1.0, i, np.arange(len(step.k[r]))[None, :])).sum()
            if spec.soft_cap is not None:
                s = step.q[r][:, h] @ step.k[r][:, g].T * spec.softmax_scale
                of_scores = of_scores * (1 - np.tanh(s / spec.soft_cap) ** 2)
            of_scores = of_scores * spec.softmax_scale
            query[here, h] = of_scores @ step.k[r][:, g]
            np.add.at(k, (problem.slots[r], g), of_scores.T @ step.q[r][:, h])
            np.add.at(v, (problem.slots[r], g), shares.T @ w)
    found = {"query": query, "sinks": sinks, "alibi_slopes": slopes}
    for name, x in (("k", k), ("v", v)):
        if setting.kv == "no_cache":
            found[name] = np.concatenate([x[s] for s in problem.slots] + [np.zeros((5, *x.shape[1:]))])
        else:
            found[name] = in_layout(x.astype(np.float32), setting.block_size, setting.kv, is_key=name == "k")
    return found
