"""Rows of score functions, of kernels for other architectures, and of lists of tokens."""

import argparse
import functools
import json

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from benchmarks.kernels import backward, decode, prefill, score_mods, sparse_decode
from benchmarks.kernels.cases import DecodeCase, PrefillCase
from benchmarks.runner import Rows
from pallas_kernels import target

DECODE = DecodeCase(name="x", q_heads=4, kv_heads=2, head_dim=64, kv_lens=(40, 5))
PREFILL = PrefillCase(
    name="x", q_heads=4, kv_heads=2, head_dim=64, query_lens=(13, 7), context_lens=(20, 0)
)  # fmt: skip
TIMES = {"us": 3.0, "spread_us": [3.0, 3.0], "kernels_us": {"paged_decode": 3.0}}


def read_rows(folder):
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("modifier", score_mods.BASELINES)
def test_score_function_equals_its_baseline_or_adds_its_table(modifier):
    """A row compares a function with what is built in, so both must be the same."""
    baseline = score_mods.BASELINES[modifier]
    s, head, key = np.float32([[[5.0, 60.0]]] * 2), np.int32([[[2]], [[3]]]), np.int32([1, 47])
    query = np.int32(50)
    score_mod = score_mods.modifier_arrays(modifier, 4)["score_mod"]
    expected = {
        "soft_cap": 30 * np.tanh(s / 30) + 0.0 * head,
        "alibi": s - score_mods.alibi_slopes(4)[head] * (query - key),
        "plain": s + score_mods.relative_table(4)[head, np.array([[[32, 3]]])],
    }[baseline]
    actual = score_mods.apply_score_mod(score_mod, s, np.int32(0), head, query, key)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("modifier", score_mods.BASELINES)
@pytest.mark.parametrize("suite", ["prefill", "decode"])
def test_score_function_is_checked(suite, modifier, monkeypatch):
    """The references of the suites agree with attention by XLA, and not with that of the plain layer."""
    if suite == "prefill":
        work = prefill.default_work(PREFILL, 16, modifier)
        arrays = prefill.inputs(work)
        call = lambda: prefill.attend_call(work, arrays)
    else:
        inputs = decode.inputs(DECODE, 16, "HND", "bfloat16", "none")
        expected = decode.reference_outputs(DECODE, inputs, "HND", modifier)
        call = lambda: decode.attend_call(inputs, expected, 16, "HND", modifier)
    call()
    if modifier == "soft_cap_function":
        return  # it changes random scores too little
    attend = jattn.attend
    monkeypatch.setattr(jattn, "attend", lambda *args, score_mod, **options: attend(*args, **options))
    with pytest.raises(AssertionError, match="attend: error="):
        call()


@pytest.mark.kernels
@pytest.mark.parametrize("modifier", ["soft_cap_function", "relative_table"])
def test_reference_gradients_contain_the_score_function(modifier):
    work = backward.Work(case=PrefillCase(
        name="x", q_heads=4, kv_heads=2, head_dim=64, query_lens=(13, 7), context_lens=(0, 0)
    ), modifier=modifier)  # fmt: skip
    arrays = work.arrays()
    gradients = dict(zip(backward.GRADIENTS, backward.attend_gradients(work, arrays), strict=True))
    out, lse = jattn.attention(
        *(arrays[name][:20] for name in ("query", "key", "value")),
        cu_seqlens=arrays["query_start_loc"], causal=True, score_mod=arrays["score_mod"], return_lse=True,
    )  # fmt: skip
    tokens = {name: arrays[name][:20] for name in ("query", "key", "value", "grad_out")}
    arrays |= tokens | {"out": out, "lse": lse}
    results = {"out": out, "lse": lse.T, **gradients}
    errors = backward.max_errors(results, arrays, work.case, work.score)
    assert max(errors.values()) < backward.TOLERANCE
    arrays["score_mod"] = jattn.ScoreMod(lambda score, *pair: 0.5 * score)
    wrong = backward.max_errors(results, arrays, work.case, work.score)
    assert min(wrong[name] for name in ("lse", "query", "key")) > backward.TOLERANCE


