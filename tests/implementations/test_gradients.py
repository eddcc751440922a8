"""Gradients of the reference do not depend on tokens and slots of no request, which may be NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.pytree import replace
from tests.contract import CASES, Problem, case_id

pytestmark = pytest.mark.kernels  # minutes, together

FLOATS = [case for case in CASES if case["stored"] == "plain" and not case.get("query_quantization")]


def gradients(problem, query, kv):
    """Return the gradients of a weighted sum of outputs and LSEs of live tokens by every float argument."""
    live = problem.metadata.is_valid_token
    rng = np.random.default_rng(7)
    weights = jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    heads = [None if x is None else jnp.asarray(x) for x in (problem.sinks, problem.slopes)]

    def loss(query, k, v, sinks, slopes):
        out, lse = jattn.attend(
            query,
            replace(kv, k=k, v=v),
            problem.metadata,
            problem.spec,
            sinks=sinks,
            alibi_slopes=slopes,
            implementation="reference",
            return_lse=True,
        )
        lse = jnp.where(live[None] & jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.where(live[:, None, None], weights * out, 0.0)) + jnp.sum(weights[..., 0].T * lse)

    arguments = (query, kv.k, kv.v, *heads)
    expected = tuple(i for i, x in enumerate(arguments) if x is not None)
    return jax.jit(jax.grad(loss, argnums=expected))(*arguments)


@pytest.mark.parametrize("case", FLOATS, ids=case_id)
def test_nan_outside_of_requests_does_not_change_gradients(case):
    problem = Problem(case | {"dtype": "float32"})
    query = jnp.asarray(problem.query)
    poisoned = gradients(problem, query, problem.kv)
    kv = replace(problem.kv, k=jnp.nan_to_num(problem.kv.k), v=jnp.nan_to_num(problem.kv.v))
    clean = gradients(problem, jnp.nan_to_num(query), kv)
    for actual, expected in zip(poisoned, clean, strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(actual, expected)
    assert all((np.asarray(grad) != 0).any() for grad in clean[:3])
