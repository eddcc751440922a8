"""The kernels evaluate score functions: interpreted, they equal the definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations import mosaic_gpu
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from pallas_kernels import architectures
from tests import oracle, oracle_gradients, score_functions
from tests.attention_problems import AttentionProblem, Setting
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListProblem
from tests.regions import kernel_for
from tests.score_functions import bounded, capped, gained, hiding, relative, scaled

pytestmark = pytest.mark.kernels
SLOW = pytest.mark.slow
GRADIENTS = {"query_lens": [20, 70], "seq_lens": [30, 90]}
# Some tiles are so far from the diagonal that all of their clipped distances are equal.
LONG_GRADIENTS = {"query_lens": [20, 170], "seq_lens": [30, 200]}
PREFILL = {"query_lens": [20, 70], "seq_lens": [30, 190]}
DECODE = {"query_lens": [1, 1], "seq_lens": [33, 170]}
SPECULATIVE = {"query_lens": [3, 3], "seq_lens": [33, 170], "decode_query_len": 3}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Score functions combine scores with ints, as in FlexAttention."""
    with jax.numpy_dtype_promotion("standard"):
        yield


SLASHED = masks.VerticalSlash(
    columns=np.arange(4 * 200).reshape(4, 200) % 7 == 0,
    slashes=np.broadcast_to(np.arange(200) < 20, (4, 200)),
    num_gathered=40,
)
BLOCKED = masks.BlockMask(blocks=np.arange(2 * 12).reshape(1, 2, 1, 12) % 3 != 1, block_q=None, block_kv=16)
VISIBLE = {
    "slashed": lambda request, head, i, j: SLASHED.columns[head, j] or SLASHED.slashes[head, i - j],
    "blocked": lambda request, head, i, j: BLOCKED.blocks[0, head // 2, 0, j // 16],
}
MASKS = {"slashed": SLASHED, "blocked": BLOCKED, None: None}


def problem_of(function, lens, *, kv, spec=None, mask=None, **setting):
    heads = {"num_q_heads": score_functions.Q_HEADS, "num_kv_heads": 2, "head_dim": 64}
    definition = score_functions.Definition(function)
    problem = (AttentionProblem if mask is None else TileListProblem)(
        Setting(
            spec=jattn.AttentionSpec(**heads | (spec or {})), kv=kv, dtype="bfloat16",
            score_mod=definition, visible=VISIBLE.get(mask), **lens, **setting,
        )
    )  # fmt: skip
    as_array = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
    return problem, {"sinks": as_array(problem.sinks), "alibi_slopes": as_array(problem.slopes)}


def check(function, lens, *, gpu=None, **options):
    """Compare the output of a step with one region with the definition."""
    mask = MASKS[options.get("mask")]
    problem, modifiers = problem_of(function, lens, **options)
    query, score_mod = jnp.asarray(problem.query), score_functions.score_mod(function)
    with architectures.target(gpu):
        kernel = kernel_for(query, problem.kv, problem.metadata, problem.spec, mask, score_mod)
    sizes = dataclasses.replace(kernel.sizes, ctas=2)  # the interpreter runs idle thread blocks, too
    inputs = RegionInputs(
        query=query, kv=problem.kv, metadata=problem.metadata, spec=problem.spec, mask=mask,
        score_mod=score_mod, **modifiers,
    )  # fmt: skip
    kernel = dataclasses.replace(kernel, sizes=sizes)
    run = functools.partial(mosaic_gpu.attend, kernel=kernel, interpret=plgpu.InterpretGPUParams())
    with architectures.target(gpu):
        problem.check(*jax.jit(run)(inputs))


def check_gradients(function, lens=None, *, gpu=None, **options):
    """Compare the gradients of prompts with the definition."""
    problem, modifiers = problem_of(function, lens or GRADIENTS, kv="no_cache", **options)
    loss_weights = oracle_gradients.draw_weights(problem)
    outs, lses = oracle.attention(problem.spec, problem.step)
    inputs = RegionInputs(
        query=jnp.asarray(problem.query), kv=problem.kv, metadata=problem.metadata, spec=problem.spec,
        mask=MASKS[options.get("mask")], alibi_slopes=modifiers["alibi_slopes"],
        score_mod=score_functions.score_mod(function),
    )  # fmt: skip
    outputs = OutputGradients(
        out=jnp.concatenate(outs).astype(jnp.bfloat16), lse=jnp.concatenate(lses).T,
        grad_out=jnp.asarray(loss_weights.out, jnp.bfloat16), grad_lse=jnp.asarray(loss_weights.lse.T),
    )  # fmt: skip
    run = functools.partial(mosaic_gpu.gradients, interpret=plgpu.InterpretGPUParams())
    with architectures.target(gpu):
        grads = jax.jit(run)(inputs, outputs)
    oracle_gradients.check(problem, loss_weights, dict(zip(("query", "k", "v"), grads, strict=True)))


@pytest.mark.parametrize(
    ("function", "lens", "options"),
    [
        pytest.param(gained, PREFILL, {"kv": "NHD", "spec": {"soft_cap": 5.0, "window": (50, None)}}),
        pytest.param(relative, PREFILL, {"kv": "no_cache", "spec": {"window": (150, None)}}),
        pytest.param(relative, DECODE, {"kv": "NHD"}),
        pytest.param(relative, PREFILL, {"kv": "no_cache", "has_alibi": True}, marks=SLOW),
        pytest.param(bounded, PREFILL, {"kv": "no_cache"}),
        pytest.param(capped, PREFILL, {"kv": "no_cache"}, marks=SLOW),
        pytest.param(hiding, PREFILL, {"kv": "HND", "has_sinks": True}, marks=SLOW),
        pytest.param(scaled, PREFILL, {"kv": "no_cache", "spec": {"causal": False}}, marks=SLOW),
        pytest.param(gained, SPECULATIVE, {"kv": "HND", "spec": {"soft_cap": 5.0}}, marks=SLOW),
        pytest.param(hiding, DECODE, {"kv": "NHD", "has_sinks": True}, marks=SLOW),
        pytest.param(hiding, SPECULATIVE, {"kv": "NHD", "spec": {"num_kv_heads": 1}}, marks=SLOW),
        pytest.param(scaled, DECODE, {"kv": "NHD", "stored": "fp8_head", "has_alibi": True}, marks=SLOW),
        pytest.param(relative, PREFILL, {"kv": "NHD", "stored": "int8_token_head"}, marks=SLOW),
        pytest.param(relative, PREFILL, {"kv": "no_cache", "mask": "slashed"}, marks=SLOW),
        pytest.param(gained, PREFILL, {"kv": "NHD", "mask": "blocked"}, marks=SLOW),
        pytest.param(gained, DECODE, {"kv": "NHD", "mask": "blocked"}, marks=SLOW),
        pytest.param(gained, PREFILL, {"kv": "NHD", "spec": {"soft_cap": 5.0}, "gpu": "8.0"}, marks=SLOW),
        pytest.param(hiding, PREFILL, {"kv": "NHD", "has_alibi": True, "gpu": "8.0"}, marks=SLOW),
        pytest.param(gained, DECODE, {"kv": "NHD", "gpu": "8.0"}, marks=SLOW),
    ],
)  # fmt: skip
def test_kernels_equal_the_definition(function, lens, options):
    check(function, lens, **options)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        pytest.param(gained, {"spec": {"soft_cap": 5.0}}),
        pytest.param(scaled, {"spec": {"window": (50, None), "deterministic": True}}, marks=SLOW),
        pytest.param(relative, {"has_alibi": True, "spec": {"causal": False}}, marks=SLOW),
        pytest.param(relative, {"has_alibi": True, "spec": {"deterministic": True}}, marks=SLOW),
        pytest.param(hiding, {"has_sinks": True}, marks=SLOW),
        pytest.param(hiding, {"spec": {"deterministic": True}}, marks=SLOW),
        pytest.param(relative, {"mask": "slashed"}, marks=SLOW),
        pytest.param(relative, {"lens": LONG_GRADIENTS, "spec": {"window": (150, None)}}),
        pytest.param(bounded, {}, marks=SLOW),
        pytest.param(capped, {"lens": LONG_GRADIENTS}, marks=SLOW),
        pytest.param(scaled, {"mask": "slashed", "spec": {"deterministic": True}}, marks=SLOW),
        pytest.param(gained, {"spec": {"soft_cap": 5.0, "window": (50, None)}, "gpu": "8.0"}, marks=SLOW),
        pytest.param(relative, {"has_alibi": True, "mask": "slashed", "gpu": "8.9"}, marks=SLOW),
    ],
)  # fmt: skip
def test_gradients_equal_the_definition(function, options):
    check_gradients(function, **options)
