"""Runs the tests marked gpu and appends a row to benchmarks/results/gpu-tests.jsonl: `make test-gpu`."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from typing import Any

from benchmarks.gpu_workers import part_of
from benchmarks.recorded import RESULTS

ROOT = pathlib.Path(__file__).parents[1]
GPU_TESTS = "gpu-tests.jsonl"
NAME_DEVICES = "import jax; [print(device.device_kind) for device in jax.devices()]"
# Each worker takes what GPU memory it needs, not most of it, and one core for numpy's products, not all.
ENVIRONMENT = {"JATTN_TEST_GPU": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1"}
SAME_RUN = ("commit", "gpu", "gpus", "driver", "jax", "jaxlib")
OUTCOMES = ("passed", "failed", "skipped")
NO_TESTS = 5  # pytest's exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks gpu-tests` takes."""
    parser.add_argument("--jobs", type=int, default=4, help="worker processes, spread over the GPUs")
    parser.add_argument(
        "--part", default="1/1", help="i/n: each n-th test function; rows of n parts are a run"
    )
    parser.add_argument("--commit", help="of a tree that is no git checkout")


def main(arguments: argparse.Namespace) -> None:
    """Runs all of them, or a part, appends and prints the row; exits as pytest did.

    On a machine with several GPUs each worker sees one of them, and tests marked gpus come after.
    """
    start = time.monotonic()
    _, parts = part_of(arguments.part)
    names = lines_of(sys.executable, "-c", NAME_DEVICES)
    passes = passes_on(len(names), arguments.jobs)
    modules = modules_of_gpus()
    if not modules:
        sys.exit(NO_TESTS)
    with tempfile.TemporaryDirectory() as folder:
        reports = [pathlib.Path(folder) / f"{number}.xml" for number in range(len(passes))]
        statuses = [
            tests_run([*words, "--part", arguments.part, f"--junit-xml={report}", *modules])
            for words, report in zip(passes, reports, strict=True)
        ]
        status = worst_of(statuses)
        if status not in (0, 1):  # interrupted, nothing collected: no run to speak of
            sys.exit(status)
        counts = added([counted(report.read_text()) for report in reports])
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit or commit_of(ROOT),
        "gpu": names[0] if names else None,
        "gpus": len(names),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **{package: importlib.metadata.version(package) for package in ("jax", "jaxlib")},
        **counts,
        "seconds": round(time.monotonic() - start),
        **({"part": arguments.part} if parts > 1 else {}),
    }
    append(row, RESULTS / GPU_TESTS)
    sys.exit(status)


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
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu_workers", "-vv", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def worst_of(statuses: list[int]) -> int:
    """Of several exit statuses of pytest; to have no tests is bad where none had any."""
    return max((status for status in statuses if status != NO_TESTS), default=NO_TESTS)


def added(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many tests had which outcome in all of them together."""
    return {outcome: sum(row[outcome] for row in rows) for outcome in OUTCOMES}


def runs_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole runs, in the order of their last rows: parts of one commit on one machine add up to a run.

    A part that was run again counts as it was then; parts of which others are missing are no run yet.
    """
    runs: list[dict[str, Any]] = []
    open_runs: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        part, parts = part_of(row.get("part", "1/1"))
        key = (*(row.get(name) for name in SAME_RUN), parts)
        found = open_runs.setdefault(key, {})
        found[part] = row
        if len(found) == parts:
            whole = list(open_runs.pop(key).values())
            run = row | added(whole) | {"seconds": sum(row["seconds"] for row in whole)}
            runs.append({name: value for name, value in run.items() if name != "part"})
    return runs


def counted(report: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped by pytest's JUnit report, of all workers.

    A test that passed and whose fixture then broke has failed.
    """
    outcomes: dict[tuple[str | None, str | None], str] = {}
    for case in xml.etree.ElementTree.fromstring(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        key = (case.get("classname"), case.get("name"))
        if outcomes.get(key) != "failed":
            outcomes[key] = outcome
    return {name: sum(x == name for x in outcomes.values()) for name in OUTCOMES}


def commit_of(tree: pathlib.Path) -> str | None:
    """The commit checked out, with a + where files differ from it; None where git knows of none."""
    commit = first_line("git", "-C", str(tree), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changes = first_line("git", "-C", str(tree), "status", "--porcelain", "--", ".", f":!*{GPU_TESTS}")
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
