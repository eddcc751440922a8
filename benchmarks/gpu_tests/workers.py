"""A plugin for pytest, of `python -m benchmarks gpu-tests`: a GPU a worker, and tests until time is up."""

import collections
import json
import os
import pathlib
import time

import pytest

OUTCOMES = ("passed", "failed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `gpu_tests` says to pytest."""
    parser.addoption(
        "--gpus", default="", help="a comma between them; worker n sees the n-th alone, in turns"
    )
    parser.addoption("--outcomes", help="file that each test's outcome is written to when it has one")
    parser.addoption("--done", help="such a file of runs before, whose tests are left out")
    parser.addoption("--left", help="file that is there behind the run if some test was not begun")
    parser.addoption("--until", type=float, default=float("inf"), help="no test begins later, in Unix time")


def pytest_configure(config: pytest.Config) -> None:
    """Comes before anything asks for devices: those that CUDA shows are fixed from then on."""
    gpus = config.getoption("gpus").split(",")
    if hasattr(config, "workerinput"):
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        if gpus != [""]:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    elif config.getoption("outcomes"):
        config.pluginmanager.register(Recorder(pathlib.Path(config.getoption("outcomes"))))


@pytest.hookimpl(trylast=True)  # after pytest has chosen by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has an outcome."""
    if config.getoption("done"):
        done = outcomes_in(pathlib.Path(config.getoption("done")))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """When time is up a test passes by without an outcome."""
    if time.time() < item.config.getoption("until"):
        return None
    pathlib.Path(item.config.getoption("left")).touch()
    return True


class Recorder:
    """Writes a line a test, in the process that all outcomes come to: what is done stays so if that ends."""

    def __init__(self, file: pathlib.Path):
        self.file, self.worst = file, dict[str, str]()
        self.seconds = collections.defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of setup, call and end of a test, which fails with any of them, or of the end of its worker."""
        before = self.worst.get(report.nodeid, "passed")
        self.worst[report.nodeid] = max(before, report.outcome, key=["passed", "skipped", "failed"].index)
        self.seconds[report.nodeid] += report.duration
        if report.when not in ("setup", "call"):
            with self.file.open("a") as lines:
                outcome, took = self.worst.pop(report.nodeid), round(self.seconds.pop(report.nodeid), 1)
                lines.write(json.dumps({"test": report.nodeid, "outcome": outcome, "took": took}) + "\n")


def outcomes_in(file: pathlib.Path) -> dict[str, str]:
    """Test -> its last outcome, of a file that Recorder wrote to."""
    rows = map(json.loads, file.read_text().splitlines())
    return {row["test"]: row["outcome"] for row in rows if "test" in row}
