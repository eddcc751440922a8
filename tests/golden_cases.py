"""Test parameters from numeric cases recorded with vLLM."""

import json
import pathlib

import pytest

CASES = json.loads((pathlib.Path(__file__).parent / "golden" / "metadata_cases.json").read_text())["cases"]


def golden(name):
    """Return a decorator that parametrizes `case` with the items of the case group `name`."""
    items = CASES[name]["items"]
    return pytest.mark.parametrize(
        "case", [pytest.param(item, id=str(item.get("name", i))) for i, item in enumerate(items)]
    )
