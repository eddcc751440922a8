"""Run a case of attention and check it against float64."""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.implementations import mosaic_gpu
from pallas_kernels import paged_decode, support, varlen_prefill
from pallas_kernels.paged_decode import entry as decode_entry
from pallas_kernels.varlen_prefill import entry as prefill_entry
from tests import score_functions
from tests.attention_problems import AttentionProblem, Setting
from tests.fuzz import masks
from tests.fuzz.draw import rows_of, sizes_of, visibility_of
from tests.pallas_kernels.varlen_prefill.split_everywhere import split_every_tile
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListProblem

QUANTIZATIONS = {
    "fp8_scalar": "fp8_e4m3", "fp8_head": "fp8_e4m3", "fp8_token_head": "fp8_e4m3_token_head",
    "fp8e5_scalar": "fp8_e5m2", "int8_token_head": "int8_token_head", "int8_static_v": "int8_static_v",
    "int8_k_only": "int8_k_only",
}  # fmt: skip


def problem_of(case: dict) -> tuple[AttentionProblem, jattn.masks.Mask | None]:
    """Return the problem of a case, and the mask that is not part of its spec."""
    mask, rule = (None, None) if case["mask"] is None else masks.make(case["mask"], sizes_of(case))
    if mask is not None and mask.allows_future_keys:  # which a causal layer refuses
        case = case | {"causal": False}
    in_spec = mask is not None and case["mask_in"] == "spec" and mask.is_static
    names = ("causal", "chunk_size", "soft_cap", "scale", "head_dim", "batch_invariant", "query_quantization")
    spec = jattn.AttentionSpec(
        num_q_heads=case["q_heads"],
        num_kv_heads=case["kv_heads"],
        window=case["window"] and tuple(case["window"]),
        sqrt_alibi=case["alibi"] == "sqrt",
        sparsity=mask if in_spec else None,
        **{name: case[name] for name in names},
    )
    names = (
        "query_lens",
        "seq_lens",
        "decode_query_len",
        "block_size",
        "dtype",
        "cache_dtype",
        "stored",
        "kv",
    )
    function, arrays = score_arrays_of(case)
    setting = Setting(
        spec=spec,
        bucket=case["bucket"] and jattn.Bucket(**case["bucket"]),
        has_sinks=case["sinks"],
        has_alibi=case["alibi"] is not None,
        seen=visibility_of(case, rule),
        score_mod=None if function is None else score_functions.Definition(function, arrays, rows_of(case)),
        is_cross=case["is_cross"],
        frees_blocks=case["frees_blocks"],
        seed=case["seed"],
        **{name: case[name] for name in names},
    )
    is_listed = mask is not None and case["implementation"] == "mosaic_gpu"
    return (TileListProblem if is_listed else AttentionProblem)(setting), None if in_spec else mask


def score_arrays_of(case: dict) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return the score function of a case, or None, and its arrays."""
    if case["score_mod"] is None:
        return None, ()
    function = getattr(score_functions, case["score_mod"])
    return function, score_functions.arrays_of(function, case["q_heads"], sizes_of(case).rows, case["seed"])


def check(case: dict) -> None:
    """Run a case and compare; raises the error of attend or an AssertionError."""
    problem, mask = problem_of(case)
    as_jax = lambda x: None if x is None else jnp.asarray(x)
    arrays = jnp.asarray(problem.query), problem.kv, problem.metadata, mask
    per_head = {"sinks": as_jax(problem.sinks), "alibi_slopes": as_jax(problem.slopes)}
    run = functools.partial(attend, case, problem)
    with contextlib.ExitStack() as stack:
        if is_interpreted(case):
            stack.enter_context(as_on_a_gpu())
        if case["cuts_keys"]:
            split_every_tile(stack.enter_context(pytest.MonkeyPatch.context()))
        result = (jax.jit(run) if case["is_jitted"] else run)(*arrays, **per_head)
    if case["return_lse"]:
        problem.check(*result)
    else:
        problem.check_output(result)


def attend(case: dict, problem: AttentionProblem, query, kv, metadata, mask, **per_head):
    """Call plan and attend, in the only place that does."""
    function, arrays = score_arrays_of(case)
    score_mod = None if function is None else score_functions.score_mod(function, arrays)
    call = {"implementation": case["implementation"], "return_lse": case["return_lse"], **per_head}
    call["score_mod"], plan = score_mod, None
    if case["planned"] or case["mask_in"] == "plan":
        cache_spec = cache_spec_of(case, problem) if case["planned"] == "cache_spec" else None
        options = {"implementation": case["implementation"], "query_dtype": query.dtype}
        options["score_mod"] = score_mod
        plan = jattn.plan(metadata, problem.spec, cache_spec or kv, mask=mask, **options)
    else:
        call["mask"] = mask
    return jattn.attend(query, kv, metadata, problem.spec, plan, **call)


def cache_spec_of(case: dict, problem: AttentionProblem) -> jattn.CacheSpec | None:
    """Return the CacheSpec of the problem's cache, or None if a CacheSpec cannot describe it."""
    has_spec = case["stored"] == "plain" or case["stored"] in QUANTIZATIONS
    if case["kv"] == "no_cache" or not has_spec:
        return None
    return jattn.CacheSpec(
        num_blocks=problem.num_blocks,
        block_size=case["block_size"],
        num_kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        dtype=case["cache_dtype"] or case["dtype"],
        layout=case["kv"],
        quantization=QUANTIZATIONS.get(case["stored"]),
    )


def is_interpreted(case: dict) -> bool:
    return case["implementation"] == "mosaic_gpu" and jax.default_backend() == "cpu"


@contextlib.contextmanager
def as_on_a_gpu():
    """Run the kernels in interpret mode with few thread blocks, and choose them as on a GPU."""

    def few_ctas(right, ctas):
        return lambda *args, **kwargs: dataclasses.replace(right(*args, **kwargs), ctas=ctas)

    interpret = functools.partial(mosaic_gpu.attend, interpret=plgpu.InterpretGPUParams())
    with contextlib.ExitStack() as stack:
        patch = lambda *target: stack.enter_context(mock.patch.object(*target))
        for module, ctas in ((paged_decode, 6), (decode_entry, 6), (varlen_prefill, 3), (prefill_entry, 3)):
            patch(module, "default_sizes", few_ctas(module.default_sizes, ctas))
        patch(support, "why_not_on", lambda *_: None)
        patch(mosaic_gpu, "attend", interpret)
        yield
