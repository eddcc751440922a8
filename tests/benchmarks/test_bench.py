"""What `make bench` runs: every suite that writes rows of its own."""

import argparse
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.__main__ import SUITES, main, suite
from benchmarks.kernels import prefill
from benchmarks.mesh import processes, scaling_model
from benchmarks.mesh.steps import agreement
from benchmarks.models import graphs, load, step_profile
from benchmarks.serving import engine_model, engine_steps, serve
from pallas_kernels.cases import PrefillCase
from pallas_kernels.varlen_prefill import reference
from tests.serving.server.live_server import small_engine

ROOT = pathlib.Path(__file__).parents[2]
# What needs torch, a search for sizes, models of machines, ten minutes of clients, tests on a GPU, the pages.
STEPS = "step_1x32", "step_3x64", "step_2x24_prompt"  # of the suite mesh, small
OTHERS = {"backward-peers", "tune", "engine-model", "scaling-model", "crowds", "gpu-tests", "table"}


def test_make_bench_runs_every_suite_as_one():
    makefile = (ROOT / "Makefile").read_text()
    ((suites, command),) = re.findall(
        r"^bench:.*\n\tfor suite in ([a-z0-9 ]+); do (.*)$", makefile, re.MULTILINE
    )
    assert sorted(suites.split()) == sorted(SUITES.keys() - OTHERS)
    assert command == "$(PYTHON) -m benchmarks $$suite || exit 1; done"


@pytest.mark.kernels
def test_a_server_and_its_engine_are_measured_alike(tmp_path, monkeypatch):
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
        share = row["first_token_outside_engine_ms_mean"]  # of the requests' own time to the first token
        assert 0 < share < row["server_time_to_first_token_ms_mean"]
        assert row["engine_again_time_to_first_token_ms_p50"] > 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["benchmarks", "serve", "--draw", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", [*command, "--plot", str(tmp_path / "rows.svg")])
    main()
    assert (tmp_path / "rows.svg").stat().st_size > 1000


@pytest.mark.slow
def test_a_server_is_measured_small_before_a_gpu_is_asked_for(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "serve", "--small", "--out", str(tmp_path)]
    subprocess.run([*command, "--plot", str(tmp_path / "rows.svg")], cwd=ROOT, check=True)
    (file,) = tmp_path.glob("serve-small-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["num_prompts"] for row in rows] == [4, 16, 32, 32]
    assert (tmp_path / "rows.svg").stat().st_size > 1000


def two_requests(run=0):
    return [[1] * 5, [2] * 3], [3, 2]


def test_a_modelled_step_takes_what_its_bucket_and_its_keys_take(monkeypatch):
    """8 prompt tokens (6 of them fit the budget); then what is left beside a decode, and decodes alone."""
    monkeypatch.setattr(engine_model, "nano_workload", two_requests)
    costs = engine_model.Costs(((1, 1000.0), (3, 3000.0)), key=1.0, token=100.0, step=10.0)
    row = engine_model.simulate(costs, 6, engine_model.unpadded_bucket)
    steps = (600 + 10, 300 + 6 + 10, 2000 + 7 + 4 + 10)  # a decode beside two tokens; both decode
    assert row == {
        "s": round(sum(steps) / 1e3, 2),
        "tokens_per_s": round(5 / sum(steps) * 1e3),
        "s_with_prompts": 0.93,
        "steps_with_prompts": 2,
        "steps": 3,
    }


def test_steps_of_the_workload_are_told_by_bucket(monkeypatch):
    monkeypatch.setattr(engine_steps, "nano_workload", two_requests)
    engine = small_engine()
    row = engine_steps.step_times_by_bucket(engine)
    ((kind, (steps, ms, waited, expected)),) = row["by_bucket"].items()
    assert (kind, steps) == ("4+64", 4.0)  # three that run, one that reads
    assert 0 < waited < ms
    assert expected > 0
    assert row["s"] == pytest.approx(ms / 1e3, abs=1e-3)
    assert not engine.has_unfinished_requests()
    assert "choose" not in vars(engine.graphs)  # nothing watches any longer


@pytest.mark.skipif(not load.CLEAR.exists(), reason="writes /proc")
def test_a_made_checkpoint_is_loaded_and_held_against_its_files(tmp_path, monkeypatch):
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


def test_every_id_is_a_word_of_its_own():
    tokenizer = serve.word_tokenizer(1000)
    assert tokenizer.decode([7, 999, 0]) == " 7 999 0"


@pytest.mark.parametrize(("options", "case"), [([], "ready"), (["--all"], "start")])
def test_a_start_is_measured_in_two_processes_that_keep_executables_in_one_folder(monkeypatch, options, case):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "starts", "--out", "rows", *options])
    main()
    (first, _), second = commands
    assert (first, True) == second
    assert first[1:6] == ["-m", "benchmarks", "engine", case, "--cache-dir"]
    assert first[7:] == ["--out", "rows"]
    suite("engine").add_arguments(parser := argparse.ArgumentParser())
    assert parser.parse_args(first[4:]).cases == [case]


