"""`make test-gpu` writes down what its run came to, whatever that was."""

import argparse
import json
import subprocess
import sys

import pytest

from benchmarks import gpu_tests, recorded, table

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
def test_fails(): assert False

@pytest.mark.gpu
def test_breaks_at_its_end(broken): pass

@pytest.mark.gpu
def test_skips(): pytest.skip("not today")

def test_is_for_no_gpu(): assert False
"""
CONFIG = "[pytest]\naddopts = -q -m 'not gpu'\nmarkers =\n    gpu: needs one\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with tests of its own, and its results."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(CONFIG)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "RESULTS", tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_tests, "NAME_DEVICE", "print('NVIDIA H200')")
    return tmp_path


def run(commit=None):
    with pytest.raises(SystemExit) as exit:
        gpu_tests.main(argparse.Namespace(jobs=2, commit=commit))
    return exit.value.code


@pytest.mark.kernels
def test_a_row_counts_the_tests_of_all_workers(tree, capsys):
    assert run(commit="abc") == 1
    (row,) = map(json.loads, (tree / "gpu-tests.jsonl").read_text().splitlines())
    assert row["seconds"] > 0
    assert (row["gpu"], row["commit"]) == ("NVIDIA H200", "abc")
    assert (row["passed"], row["failed"], row["skipped"]) == (5, 2, 1)
    assert json.dumps(row) in capsys.readouterr().out
    line = table.gpu_tests_line("gpu-tests.jsonl")
    assert f"last run {row['date']} at commit abc on an NVIDIA H200 (jax {row['jax']}, " in line
    assert "\n5 passed, 2 failed, 1 skipped, in " in line


@pytest.mark.kernels
def test_a_run_without_tests_leaves_no_row(tree):
    (tree / "test_it.py").write_text("")
    assert run() == 5
    assert not (tree / "gpu-tests.jsonl").exists()


def test_a_tree_that_is_no_checkout_has_no_commit(tmp_path):
    assert gpu_tests.commit_of(tmp_path) is None


def test_changes_but_those_of_the_results_are_marked(tmp_path):
    git = lambda *words: subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    git("init", "-q")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(*identity, "commit", "-q", "--allow-empty", "-m", "first")
    clean = gpu_tests.commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu-tests.jsonl").touch()
    assert gpu_tests.commit_of(tmp_path) == clean
    (tmp_path / "new.py").touch()
    assert gpu_tests.commit_of(tmp_path) == clean + "+"


def test_what_no_command_can_say_is_none():
    assert gpu_tests.first_line("no-such-command") is None
    assert gpu_tests.first_line(sys.executable, "-c", "raise SystemExit(1)") is None
    assert gpu_tests.first_line(sys.executable, "-c", "print('a\\nb')") == "a"


def test_no_run_yet_is_said(tree):
    (tree / "gpu-tests.jsonl").touch()
    assert table.gpu_tests_line("gpu-tests.jsonl") == "No run of the GPU tests is recorded yet.\n"
