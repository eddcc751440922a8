"""`make test-gpu` records the results of its run."""

import argparse
import json
import pathlib
import subprocess

import pytest

from benchmarks import runner
from benchmarks.gpu_tests import gpu_tests
from benchmarks.tables import pages

TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(5))
def test_passes(i): pass

@pytest.mark.gpu
def test_fails(): assert 1 == 2

@pytest.mark.gpu
def test_breaks_at_its_end(broken): pass

@pytest.mark.gpu
def test_skips(): pytest.skip("not today")

def test_is_for_no_gpu(): assert False
"""
TESTS_OF_TWO = """
import os, time
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(40))
def test_sees_its_worker_s(i):
    time.sleep(0.05)
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("GPU-a", "GPU-b", "GPU-a")[worker]

@pytest.mark.gpu
@pytest.mark.gpus
def test_sees_both(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
"""
CONFIG = (
    "[pytest]\naddopts = -q -p xdist -m 'not gpu'\nmarkers =\n    gpu: needs one\n    gpus: needs several\n"
)
PART = {"date": "2026-11-23", "commit": "abc", "gpu": "NVIDIA H200", "gpus": 1, "driver": None}
PART |= {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "passed": 5,
    "failed": 0,
    "skipped": 1,
    "seconds": 7,
    "part": "1/2",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree with its own tests and results."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "tests" / "test_other.py").write_text("import no_such_package")
    (tmp_path / "pytest.ini").write_text(CONFIG)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_tests, "NAME_DEVICES", "print('NVIDIA H200')")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis takes a second in each process
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))  # where the plugin is
    return tmp_path


def run(commit=None, jobs=2, seconds=float("inf"), outcomes=None):
    with pytest.raises(SystemExit) as exit:
        gpu_tests.main(argparse.Namespace(jobs=jobs, commit=commit, seconds=seconds, outcomes=outcomes))
    return exit.value.code


@pytest.mark.kernels
def test_row_counts_the_tests_of_all_workers(tree, capsys):
    assert run(commit="abc") == 1
    (row,) = map(json.loads, (tree / "gpu-tests.jsonl").read_text().splitlines())
    assert row["seconds"] > 0
    assert (row["gpu"], row["commit"]) == ("NVIDIA H200", "abc")
    assert (row["passed"], row["failed"], row["skipped"]) == (5, 2, 1)
    assert json.dumps(row) in capsys.readouterr().out
    line = pages.gpu_tests_line("gpu-tests.jsonl")
    assert f"last run {row['date']} at commit abc on an NVIDIA H200 (jax {row['jax']}, " in line
    assert "\n5 passed, 2 failed, 1 skipped, in " in line


@pytest.mark.kernels
def test_workers_share_the_gpus_and_multi_gpu_tests_see_all(tree, monkeypatch):
    (tree / "tests" / "test_it.py").write_text(TESTS_OF_TWO)
    monkeypatch.setattr(gpu_tests, "NAME_DEVICES", "print('NVIDIA H200\\nNVIDIA H200')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert run(jobs=3) == 0
    (row,) = map(json.loads, (tree / "gpu-tests.jsonl").read_text().splitlines())
    assert (row["gpus"], row["passed"], row["failed"], row["skipped"]) == (2, 41, 0, 0)
    assert " on 2 NVIDIA H200 (" in pages.gpu_tests_line("gpu-tests.jsonl")


@pytest.mark.kernels
def test_run_resumes_where_the_last_one_ended(tree, capfd):
    """The first call has no time for any test; before the second one, one test has passed and one has
    failed.
    """
    outcomes, row = tree / "outcomes", tree / "gpu-tests.jsonl"
    assert run(commit="abc", jobs=1, seconds=0, outcomes=outcomes) == 75
    assert "0 tests have an outcome" in capfd.readouterr().out
    with outcomes.open("a") as lines:
        for name, outcome in (("test_passes[4]", "passed"), ("test_passes[3]", "failed")):
            lines.write(json.dumps({"test": f"tests/test_it.py::{name}", "outcome": outcome}) + "\n")
    assert not row.exists()
    assert run(commit="abc", jobs=1, outcomes=outcomes) == 1
    out = capfd.readouterr().out
    errors = [json.loads(line).get("error", "") for line in outcomes.read_text().splitlines()]
    assert [end in "".join(errors) for end in ("assert 1 == 2", "RuntimeError: at the end")] == [True, True]
    assert "test_passes[2]" in out
    assert "test_passes[4]" not in out
    assert "\n4 passed, 3 failed, 1 skipped, in " in pages.gpu_tests_line("gpu-tests.jsonl")
    assert run(commit="abc", jobs=1, outcomes=outcomes) == 1  # no test is left, so the row is repeated
    assert len(row.read_text().splitlines()) == 2
    assert "outcomes of {'commit': 'abc'" in run(commit="other", outcomes=outcomes)


@pytest.mark.kernels
def test_crashed_worker_fails_its_test(tree):
    (tree / "tests" / "test_it.py").write_text(
        "import os, pytest\n@pytest.mark.gpu\ndef test_ends(): os._exit(1)\n"
        "@pytest.mark.gpu\ndef test_passes(): pass\n"
    )
    assert run(jobs=1) == 1
    (row,) = map(json.loads, (tree / "gpu-tests.jsonl").read_text().splitlines())
    assert (row["passed"], row["failed"]) == (1, 1)


def test_rerun_part_replaces_its_earlier_result():
    again, second_part = PART | {"passed": 6, "seconds": 9}, PART | {"part": "2/2"}
    modified_tree = PART | {"commit": "abc+", "part": "2/2"}
    (run,) = gpu_tests.complete_runs([PART, modified_tree, again, second_part])
    assert (run["passed"], run["skipped"], run["seconds"]) == (11, 2, 16)
    assert "part" not in run


def test_commit_is_marked_if_files_other_than_results_changed(tmp_path):
    git = lambda *words: subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    git("init", "-q")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(*identity, "commit", "-q", "--allow-empty", "-m", "first")
    clean = gpu_tests.current_commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu-tests.jsonl").touch()
    assert gpu_tests.current_commit(tmp_path) == clean
    outcomes = tmp_path / "outcomes"
    outcomes.touch()
    assert gpu_tests.current_commit(tmp_path, outcomes) == clean  # so that a second call accepts its own file
    assert gpu_tests.current_commit(tmp_path) == clean + "+"
    (tmp_path / "new.py").touch()
    assert gpu_tests.current_commit(tmp_path, outcomes) == clean + "+"
