"""The benchmark suites that write rows."""

import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from benchmarks.__main__ import SUITES, main, suite
from benchmarks.kernels import backward, decode, prefill
from benchmarks.kernels.cases import DecodeCase, PrefillCase
from benchmarks.mesh import processes, scaling_model
from benchmarks.mesh.steps import agreement
from benchmarks.models import load
from benchmarks.serving import serve
from benchmarks.serving.engine_steps import StepMonitor
from jattn.serving import SamplingParams
from pallas_kernels.varlen_prefill import reference
from tests.serving.server.live_server import small_engine
from tests.subprocesses import run_module

ROOT = pathlib.Path(__file__).parents[2]
# What needs torch, a search for sizes, models of machines, ten minutes of clients, tests on a GPU, the pages.
STEPS = "step_1x32", "step_3x64", "step_2x24_prompt"  # of the suite mesh, small
OTHERS = {"backward-peers", "tune", "engine-model", "scaling-model", "crowds", "gpu-tests", "table"}


def test_make_bench_runs_every_suite():
    makefile = (ROOT / "Makefile").read_text()
    ((suites, command),) = re.findall(
        r"^bench:.*\n\tfor suite in ([a-z0-9 ]+); do (.*)$", makefile, re.MULTILINE
    )
    assert sorted(suites.split()) == sorted(SUITES.keys() - OTHERS)
    assert command == "$(PYTHON) -m benchmarks $$suite || exit 1; done"


