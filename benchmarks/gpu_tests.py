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

from benchmarks.recorded import RESULTS

ROOT = pathlib.Path(__file__).parents[1]
GPU_TESTS = "gpu-tests.jsonl"
NAME_DEVICE = "import jax; print(jax.devices()[0].device_kind)"
# Each worker takes what GPU memory it needs, not most of it.
ENVIRONMENT = {"JATTN_TEST_GPU": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks gpu-tests` takes."""
    parser.add_argument("--jobs", type=int, default=4, help="worker processes")
    parser.add_argument("--commit", help="of a tree that is no git checkout")


def main(arguments: argparse.Namespace) -> None:
    """Runs all of them, appends and prints the row; exits as pytest did."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-vv", "-m", "gpu", f"--junit-xml={report}"),
            *("-n", str(arguments.jobs), "--dist", "worksteal"),
        ]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode
        if status not in (0, 1):  # interrupted, nothing collected: no run to speak of
            sys.exit(status)
        counts = counted(report.read_text())
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit or commit_of(ROOT),
        "gpu": first_line(sys.executable, "-c", NAME_DEVICE),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **{package: importlib.metadata.version(package) for package in ("jax", "jaxlib")},
        **counts,
        "seconds": round(time.monotonic() - start),
    }
    append(row, RESULTS / GPU_TESTS)
    sys.exit(status)


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
    return {name: sum(x == name for x in outcomes.values()) for name in ("passed", "failed", "skipped")}


def commit_of(tree: pathlib.Path) -> str | None:
    """The commit checked out, with a + where files differ from it; None where git knows of none."""
    commit = first_line("git", "-C", str(tree), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changes = first_line("git", "-C", str(tree), "status", "--porcelain", "--", ".", f":!*{GPU_TESTS}")
    return commit + "+" * (changes is not None)


def first_line(*command: str) -> str | None:
    """The first line that a command prints; None where it prints nothing, fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def append(row: dict[str, Any], file: pathlib.Path) -> None:
    """Adds the row to the file, and prints it."""
    line = json.dumps(row)
    print(line)
    with file.open("a") as rows:
        rows.write(line + "\n")