def test_sizes_with_a_table_are_those_of_attention():
    case = PrefillCase(name="x", q_heads=32, kv_heads=8, head_dim=128, query_lens=(8192,), context_lens=(0,))
    work = prefill.default_work(case, None, "relative_table")
    gradients, kernels = backward.Work(case=case, modifier="relative_table"), []
    jax.eval_shape(lambda: kernels.append(gradients.forward_kernel(gradients.inputs(gradients.arrays()))))
    assert [kernel.sizes for kernel in kernels] == [work.sizes]
    assert work.sizes.warpgroups == 3


@pytest.mark.kernels
def test_kernels_of_other_architectures_are_compared_with_the_devices_own(monkeypatch, tmp_path):
    times = iter((6.0, 8.0, 9.0))
    monkeypatch.setattr(decode, "kernel_times", lambda run, *args: (run(*args), TIMES | {"us": next(times)}))
    monkeypatch.setattr(decode, "read_ceiling", lambda: 4000.0)
    monkeypatch.setattr(decode, "DECODE", {"x": DECODE})
    kernel = functools.partial(decode.paged_decode, interpret=plgpu.InterpretGPUParams())
    sizes = []
    monkeypatch.setattr(decode, "paged_decode", lambda *args, **options: (
        sizes.append(options["sizes"]), kernel(*args, **options)
    )[1])  # fmt: skip
    monkeypatch.setattr(decode, "core_count", lambda: 2)
    decode.add_arguments(parser := argparse.ArgumentParser())
    decode.main(parser.parse_args(["--target", "8.0", "12.0", "--out", str(tmp_path)]))
    _, *rows = read_rows(tmp_path)
    assert [(row.get("target"), row.get("of_native")) for row in rows] == [
        (None, None),
        ("8.0", 0.75),
        ("12.0", 0.667),
    ]
    assert [(size.gpu, size.uses_tma, size.per_warp_mma) for size in sizes[1:]] == [
        ("8.0", False, True),
        ("12.0", True, True),
    ]
    assert all(size.ctas in (2, 4) for size in sizes)


@pytest.mark.parametrize("gpu", [None, "8.9"])
def test_prefill_kernel_of_another_architecture_has_its_sizes(gpu):
    with target(gpu):
        sizes = prefill.default_work(PREFILL, 16, "relative_table").sizes
    assert (sizes.gpu, sizes.per_warp_mma) == (("9.0", False) if gpu is None else (gpu, True))


@pytest.mark.parametrize("block", [1, 16])
def test_rows_of_listed_tokens_count_the_bytes_of_the_lists(block, monkeypatch, tmp_path):
    monkeypatch.setattr(sparse_decode, "kernel_times", lambda run, *args: (run(*args), TIMES))
    monkeypatch.setattr(sparse_decode, "read_ceiling", lambda: 100.0)
    mask = sparse_decode.random_lists(2, 256, 32, block)
    attend = lambda self, query, cache, metadata, _, plan=None: jattn.attend(
        query, cache, metadata, sparse_decode.SPEC, mask=mask, implementation="xla"
    )
    monkeypatch.setattr(sparse_decode.DecodeStep, "attend", attend)
    rows = Rows("sparse", str(tmp_path))
    sparse_decode.listed_tokens(rows, ["none"], [block], {"2x256": (2, 256)}, num_listed=32)
    _, row = read_rows(tmp_path)
    num_bytes = 2 * (32 * 8 * 512 + 4 * 32 * 128)
    assert row["gb_per_s"] == pytest.approx(num_bytes / 3e3, abs=1e-3)
    assert row["of_ceiling"] == pytest.approx(num_bytes / 3e5, abs=1e-3)
    assert row["max_error"] < sparse_decode.TOLERANCE


@pytest.mark.parametrize("block", [1, 16])
def test_listed_tokens_have_a_decode_kernel(block):
    step = sparse_decode.DecodeStep(2, 256, 64, "none")
    mask = sparse_decode.random_lists(2, 256, 32, block)
    with target("h100"):
        plan = jattn.plan(step.metadata, sparse_decode.SPEC, step.cache, mask=mask)
        program = jax.jit(step.attend).trace(step.query, step.cache, step.metadata, None, plan)
    assert "paged_decode" in str(program.jaxpr)
