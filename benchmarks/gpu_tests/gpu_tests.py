"""Run the tests marked `gpu` and append a row to benchmarks/results/gpu-tests.jsonl: `make test-gpu`."""

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

from benchmarks.gpu_tests.workers import OUTCOMES, read_outcomes
from benchmarks.runner import RESULTS

ROOT = pathlib.Path(__file__).parents[2]
GPU_TESTS = "gpu-tests.jsonl"
NAME_DEVICES = "import jax; [print(device.device_kind) for device in jax.devices()]"
# Workers share a GPU, so none preallocates its memory, and numpy's matrix products use one core per worker.
# Nothing is timed here, so XLA does not autotune.
ENVIRONMENT = {
    "JATTN_TEST_GPU": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
SAME_RUN = ("commit", "gpu", "gpus", "driver", "jax", "jaxlib")
NO_TESTS = 5  # pytest's exit status
INCOMPLETE = 75  # exit status if nothing failed and some tests were not run yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks gpu-tests`."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=4,
        help="Number of worker processes, distributed over the GPUs. Default: 4.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="Seconds after which no test starts. Default: no limit.",
    )
    parser.add_argument(
        "--outcomes",
        type=pathlib.Path,
        help="File of each test's outcome. Call again with the same file to run the tests that are left.",
    )
    parser.add_argument("--commit", help="Commit to record for a tree that is not a git checkout.")


def main(arguments: argparse.Namespace) -> None:
    """Run the tests, append the row, and exit with pytest's status.

    With a time limit, several calls on the same commit and kind of machine make up a run: tests that have an
    outcome in the file are not run again, and the call that leaves no test writes the row. On a machine with
    several GPUs the few tests marked `gpus` run first, with all of them; then each worker sees one GPU.
    """
    start, run = time.monotonic(), describe_run(arguments.commit, arguments.outcomes)
    modules = find_gpu_test_modules()
    if not modules:
        sys.exit(NO_TESTS)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        outcomes = (arguments.outcomes or scratch / "outcomes").absolute()  # pytest runs in the tree
        earlier_seconds = open_outcomes(outcomes, run)
        left, until = scratch / "left", time.time() + arguments.seconds
        statuses = []
        for index, options in enumerate(pytest_passes(run["gpus"], arguments.jobs)):
            done = shutil.copy(outcomes, scratch / f"done{index}")  # a snapshot: the tests append to outcomes
            files = [f"--outcomes={outcomes}", f"--done={done}", f"--left={left}", f"--until={until}"]
            statuses.append(run_pytest([*options, *files, *modules]))
        seconds = round(time.monotonic() - start)
        append({"seconds": seconds}, outcomes)
        status, test_outcomes = worst_status(statuses), list(read_outcomes(outcomes).values())
        is_complete = not left.exists()
    if status not in (0, 1, NO_TESTS) or (is_complete and not test_outcomes):  # interrupted or none collected
        sys.exit(status)
    if not is_complete:
        print(
            f"{len(test_outcomes)} tests have an outcome. Call again with the same --outcomes for the others."
        )
        sys.exit(1 if status == 1 else INCOMPLETE)
    counts = {outcome: test_outcomes.count(outcome) for outcome in OUTCOMES}
    row = {"date": datetime.date.today().isoformat(), **run, **counts, "seconds": earlier_seconds + seconds}
    append(row, RESULTS / GPU_TESTS)
    sys.exit(int(counts["failed"] > 0))


def describe_run(commit: str | None, outcomes: pathlib.Path | None) -> dict[str, Any]:
    """Return the commit, GPUs and versions, which are the same for all calls of a run."""
    names = output_lines(sys.executable, "-c", NAME_DEVICES)
    return {
        "commit": commit or current_commit(ROOT, outcomes),
        "gpu": names[0] if names else None,
        "gpus": len(names),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **{package: importlib.metadata.version(package) for package in ("jax", "jaxlib")},
    }


def open_outcomes(outcomes: pathlib.Path, run: dict[str, Any]) -> int:
    """Create the file of outcomes if it does not exist, and return the seconds of earlier calls.

    Args:
        outcomes: File of outcomes.
        run: Description of the run.

    Raises:
        SystemExit: The file belongs to another run.
    """
    if not outcomes.exists():
        append(run, outcomes)
        return 0
    recorded_run, *rows = map(json.loads, outcomes.read_text().splitlines())
    if recorded_run != run:
        raise SystemExit(
            f"{outcomes} has outcomes of {recorded_run}, but this run is {run}. Use another file."
        )
    return sum(row.get("seconds", 0) for row in rows)


def find_gpu_test_modules() -> list[str]:
    """Return the test modules that use the mark. Others may import packages that the machine lacks."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in modules if "pytest.mark.gpu" in path.read_text()]


def pytest_passes(gpus: int, jobs: int) -> list[list[str]]:
    """Return the options of each pytest process.

    Args:
        gpus: Number of GPUs of the machine.
        jobs: Number of worker processes.
    """
    workers = ["-n", str(jobs), "--dist", "worksteal"]
    if gpus < 2:
        return [["-m", "gpu", *workers]]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return [["-m", "gpu and gpus"], ["-m", "gpu and not gpus", *workers, "--gpus", visible]]


def run_pytest(options: list[str]) -> int:
    """Run pytest and return its exit status."""
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu_tests.workers", "-vv", *options]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def worst_status(statuses: list[int]) -> int:
    """Return the worst of pytest's exit statuses; NO_TESTS only if no process had tests."""
    return max((status for status in statuses if status != NO_TESTS), default=NO_TESTS)


def complete_runs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the complete runs, in the order of their last rows.

    Old rows have a "part", `i/n`: n parts of the same commit on the same kind of machine add up to a run. A
    part that was run again replaces the earlier one. Runs with missing parts are left out.
    """
    runs: list[dict[str, Any]] = []
    open_runs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        part, _, parts = row.get("part", "1/1").partition("/")
        key = (*(row.get(name) for name in SAME_RUN), parts)
        run_parts = open_runs.setdefault(key, {})
        run_parts[part] = row
        if len(run_parts) == int(parts):
            part_rows = list(open_runs.pop(key).values())
            sums = {name: sum(part_row[name] for part_row in part_rows) for name in (*OUTCOMES, "seconds")}
            runs.append({name: value for name, value in (row | sums).items() if name != "part"})
    return runs


def current_commit(tree: pathlib.Path, outcomes: pathlib.Path | None = None) -> str | None:
    """Return the commit of a git checkout, with a + if files differ from it; None without a checkout.

    Args:
        tree: Directory of the checkout.
        outcomes: File of outcomes, whose changes do not count.
    """
    commit = first_line("git", "-C", str(tree), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    ignored = [f":!*{name}" for name in (GPU_TESTS, *(() if outcomes is None else (outcomes.name,)))]
    changes = first_line("git", "-C", str(tree), "status", "--porcelain", "--", ".", *ignored)
    return commit + "+" * (changes is not None)


def first_line(*command: str) -> str | None:
    """Return the first line that a command prints, or None if it prints nothing, fails or does not exist."""
    return next(iter(output_lines(*command)), None)


def output_lines(*command: str) -> list[str]:
    """Return the lines that a command prints, or none if it fails or does not exist."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return process.stdout.strip().splitlines()


def append(row: dict[str, Any], file: pathlib.Path) -> None:
    """Append a row to a file and print it."""
    line = json.dumps(row)
    print(line)
    with file.open("a") as rows:
        rows.write(line + "\n")
