"""Layers through attend, to compile ahead of time: a covering array of masks, caches, plans and padding."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp

import jattn
from tests import contract
from tests.contract import Problem
from tests.covering_array import covering_array
from tests.pallas_kernels.varlen_prefill.test_tile_lists import MASKS

FACTORS = contract.FACTORS | {
    "head_dim": [64, 80, 96, 128, 192, 256],
    "heads": [(4, 2)],  # as the masks' arrays have them
    "dtype": ["bfloat16", "float16"],
    "kv": ["NHD", "HND", "no_cache"],
    "block_size": [8, 16, 64],
    "mask": [None, *MASKS],
    "planned": [False, True],
}


def case(choices):
    problem = Problem(choices)
    mask = MASKS[choices["mask"]][0] if choices["mask"] else None

    def run(query, kv, metadata, mask, **per_head):
        attend = functools.partial(jattn.attend, implementation="mosaic_gpu", return_lse=True)
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):  # there is no GPU here
            options = {"mask": mask}
            if choices["planned"]:
                plan = jattn.plan(metadata, problem.spec, kv, mask=mask, query_dtype=query.dtype)
                options = {"plan": plan}
            return attend(query, kv, metadata, problem.spec, **options, **per_head)

    as_jax = lambda x: None if x is None else jnp.asarray(x)
    per_head = {"sinks": as_jax(problem.sinks), "alibi_slopes": as_jax(problem.slopes)}
    arrays = jax.eval_shape(lambda: (jnp.asarray(problem.query), problem.kv, problem.metadata, mask))
    return functools.partial(_call, run), (arrays, jax.eval_shape(lambda: per_head))


def _call(run, arrays, per_head):
    return run(*arrays, **per_head)


@functools.cache
def aot_cases():
    """Return the function and abstract arguments by the name of the case."""
    cases = covering_array(FACTORS, contract.allowed)
    return {"-".join(map(str, c.values())).replace(" ", ""): case(c) for c in cases}
