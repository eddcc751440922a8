"""Write what pages show of the raw rows: docs/benchmarks.md, and the tables and pictures of README and CONTRIBUTING."""

import argparse
import pathlib
import re

from benchmarks.gpu_tests.gpu_tests import complete_runs
from benchmarks.runner import read_rows
from benchmarks.tables import bars
from benchmarks.tables.benchmarks_page import page as benchmarks_page

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
IMAGES = "docs/images"  # as the README links to them
MARKER = r"(<!-- ([^:\n]+): (\S+)(?: beside (\S+))? -->\n).*?(<!-- end -->)"
PICTURES = {
    "decode picture": (
        bars.decode_panels,
        "Decode, one new token per request: bytes of the cache read per second",
    ),
    "prefill picture": (bars.prefill_panels, "Prefill, causal, 16 bits: operations per second"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `python -m benchmarks table` has no options."""


def main(arguments: argparse.Namespace) -> None:
    """Write docs/benchmarks.md, fill the markers of the other pages, and draw the pictures."""
    BENCHMARKS.write_text(benchmarks_page())
    for page in PAGES:
        text = page.read_text()
        page.write_text(filled(text))
        for path, drawing in pictures(text).items():
            (ROOT / path).write_text(drawing)


def filled(text: str) -> str:
    """Return a page with the text between its markers generated from the files that the markers name."""

    def generate(match: re.Match[str]) -> str:
        start, name, file, peer_file, end = match.groups()
        return start + (picture(name, file, peer_file) if name in PICTURES else gpu_tests_line(file)) + end

    return re.sub(MARKER, generate, text, flags=re.DOTALL)


def pictures(text: str) -> dict[str, str]:
    """Return path -> SVG of each picture on a page."""
    markers = re.findall(MARKER, text, flags=re.DOTALL)
    return {
        f"{IMAGES}/{name.split()[0]}.svg": bars.svg(PICTURES[name][0](file, peer_file))
        for _, name, file, peer_file, _ in markers
        if name in PICTURES
    }


def picture(name: str, file: str, peer_file: str) -> str:
    """Return the lines that show a picture: the image, its caption and the numbers of its first panel."""
    make_panels, title = PICTURES[name]
    panels = make_panels(file, peer_file)
    caption = bars.caption(title, file, panels)
    return f"![{title}]({IMAGES}/{name.split()[0]}.svg)\n\n{caption}\n{bars.numbers(panels[0])}"


def gpu_tests_line(file: str) -> str:
    """Return the outcome of the last run of the GPU tests."""
    rows = complete_runs(read_rows(file))
    if not rows:
        return "No run of the GPU tests is recorded yet.\n"
    row = rows[-1]
    versions = f"jax {row['jax']}, jaxlib {row['jaxlib']}, driver {row['driver'] or 'unknown'}"
    gpu = f"{row['gpus']} {row['gpu']}" if row.get("gpus", 1) > 1 else f"an {row['gpu']}"
    skipped = f", {row['skipped']} skipped" if row["skipped"] else ""
    return (
        f"GPU tests, last run {row['date']} at commit {row['commit'] or 'unknown'} on {gpu} ({versions}):\n"
        f"{row['passed']} passed, {row['failed']} failed{skipped}, in {row['seconds']} s.\n"
    )