@pytest.mark.kernels
def test_server_and_engine_rows_have_the_same_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "PROMPT_IDS", 256)
    rows = serve.measure(small_engine(), serve.runs_at_rates((2.0, 8.0), 1.0, input_len=9, output_len=5))
    (slow, fast) = rows = list(rows)
    assert (slow["num_prompts"], fast["num_prompts"]) == (2, 8)
    for row in (slow, fast):
        for kind in serve.TIMES:
            assert min(row[f"server_{kind}_p50"], row[f"engine_{kind}_p50"]) > 0
        cost = row["server_time_to_first_token_ms_p50"] - row["engine_time_to_first_token_ms_p50"]
        assert row["time_to_first_token_ms_p50_cost"] == cost
        assert row["http_process_us_per_token"] > 0
        outside_engine_ms = row[
            "first_token_outside_engine_ms_mean"
        ]  # part of the requests' time to the first token
        assert 0 < outside_engine_ms < row["server_time_to_first_token_ms_mean"]
        assert row["engine_again_time_to_first_token_ms_p50"] > 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["benchmarks", "serve", "--draw", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", [*command, "--plot", str(tmp_path / "rows.svg")])
    main()
    assert (tmp_path / "rows.svg").stat().st_size > 1000


def test_step_monitor_records_the_bucket_of_each_step():
    engine = small_engine()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    with StepMonitor(engine) as monitor:
        engine.step()
    assert [monitor.bucket] == list(engine.graphs.buckets)
    assert monitor.expected_ms > 0


@pytest.mark.skipif(not load.CLEAR.exists(), reason="writes /proc")
def test_loaded_checkpoint_is_compared_with_its_files(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(load, "LLAMA_8B", load.LLAMA_8B | sizes)
    load.add_arguments(parser := argparse.ArgumentParser())
    options = f"--layers 3 --vocab 97 --folder {tmp_path} --out {tmp_path}".split()
    load.main(parser.parse_args(options))
    (file,) = tmp_path.glob("load-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2]
    assert rows[0]["bytes"] > 2 * 3 * 64 * (64 * 3 + 96 * 3)
    load.make_checkpoint(tmp_path, 1, 97)
    model, _ = load.measure(tmp_path, None)
    model.layers[0].self_attn.qkv_proj.kernel[...] *= 2
    with pytest.raises(SystemExit, match=r"layers\.0\.self_attn\.q_proj differs from the checkpoint"):
        load.check(model, tmp_path)


def agreement_of(change):
    expected = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    logits = change(expected)
    return agreement(logits, logits.argmax(axis=-1), expected)


def test_step_on_a_mesh_must_agree_with_one_device():
    assert agreement_of(lambda expected: expected) == {"error": 0.0, "token_gap": 0.0, "same_tokens": 1.0}
    with pytest.raises(SystemExit, match=r"logits differ by 1\.\d+ .* from one device"):
        agreement_of(lambda expected: expected[::-1])  # swaps the requests


def mesh_rows(folder, *cases):
    """Run cases of the suite `mesh` with small sizes on two devices of one process and return its rows."""
    command = ["benchmarks", "mesh", *cases, "--small", "--peer-memory", "--out", folder]
    done = run_module(*command, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.kernels
def test_mesh_suite_measures_a_mesh_and_one_device(tmp_path):
    """Cases with one request, `long` and a step, differ from the others in their sizes only."""
    sizes = ("--sizes", "1x64", "2x64", "3x64", "2x24_prompt")
    rows = mesh_rows(tmp_path, "attention", "prompt", "sums", "steps", "large", *sizes)
    splits = [(row["name"], row["split"], row.get("merge")) for row in rows if "split" in row]
    merges = [("keys", merge) for merge in ("all_gather", "all_reduce", "reduce_scatter", "peer_memory")]
    whole = [("none", None), ("heads", None)]
    expected = [("attention_2x128", *settings) for settings in (*whole, *merges)]
    assert splits == expected + [("prompt_96", *settings) for settings in (*whole, ("keys", None))]
    sums = [
        collective + suffix for suffix in ("", "_norm") for collective in ("sum", "all_reduce", "two_shots")
    ]
    expected = [f"{collective}_{rows}x64" for rows in (1, 2) for collective in sums]
    assert [row["name"] for row in rows if "bytes" in row] == expected
    steps = [(row["name"], row["tp"], row["sums"]) for row in rows if "step_us" in row and "tp" in row]
    settings = (1, "psum"), (2, "psum"), (2, "all_reduce")
    assert steps == [(name, *setting) for setting in settings for name in STEPS[1:]]
    assert all(row["error"] < 0.05 for row in rows if "error" in row)
    (large,) = [row for row in rows if row["name"] == "large_3x64"]
    assert (large["sums"], large["executables"]) == ("all_reduce", 1)
    assert large["gb_per_s"] > 0


@pytest.mark.slow
def test_mesh_suite_measures_loops_and_an_engine(tmp_path):
    rows = mesh_rows(tmp_path, "loop", "decode_loop", "nano", "large_loop")
    steps = [(row["name"], row["tp"], row["sums"]) for row in rows if "step_us" in row and "tp" in row]
    settings = (1, "psum"), (2, "psum"), (2, "all_reduce")
    expected = [("decode_loop_3x48", *setting) for setting in settings]
    assert steps == [*expected, ("large_loop_3x64", 2, "all_reduce")]
    loops = [(row["steps"], row["sums"]) for row in rows if row["name"] == "loop_3x48"]
    assert loops == [(2 * part, "all_reduce") for part in range(1, 11)]
    nano = [row["name"] for row in rows if row.get("tokens_per_s", 0) > 0]
    assert nano == ["nano_bench_first", "nano_bench", "nano_bench_again"]
    (loop,) = [row for row in rows if row["name"] == "large_loop_3x64"]
    assert loop["rounds"] == 5
    assert loop["gb_per_s"] > 0


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_mesh_suite_measures_steps_with_one_process_per_device(cp, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "mesh", "steps", "--small", "--peer-memory"]
    command += ["--processes", "2", "--cp", str(cp), "--sizes", "1x32", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]  # one process writes
    settings = (1, "psum"), (2, "psum"), (2, "all_reduce")
    expected = [("step_1x32", *setting, 2) for setting in settings]
    actual = [(row["name"], row["tp"] * row.get("cp", 1), row["sums"], row["processes"]) for row in rows]
    assert actual == expected
    assert all(("cp" in row) == (cp == 2 and row["tp"] * row.get("cp", 1) == 2) for row in rows)
    assert all(row["error"] < 0.05 for row in rows if "error" in row)


@pytest.mark.kernels
@pytest.mark.slow
def test_mesh_suite_measures_other_cases_with_one_process_per_device(tmp_path):
    """A model larger than one device is measured on several layouts."""
    command = [sys.executable, "-m", "benchmarks", "mesh", "attention", "prompt", "loop"]
    command += ["large", "large_loop"]
    command += ["--small", "--peer-memory", "--stall", "600", "--processes", "2", "--cp", "1", "2"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=1200)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    splits = [row["split"] for row in rows if "split" in row]
    assert splits == ["none", "heads", *["keys"] * 4, "none", "heads", "keys"]
    assert [row["steps"] for row in rows if row["name"] == "loop_3x48"] == list(range(2, 21, 2))
    large = [(row["tp"], row.get("cp"), row["sums"]) for row in rows if row["name"] == "large_3x64"]
    assert large == [(2, None, "all_reduce"), (1, 2, "all_reduce")]
    assert [row["tp"] for row in rows if row["name"] == "large_loop_3x64"] == [2]
    assert all(row["processes"] == 2 for row in rows)


def test_failed_process_ends_the_others(monkeypatch):
    code = "import sys, time; time.sleep(99 * (sys.argv[-1] != '1')); sys.exit(3)"
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", code))
    suite("mesh").add_arguments(parser := argparse.ArgumentParser())
    with pytest.raises(SystemExit, match=r"processes exited with \[None, 3\]"):
        suite("mesh").main(parser.parse_args(["--processes", "2"]))


def test_scaling_model_equals_the_measurements():
    model = scaling_model.Model.measured()
    for gpus, requests, context, us in [(1, 1, 1024, 4146), (2, 64, 4096, 7302), (8, 256, 1024, 4853)]:
        assert model.step_us(gpus, requests, context) == pytest.approx(us, abs=1)
    assert model.sum_us(2, 256) < model.sum_us(4, 256) < model.sum_us(8, 256) == pytest.approx(16.83)


def test_measured_rows_are_compared_with_the_calculation(capsys):
    results = ROOT / "benchmarks" / "results"
    files = [str(results / file) for file in (*scaling_model.EIGHT_GPUS[:1], scaling_model.TWO_GPUS[1])]
    suite("scaling-model").add_arguments(parser := argparse.ArgumentParser())
    suite("scaling-model").main(parser.parse_args(["--compare", *files]))
    lines = capsys.readouterr().out.splitlines()
    assert "| step_64x4096 | 8 | 4149.0 | 4149.0 | 1.00 |  |" in lines
    assert "| step_1x1024 | 2 | 4159.2 | 3326.9 | 1.25 | off |" in lines
    assert "| attention, 8 x 128k, by heads | >= 7.5 | 7.37 |" in lines
    large = "step of a model with 70B sizes relative to reading its bytes, tp 8"
    assert f"| {large} | <= 1.35 | 2.78 |" in lines


def test_scaling_page_has_the_models_table():
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert scaling_model.table(scaling_model.Model.measured()) in page


def test_prefill_error_is_relative_to_each_tokens_output():
    """With many keys outputs are small, and all zeros must count as an error there, too."""
    case = PrefillCase(
        name="few", q_heads=2, kv_heads=1, head_dim=64, query_lens=(3, 4), context_lens=(1000, 0)
    )
    work = prefill.default_work(case, 16, "plain")
    arrays = prefill.inputs(work)
    table, lens = np.asarray(arrays["block_table"]), case.seq_lens
    kv = [arrays[name][table] for name in ("key", "value")]
    k, v = ([x[r].reshape(-1, 1, 64)[: lens[r]] for r in range(2)] for x in kv)
    attend_request = functools.partial(reference.attend_request, scale=64**-0.5)
    queries = jnp.split(arrays["query"][:7], [3])
    exact = np.concatenate([attend_request(*request) for request in zip(queries, k, v, strict=True)])
    assert prefill.max_error(exact, arrays, work) < 1e-4
    assert prefill.max_error(np.zeros_like(exact), arrays, work) == 1


@pytest.mark.parametrize(
    ("block_size", "modifier", "quantization"),
    [(None, "plain", "none"), (16, "window", "none"), (16, "sinks", "fp8_e4m3_token_head")],
)
def test_prefill_suite_times_attend_only_if_its_output_is_right(
    block_size, modifier, quantization, monkeypatch
):
    case = PrefillCase(name="x", q_heads=4, kv_heads=2, head_dim=64, query_lens=(13, 7), context_lens=(20, 0))
    work = prefill.default_work(case, block_size, modifier, quantization)
    arrays = prefill.inputs(work)
    _, query, *_ = prefill.attend_call(work, arrays)
    assert query.shape == (20, 4, 64)  # the kernel's queries are padded to 24 tokens
    monkeypatch.setattr(prefill.jattn, "attend", lambda query, *args, **kwargs: -query)
    with pytest.raises(AssertionError, match="attend: error="):
        prefill.attend_call(work, arrays)


@pytest.mark.parametrize(("layout", "quantization"), [("NHD", "none"), ("HND", "int8_static_v")])
def test_decode_suite_times_attend_only_if_its_output_is_right(layout, quantization):
    case = DecodeCase(name="x", q_heads=4, kv_heads=2, head_dim=64, kv_lens=(40, 5))
    inputs = decode.inputs(case, 16, layout, "bfloat16", quantization)
    expected = decode.reference_outputs(case, inputs, layout)
    decode.attend_call(inputs, expected, 16, layout)
    with pytest.raises(AssertionError, match="attend: error="):
        decode.attend_call(inputs, {r: -x for r, x in expected.items()}, 16, layout)


@pytest.mark.kernels
@pytest.mark.parametrize("modifier", ["window", "sinks"])
def test_backward_suite_times_the_gradients_of_attention(modifier):
    case = PrefillCase(name="x", q_heads=4, kv_heads=2, head_dim=64, query_lens=(13, 7), context_lens=(0, 0))
    work = backward.Work(case=case, modifier=modifier)
    arrays = work.arrays()
    gradients = dict(zip(backward.GRADIENTS, backward.attend_gradients(work, arrays), strict=True))
    out, lse = jattn.attention(
        *(arrays[name][:20] for name in ("query", "key", "value")),
        cu_seqlens=arrays["query_start_loc"],
        causal=True,
        window=work.spec.window,
        sinks=arrays.get("sinks"),
        return_lse=True,
    )
    tokens = {name: arrays[name][:20] for name in ("query", "key", "value", "grad_out")}
    arrays |= tokens | {"out": out, "lse": lse}
    results = {"out": out, "lse": lse.T, **gradients}
    errors = backward.max_errors(results, arrays, case, work.score)
    assert max(errors.values()) < backward.TOLERANCE
