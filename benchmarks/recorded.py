"""The raw rows in benchmarks/results, as `python -m benchmarks` wrote them."""

import json
import pathlib
import re
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


def rows_of(file: str) -> list[dict[str, Any]]:
    """The rows of a file, in their order."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def date_of(file: str) -> str:
    """The day of the run that made a file, which its name ends with."""
    (date,) = re.findall(r"-(\d{4}-\d\d-\d\d)\.jsonl$", file)
    return date
