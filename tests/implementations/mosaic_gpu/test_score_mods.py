"""The kernels evaluate score functions: interpreted, they equal the definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.implementations import mosaic_gpu
from tests import score_functions
from tests.attention_problems import AttentionProblem, Setting
from tests.regions import kernel_for
from tests.score_functions import gained, hiding, relative, scaled

pytestmark = pytest.mark.kernels
SLOW = pytest.mark.slow
PREFILL = {"query_lens": [20, 70], "seq_lens": [30, 190]}
DECODE = {"query_lens": [1, 1], "seq_lens": [33, 170]}
SPECULATIVE = {"query_lens": [3, 3], "seq_lens": [33, 170], "decode_query_len": 3}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Score functions combine scores with ints, as in FlexAttention."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def check(function, lens, *, kv, spec=None, mask=None, **setting):
    """Compare a step with one region with the definition."""
    heads = {"num_q_heads": score_functions.Q_HEADS, "num_kv_heads": 2, "head_dim": 64}
    problem = AttentionProblem(
        Setting(
            spec=jattn.AttentionSpec(**heads | (spec or {})), kv=kv, dtype="bfloat16",
            score_mod=score_functions.definition(function), **lens, **setting,
        )
    )  # fmt: skip
    modifiers = {
        name: None if x is None else jnp.asarray(x, jnp.float32)
        for name, x in (("sinks", problem.sinks), ("alibi_slopes", problem.slopes))
    }
    query, score_mod = jnp.asarray(problem.query), score_functions.score_mod(function)
    kernel = kernel_for(query, problem.kv, problem.metadata, problem.spec, mask, score_mod)
    sizes = dataclasses.replace(kernel.sizes, ctas=2)  # the interpreter runs idle thread blocks, too
    run = functools.partial(
        mosaic_gpu.attend, spec=problem.spec, kernel=dataclasses.replace(kernel, sizes=sizes),
        kernel_plan=None, score_mod=score_mod, mask=mask, interpret=plgpu.InterpretGPUParams(), **modifiers,
    )  # fmt: skip
    out, lse = jax.jit(run)(query, problem.kv, problem.metadata)
    problem.check(out, lse)


@pytest.mark.parametrize(
    ("function", "lens", "options"),
    [
        pytest.param(gained, PREFILL, {"kv": "NHD", "spec": {"soft_cap": 5.0, "window": (50, None)}}),
        pytest.param(relative, DECODE, {"kv": "NHD"}),
        pytest.param(relative, PREFILL, {"kv": "no_cache", "has_alibi": True}, marks=SLOW),
        pytest.param(hiding, PREFILL, {"kv": "HND", "has_sinks": True}, marks=SLOW),
        pytest.param(scaled, PREFILL, {"kv": "no_cache", "spec": {"causal": False}}, marks=SLOW),
        pytest.param(gained, SPECULATIVE, {"kv": "HND", "spec": {"soft_cap": 5.0}}, marks=SLOW),
        pytest.param(hiding, DECODE, {"kv": "NHD", "has_sinks": True}, marks=SLOW),
        pytest.param(hiding, SPECULATIVE, {"kv": "NHD", "spec": {"num_kv_heads": 1}}, marks=SLOW),
        pytest.param(scaled, DECODE, {"kv": "NHD", "stored": "fp8_head", "has_alibi": True}, marks=SLOW),
        pytest.param(relative, PREFILL, {"kv": "NHD", "stored": "int8_token_head"}, marks=SLOW),
    ],
)  # fmt: skip
def test_kernels_equal_the_definition(function, lens, options):
    check(function, lens, **options)
