"""A plugin for pytest, of `python -m benchmarks gpu-tests`: a GPU for each worker, a part of the tests."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `gpu_tests` says to pytest."""
    parser.addoption(
        "--gpus", default="", help="a comma between them; worker n sees the n-th alone, in turns"
    )
    parser.addoption("--part", default="1/1", help="i/n: of the test functions, in their order, each n-th")


def pytest_configure(config: pytest.Config) -> None:
    """Comes before anything asks for devices: those that CUDA shows are fixed from then on."""
    gpus = config.getoption("gpus").split(",")
    if gpus != [""] and hasattr(config, "workerinput"):
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


@pytest.hookimpl(trylast=True)  # after pytest has chosen by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deals functions out, not cases of them: those share what they compile."""
    part, parts = part_of(config.getoption("part"))
    functions: dict[str, int] = {}
    for item in items:
        functions.setdefault(item.nodeid.split("[")[0], len(functions))
    others = [item for item in items if functions[item.nodeid.split("[")[0]] % parts != part - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def part_of(text: str) -> tuple[int, int]:
    """`i/n` as numbers.

    Raises:
        ValueError: It is no part of a whole.
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"part must be i/n with 1 <= i <= n, got {text}.")
    return int(part), int(parts)
