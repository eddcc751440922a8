"""Combining attention outputs: two arbitrary states, and a prefix shared by all requests."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from tests.attention_problems import AttentionProblem, Setting


def merge(case: dict, rng: np.random.Generator) -> None:
    """Check merge_attn_states; sides without keys contain arbitrary values."""
    tokens, heads, dim, dtype = rng.integers(1, 9), rng.integers(1, 4), 8, jnp.dtype(case["dtype"])
    outs = rng.normal(size=(2, tokens, heads, dim)).astype(dtype)
    lses = (rng.normal(size=(2, heads, tokens)) * 20).astype(np.float32)
    is_empty = rng.random(lses.shape) < 0.3
    lses = np.where(is_empty, rng.choice([-np.inf, np.inf], lses.shape), lses).astype(np.float32)
    outs[is_empty.swapaxes(1, 2) & ~is_empty.all(axis=0).T] = rng.choice([np.nan, np.inf, 3.0])
    arrays = [jnp.asarray(x) for pair in zip(outs, lses, strict=True) for x in pair]
    out, lse = (np.asarray(x, np.float64) for x in jattn.merge_attn_states(*arrays))
    error = float(ml_dtypes.finfo(dtype).eps) + 1e-5
    for t, h in np.ndindex(tokens, heads):
        sides = [n for n in range(2) if not is_empty[n, h, t]]
        if not sides:
            assert np.isneginf(lse[h, t])
            np.testing.assert_array_equal(out[t, h], outs[0, t, h].astype(np.float64))
            continue
        scores = np.array([lses[n, h, t] for n in sides], np.float64)
        expected_lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        terms = [
            np.exp(s - expected_lse) * outs[n, t, h].astype(np.float64)
            for s, n in zip(scores, sides, strict=True)
        ]
        np.testing.assert_allclose(lse[h, t], expected_lse, rtol=1e-5, atol=1e-5)
        off = np.abs(out[t, h] - np.sum(terms, axis=0)).max()
        assert off <= error * np.abs(terms).sum(axis=0).max(), (
            f"out of token {t}, head {h} is off by {off:.3g}"
        )


def cascade(case: dict, rng: np.random.Generator) -> None:
    """Check a shared prefix combined with each request's remaining keys."""
    size, shared, num_reqs = case["block_size"], int(rng.integers(1, 4)), int(rng.integers(1, 5))
    query_lens = np.sort(rng.integers(1, 6, num_reqs))
    seq_lens = shared * size + query_lens + rng.integers(0, 20, num_reqs)
    cap = float(rng.choice([0.0, 5.0])) or None
    setting = Setting(
        spec=jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, soft_cap=cap),
        query_lens=query_lens.tolist(),
        seq_lens=seq_lens.tolist(),
        block_size=size,
        has_sinks=bool(rng.random() < 0.5),
        shared_blocks=shared,
        seed=case["seed"],
    )
    if rng.random() < 0.5:
        exact = jattn.batch.bucket.exact_bucket(query_lens)
        rows = {"max_decodes": exact.max_decodes + 2, "max_prefills": exact.max_prefills + 1}
        tokens, blocks = exact.max_prefill_tokens + 5, -(-int(seq_lens.max()) // size) + 1
        bucket = jattn.Bucket(**rows, max_prefill_tokens=tokens, max_blocks=blocks)
        setting = dataclasses.replace(setting, bucket=bucket)
    problem = AttentionProblem(setting)

    @jax.jit
    def run(query, cache, metadata, sinks):
        parts = jattn.build_cascade_metadata(metadata, shared * size)
        call = {"implementation": "xla", "return_lse": True}
        return jattn.cascade_attend(query, cache, parts, problem.spec, sinks=sinks, **call)

    sinks = None if problem.sinks is None else jnp.asarray(problem.sinks)
    problem.check(*run(jnp.asarray(problem.query), problem.kv, problem.metadata, sinks))
