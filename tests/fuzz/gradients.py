"""Gradients of the reference, and of XLA over packed keys, against formulas in float64.

Padding queries are NaN. In some cases keys that no query sees are NaN too; in the others they are 0.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from tests import oracle_gradients
from tests.attention_problems import AttentionProblem, in_layout
from tests.fuzz import attention
from tests.fuzz import draw as drawing

TOLERANCE = 2e-4  # relative to the array's largest value or 1


def draw(seed: int) -> dict:
    """Return a small float32 case without 8-bit values."""
    rng, num_attempts = random.Random(f"gradients-{seed}"), 0
    while True:
        case = drawing.draw("reference", rng.randint(0, 10**9))
        is_small = sum(case["query_lens"]) <= 80 and sum(case["seq_lens"]) <= 200
        if is_small or num_attempts > 500:
            break
        num_attempts += 1
    if rng.random() < 0.6:
        case |= {"kv": "no_cache", "implementation": "xla"}
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
    """Check gradients of a weighted sum of outputs and LSEs with respect to every differentiable argument."""
    problem, mask = attention.problem_of(case)
    rng = np.random.default_rng(case["seed"])
    is_live = np.zeros(len(problem.query), bool)
    for start, new in zip(problem.starts, problem.query_lens, strict=True):
        is_live[start : start + new] = True
    weights = rng.normal(size=problem.query.shape).astype(np.float32)
    lse_weights = rng.normal(size=problem.query.shape[:2]).astype(np.float32)
    per_head = {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
    clean = (lambda x: x) if case["nan_keys"] else jnp.nan_to_num
    arguments = {"query": problem.query, "k": clean(problem.kv.k), "v": clean(problem.kv.v)}
    arguments |= {name: x for name, x in per_head.items() if x is not None}

    def loss(arguments):
        kv = jattn.pytree.replace(problem.kv, k=arguments["k"], v=arguments["v"])
        numbers = {name: arguments.get(name) for name in per_head}
        out, lse = attention.attend(case, problem, arguments["query"], kv, problem.metadata, mask, **numbers)
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse).T
        return (out * weights).sum() + (finite * lse_weights).sum()

    actual = jax.jit(jax.grad(loss))({name: jnp.asarray(x) for name, x in arguments.items()})
    expected = oracle_gradients.gradients(problem, oracle_gradients.LossWeights(weights, lse_weights))
    expected |= {name: in_storage_layout(problem, expected[name], is_key=name == "k") for name in "kv"}
    for name, array in actual.items():
        bound = TOLERANCE * max(np.abs(expected[name]).max(initial=0.0), 1.0)
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=bound, err_msg=f"gradient of {name}")


def in_storage_layout(problem: AttentionProblem, per_slot: np.ndarray, *, is_key: bool) -> np.ndarray:
    """Return per-slot gradients in the layout of the problem's keys and values."""
    setting = problem.setting
    if setting.kv == "no_cache":
        return oracle_gradients.packed(problem, per_slot)
    return in_layout(per_slot.astype(np.float32), setting.block_size, setting.kv, is_key=is_key)
