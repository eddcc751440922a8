"""The page about benchmark results names exactly the files that exist."""

import pathlib
import re

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_page_names_every_file_and_no_other():
    first_columns = (
        row.split("|")[1] for row in (RESULTS / "README.md").read_text().split("\n") if row[:1] == "|"
    )
    named = {name for column in first_columns for name in re.findall(r"`([\w-]+)`", column)}
    files = {
        re.sub(r"(-nvidia-h\d+\w*(-80gb-hbm3)?)?(-\d{4}-\d\d-\d\d)?$", "", file.stem)
        for file in RESULTS.glob("*.jsonl")
    }
    assert {name.removesuffix("-cpu") for name in named} == {name.removesuffix("-cpu") for name in files}