def agreement_of(change):
    expected = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    logits = change(expected)
    return agreement(logits, logits.argmax(axis=-1), expected)


def test_a_step_on_a_mesh_is_held_to_one_device_s():
    assert agreement_of(lambda expected: expected) == {"error": 0.0, "token_gap": 0.0, "same_tokens": 1.0}
    with pytest.raises(SystemExit, match=r"logits are 1\.\d+, .* off one device's: no rows"):
        agreement_of(lambda expected: expected[::-1])  # each request has the other's


@pytest.mark.kernels
def test_a_mesh_is_measured_beside_one_device(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "mesh", "--small", "--peer-memory", "--out", str(tmp_path)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    splits = [(row["name"], row["split"], row.get("merge")) for row in rows if "split" in row]
    merges = [("keys", merge) for merge in ("all_gather", "all_reduce", "reduce_scatter", "peer_memory")]
    decode, whole = ("attention_2x128", "attention_1x256"), [("none", None), ("heads", None)]
    expected = [(name, *how) for name in decode for how in (*whole, *merges)]
    assert splits == expected + [("prompt_96", *how) for how in (*whole, ("keys", None))]
    sums = [what + behind for behind in ("", "_norm") for what in ("sum", "all_reduce", "two_shots")]
    expected = [f"{what}_{rows}x64" for rows in (1, 2) for what in sums]
    assert [row["name"] for row in rows if "bytes" in row] == expected
    steps = [(row["name"], row["tp"], row["sums"]) for row in rows if "step_us" in row and "tp" in row]
    how = (1, "psum"), (2, "psum"), (2, "all_reduce")
    expected = [(name, *one) for one in how for name in STEPS]
    assert steps == expected + [("decode_loop_3x48", *one) for one in how]
    loops = [(row["steps"], row["sums"]) for row in rows if row["name"] == "loop_3x48"]
    assert loops == [(2 * part, "all_reduce") for part in range(1, 11)]
    assert all(row["error"] < 0.05 for row in rows if "error" in row)
    nano = [row["name"] for row in rows if row.get("tokens_per_s", 0) > 0]
    assert nano == ["nano_bench_first", "nano_bench", "nano_bench_again"]
    (large,) = [row for row in rows if row["name"].startswith("large")]
    assert (large["name"], large["sums"], large["executables"]) == ("large_3x64", "all_reduce", 1)
    assert large["gb_per_s"] > 0


@pytest.mark.kernels
@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_are_measured_with_a_process_a_device(cp, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "mesh", "steps", "--small", "--peer-memory"]
    command += ["--processes", "2", "--cp", str(cp), "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]  # one process writes
    how = (1, "psum"), (2, "psum"), (2, "all_reduce")
    expected = [(name, *one, 2) for one in how for name in STEPS]
    found = [(row["name"], row["tp"] * row.get("cp", 1), row["sums"], row["processes"]) for row in rows]
    assert found == expected
    assert all(("cp" in row) == (cp == 2 and row["tp"] * row.get("cp", 1) == 2) for row in rows)
    assert all(row["error"] < 0.05 for row in rows if "error" in row)


@pytest.mark.kernels
@pytest.mark.slow
def test_other_cases_are_measured_with_a_process_a_device(tmp_path):
    """A model larger than one device is measured on several layouts."""
    command = [sys.executable, "-m", "benchmarks", "mesh", "attention", "prompt", "loop", "large"]
    command += ["--small", "--peer-memory", "--stall", "600", "--processes", "2", "--cp", "1", "2"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=1200)
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    splits = [row["split"] for row in rows if "split" in row]
    assert splits == ["none", "heads", *["keys"] * 4, "none", "heads", "keys"]
    assert [row["steps"] for row in rows if row["name"] == "loop_3x48"] == list(range(2, 21, 2))
    large = [(row["tp"], row.get("cp"), row["sums"]) for row in rows if row["name"] == "large_3x64"]
    assert large == [(2, None, "all_reduce"), (1, 2, "all_reduce")]
    assert all(row["processes"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "3"], "2 devices are no equal parts of 3 processes: no rows"),
        (["--devices", "1", "--cp", "1", "3"], "1 devices are no equal parts of 3 ranks: no rows"),
        (["--devices", "1", "--no-nccl"], "--no-nccl needs --peer-memory: no rows"),
        (
            ["--processes", "2", "nano"],
            r"\['nano'\] are no cases of several processes \(attention, .*, large\): no rows",
        ),
    ],
)
def test_processes_that_cannot_measure_end(options, message):
    suite("mesh").add_arguments(parser := argparse.ArgumentParser())
    with pytest.raises(SystemExit, match=message):
        suite("mesh").main(parser.parse_args(options))


