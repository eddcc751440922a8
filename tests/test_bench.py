"""What `make bench` runs: every suite that writes rows of its own."""

import pathlib
import re

from benchmarks.__main__ import SUITES

ROOT = pathlib.Path(__file__).parents[1]
# A search for sizes, the tests on a GPU, and the pages.
OTHERS = {"tune", "gpu-tests", "table"}


def test_make_bench_runs_every_suite_as_one():
    makefile = (ROOT / "Makefile").read_text()
    ((suites, command),) = re.findall(
        r"^bench:.*\n\tfor suite in ([a-z ]+); do (.*)$", makefile, re.MULTILINE
    )
    assert sorted(suites.split()) == sorted(SUITES.keys() - OTHERS)
    assert command == "$(PYTHON) -m benchmarks $$suite || exit 1; done"
