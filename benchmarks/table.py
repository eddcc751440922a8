"""The README's tables, made from the raw rows: `python -m benchmarks table`."""

import argparse
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks table` takes: nothing."""


def main(arguments: argparse.Namespace) -> None:
    """Writes every table into the README, between its markers."""
    README.write_text(filled(README.read_text()))


def filled(readme: str) -> str:
    """The README with its tables made anew."""
    pattern = r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: m[1] + table(m[2]) + m[3], readme, flags=re.DOTALL)


def table(file: str) -> str:
    """One results file as Markdown: each case's last row with default tiles, losing rows included."""
    gpu, ceiling, rows = "", 0.0, {}
    for line in (RESULTS / file).read_text().splitlines():
        row = json.loads(line)
        gpu = row["gpu"]
        if row["name"] == "read_ceiling":
            ceiling = row["gb_per_s"]
        elif row.get("is_default", True):
            rows[row["name"], row["block_size"], row["layout"]] = row | {"ceiling": ceiling}
    head = f"{gpu}, jax {row['jax']}; times of all kernels of a call, schedule and merge included; median.\n\n"
    lines = ["| case | block | layout | us | GB/s | of the read ceiling |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        share = f"{100 * row['gb_per_s'] / row['ceiling']:.0f} % of {row['ceiling']:.0f}"
        cells = (row["name"], row["block_size"], row["layout"], f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", share)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return head + "\n".join(lines) + "\n"