def test_a_process_that_fails_ends_the_others(monkeypatch):
    """Which would wait for it."""
    one = "import sys, time; time.sleep(99 * (sys.argv[-1] != '1')); sys.exit(3)"
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", one))
    suite("mesh").add_arguments(parser := argparse.ArgumentParser())
    with pytest.raises(SystemExit, match=r"processes ended with \[None, 3\]: no more rows"):
        suite("mesh").main(parser.parse_args(["--processes", "2"]))


def test_idle_time_is_told_by_what_ran_before_and_behind():
    row = step_profile.sum_by_name(
        [(0.0, 10.0, "a"), (5.0, 3.0, "b"), (20.0, 10.0, "c"), (34.0, 2.0, "a")], 2
    )
    assert row["kernels_us"] == {"a": (6.0, 1.0), "c": (5.0, 0.5), "b": (1.5, 0.5), "others": (0.0, None)}
    assert (row["busy_us"], row["idle_us"]) == (11.0, 7.0)
    assert row["gaps_us"] == {"a > c": (5.0, 0.5), "c > a": (2.0, 0.5)}


class SlowStart:
    """A clock, and calls of 2 ms on a device that waits 50 ms for the first, which its host prepares."""

    def __init__(self):
        self.now = self.idle_from = 0.0

    def perf_counter(self):
        return self.now

    def call(self, caches):
        self.now += 1e-4 if self.idle_from > self.now else 0.05
        self.idle_from = max(self.now, self.idle_from) + 2e-3
        return np.zeros(1), caches

    def wait(self, out):
        self.now = max(self.now, self.idle_from)
        return out


def test_calls_in_flight_are_timed_without_what_the_first_one_waits_for(monkeypatch):
    start = SlowStart()
    monkeypatch.setattr(graphs, "time", start)
    monkeypatch.setattr(graphs.jax, "block_until_ready", start.wait)
    call = graphs.Call(start.call, None)
    assert graphs.seconds_in_flight(call, 10) == pytest.approx(0.05 + 10 * 2e-3)
    taken = [graphs.seconds_in_flight(call, count) for count in (10, 30)]
    assert (taken[1] - taken[0]) / 20 == pytest.approx(2e-3)
    monkeypatch.setattr(graphs, "polled_seconds", lambda call, rounds: [0.0])
    assert graphs.call_times(call, rounds=10)["in_flight_us"] == pytest.approx(2000)


@pytest.mark.parametrize(("gpus", "sums"), [(1, "psum"), (2, "all_reduce")])
def test_the_plan_for_more_gpus_begins_with_what_two_took(gpus, sums):
    model = scaling_model.Model.measured()
    rows = map(
        json.loads, (ROOT / "benchmarks" / "results" / scaling_model.MEASURED).read_text().splitlines()
    )
    is_one = lambda row: row["name"].startswith("step_") and (row["tp"], row["sums"]) == (gpus, sums)
    steps = [row for row in rows if is_one(row)]
    assert len(steps) == 3
    for row in steps:
        requests, context = map(int, row["name"].removeprefix("step_").split("x"))
        assert model.step_us(gpus, requests, context) == pytest.approx(row["step_us"])


def test_measured_rows_are_compared_with_the_calculation(capsys):
    (file,) = (ROOT / "benchmarks" / "results").glob("mesh-four-*.jsonl")
    suite("scaling-model").add_arguments(parser := argparse.ArgumentParser())
    suite("scaling-model").main(parser.parse_args(["--compare", str(file)]))
    lines = capsys.readouterr().out.splitlines()
    assert "| step_64x4096 | tp 4, cp 1 | one | 5875.9 | 5873.6 | 1.00 |  |" in lines
    assert "| step_1x1024 | tp 4, cp 1 | one | 3743.3 | 2454.4 | 1.53 | off |" in lines
    assert "| attention, 8 x 128k, by heads | >= 7.5 | 3.93 |" in lines


def test_the_page_has_the_plan():
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert scaling_model.table(scaling_model.Model.measured()) in page


def test_prefill_is_held_to_the_size_of_each_token_s_output():
    """Behind many keys outputs are small: one of zeros is all wrong there, too."""
    case = PrefillCase(
        name="few", q_heads=2, kv_heads=1, head_dim=64, query_lens=(3, 4), context_lens=(1000, 0)
    )
    work = prefill.default_work(case, 16, "plain")
    arrays = prefill.inputs(work)
    table, lens = np.asarray(arrays["block_table"]), case.seq_lens
    kv = [arrays[name][table] for name in ("key", "value")]
    k, v = ([x[r].reshape(-1, 1, 64)[: lens[r]] for r in range(2)] for x in kv)
    of = functools.partial(reference.attend_request, scale=64**-0.5)
    queries = jnp.split(arrays["query"][:7], [3])
    right = np.concatenate([of(*request) for request in zip(queries, k, v, strict=True)])
    assert prefill.max_error(right, arrays, work) < 1e-4
    assert prefill.max_error(np.zeros_like(right), arrays, work) == 1
