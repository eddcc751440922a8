"""pytest plugin of `python -m benchmarks gpu-tests`: one GPU per worker, a time limit, recorded outcomes."""

import collections
import json
import os
import pathlib
import time

import pytest

OUTCOMES = ("passed", "failed", "skipped")
MAX_ERROR = 2000  # characters from the end of an error that are recorded


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `gpu_tests` passes to pytest."""
    parser.addoption(
        "--gpus", default="", help="Comma-separated GPUs. Worker n sees only GPU n modulo their number."
    )
    parser.addoption("--outcomes", help="File to which each test's outcome is appended.")
    parser.addoption("--done", help="File with outcomes of earlier calls, whose tests are deselected.")
    parser.addoption("--left", help="File that is created if a test was not started for lack of time.")
    parser.addoption(
        "--until", type=float, default=float("inf"), help="Unix time after which no test starts."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the worker's GPU, before anything initializes CUDA, or register the recorder of outcomes."""
    gpus = config.getoption("gpus").split(",")
    if hasattr(config, "workerinput"):
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        if gpus != [""]:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    elif config.getoption("outcomes"):
        config.pluginmanager.register(Recorder(pathlib.Path(config.getoption("outcomes"))))


@pytest.hookimpl(trylast=True)  # after pytest's selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that have an outcome."""
    if config.getoption("done"):
        done = read_outcomes(pathlib.Path(config.getoption("done")))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Skip a test without an outcome once the time is up."""
    if time.time() < item.config.getoption("until"):
        return None
    pathlib.Path(item.config.getoption("left")).touch()
    return True


class Recorder:
    """Writer of a file with a line per test, in the process that receives all outcomes.

    A line is written as soon as its test ends, so an interrupted run keeps its outcomes and their errors.
    """

    def __init__(self, file: pathlib.Path):
        self.file, self.worst_outcomes = file, dict[str, str]()
        self.seconds = collections.defaultdict[str, float](float)
        self.errors = dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Combine the reports of a test's setup, call and teardown, and write its outcome after the last one.

        A test whose worker ends has only a report of another kind and is written at once.
        """
        outcome = self.worst_outcomes.get(report.nodeid, "passed")
        outcome = max(outcome, report.outcome, key=["passed", "skipped", "failed"].index)
        self.worst_outcomes[report.nodeid] = outcome
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.errors.setdefault(report.nodeid, report.longreprtext[-MAX_ERROR:])
        if report.when not in ("setup", "call"):
            with self.file.open("a") as lines:
                self.worst_outcomes.pop(report.nodeid)
                seconds = round(self.seconds.pop(report.nodeid), 1)
                row = {"test": report.nodeid, "outcome": outcome, "took": seconds}
                if report.nodeid in self.errors:
                    row["error"] = self.errors.pop(report.nodeid)
                lines.write(json.dumps(row) + "\n")


def read_outcomes(file: pathlib.Path) -> dict[str, str]:
    """Read a file that Recorder wrote and return test -> last outcome."""
    rows = map(json.loads, file.read_text().splitlines())
    return {row["test"]: row["outcome"] for row in rows if "test" in row}
