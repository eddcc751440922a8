"""Runs the tests marked gpu and appends a row to benchmarks/results/gpu-tests.jsonl: `make test-gpu`."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu_tests.workers import OUTCOMES, outcomes_in
from benchmarks.runner import RESULTS

ROOT = pathlib.Path(__file__).parents[2]
GPU_TESTS = "gpu-tests.jsonl"
NAME_DEVICES = "import jax; [print(device.device_kind) for device in jax.devices()]"
# Each worker takes what GPU memory it needs, not most of it, and one core for numpy's products, not all. What
# XLA makes beside our kernels is not timed here, so it need not try its own ways of a product out.
ENVIRONMENT = {
    "JATTN_TEST_GPU": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
SAME_RUN = ("commit", "gpu", "gpus", "driver", "jax", "jaxlib")
NO_TESTS = 5  # pytest's exit status
UNDONE = 75  # so far nothing failed, and not all was run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks gpu-tests` takes."""
    parser.add_argument("--jobs", type=int, default=4, help="worker processes, spread over the GPUs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no test begins after so long")
    parser.add_argument(
        "--outcomes", type=pathlib.Path, help="a file of each test's outcome: called again, go on from there"
    )
    parser.add_argument("--commit", help="of a tree that is no git checkout")


def main(arguments: argparse.Namespace) -> None:
    """Runs all of them, appends and prints the row; exits as pytest did.

    Where time is short, several calls on one commit and one kind of machine make a run: what has an outcome
    in the file is left out, and the row is written by the call that leaves nothing. On a machine with several
    GPUs each worker sees one of them, and tests marked gpus come after.
    """
    start, run = time.monotonic(), run_of(arguments.commit, arguments.outcomes)
    modules = modules_of_gpus()
    if not modules:
        sys.exit(NO_TESTS)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        outcomes = (arguments.outcomes or scratch / "outcomes").absolute()  # pytest runs in the tree
        seconds_before = begin(outcomes, run)
        left, until = scratch / "left", time.time() + arguments.seconds
        statuses = []
        for nth, words in enumerate(passes_on(run["gpus"], arguments.jobs)):
            done = shutil.copy(outcomes, scratch / f"done{nth}")  # workers read it while outcomes grows
            files = [f"--outcomes={outcomes}", f"--done={done}", f"--left={left}", f"--until={until}"]
            statuses.append(tests_run([*words, *files, *modules]))
        seconds = round(time.monotonic() - start)
        append({"seconds": seconds}, outcomes)
        status, found = worst_of(statuses), list(outcomes_in(outcomes).values())
        is_whole = not left.exists()
    if status not in (0, 1, NO_TESTS) or (is_whole and not found):  # interrupted, nothing collected
        sys.exit(status)
    if not is_whole:
        print(f"{len(found)} tests have an outcome, others are left: call again with the same --outcomes")
        sys.exit(1 if status == 1 else UNDONE)
    counts = {outcome: found.count(outcome) for outcome in OUTCOMES}
    row = {"date": datetime.date.today().isoformat(), **run, **counts, "seconds": seconds_before + seconds}
    append(row, RESULTS / GPU_TESTS)
    sys.exit(int(counts["failed"] > 0))


def run_of(commit: str | None, outcomes: pathlib.Path | None) -> dict[str, Any]:
    """What the calls that make a run agree in."""
    names = lines_of(sys.executable, "-c", NAME_DEVICES)
    return {
        "commit": commit or commit_of(ROOT, outcomes),
        "gpu": names[0] if names else None,
        "gpus": len(names),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **{package: importlib.metadata.version(package) for package in ("jax", "jaxlib")},
    }


def begin(outcomes: pathlib.Path, run: dict[str, Any]) -> int:
    """Makes the file of outcomes where there is none; the seconds of the calls before.

    Raises:
        SystemExit: It is of another run.
    """
    if not outcomes.exists():
        append(run, outcomes)
        return 0
    of_run, *rows = map(json.loads, outcomes.read_text().splitlines())
    if of_run != run:
        raise SystemExit(f"{outcomes} has outcomes of {of_run}, this is {run}: no tests")
    return sum(row.get("seconds", 0) for row in rows)


def modules_of_gpus() -> list[str]:
    """Test modules that name the mark; others may need packages that a machine with a GPU lacks."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in modules if "pytest.mark.gpu" in path.read_text()]


def passes_on(gpus: int, jobs: int) -> list[list[str]]:
    """What pytest is told in each of its runs on a machine with so many GPUs."""
    workers = ["-n", str(jobs), "--dist", "worksteal"]
    if gpus < 2:
        return [["-m", "gpu", *workers]]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return [["-m", "gpu and not gpus", *workers, "--gpus", visible], ["-m", "gpu and gpus"]]


def tests_run(words: list[str]) -> int:
    """Runs pytest, which prints each test's name; its exit status."""
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu_tests.workers", "-vv", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def worst_of(statuses: list[int]) -> int:
    """Of several exit statuses of pytest; to have no tests is bad where none had any."""
    return max((status for status in statuses if status != NO_TESTS), default=NO_TESTS)


def runs_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole runs, in the order of their last rows: parts of one commit on one machine add up to a run.

    Rows had parts, `i/n`, until a run could be several calls. A part that was run again counts as it was
    then; parts of which others are missing are no run.
    """
    runs: list[dict[str, Any]] = []
    open_runs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        part, _, parts = row.get("part", "1/1").partition("/")
        key = (*(row.get(name) for name in SAME_RUN), parts)
        found = open_runs.setdefault(key, {})
        found[part] = row
        if len(found) == int(parts):
            whole = list(open_runs.pop(key).values())
            sums = {name: sum(one[name] for one in whole) for name in (*OUTCOMES, "seconds")}
            runs.append({name: value for name, value in (row | sums).items() if name != "part"})
    return runs


def commit_of(tree: pathlib.Path, outcomes: pathlib.Path | None = None) -> str | None:
    """The commit checked out, with a + where files but a run's own differ; None where git knows of none."""
    commit = first_line("git", "-C", str(tree), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    own = [f":!*{name}" for name in (GPU_TESTS, *(() if outcomes is None else (outcomes.name,)))]
    changes = first_line("git", "-C", str(tree), "status", "--porcelain", "--", ".", *own)
    return commit + "+" * (changes is not None)


def first_line(*command: str) -> str | None:
    """The first line that a command prints; None where it prints nothing, fails or does not exist."""
    return next(iter(lines_of(*command)), None)


def lines_of(*command: str) -> list[str]:
    """The lines that a command prints; none where it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.strip().splitlines()


def append(row: dict[str, Any], file: pathlib.Path) -> None:
    """Adds the row to the file, and prints it."""
    line = json.dumps(row)
    print(line)
    with file.open("a") as rows:
        rows.write(line + "\n")
