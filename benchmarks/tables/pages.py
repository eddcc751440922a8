"""The pages' tables and pictures, made from the raw rows: `python -m benchmarks table`."""

import argparse
import pathlib
import re
from typing import Any

from benchmarks.gpu_tests.gpu_tests import runs_of
from benchmarks.runner import rows_of
from benchmarks.tables import bars
from benchmarks.tables.attention import decode_table, eight_bit_table, prefill_table
from benchmarks.tables.serving import (
    cascades_table,
    drafts_table,
    engine_table,
    gradients_table,
    server_table,
)
from benchmarks.tables.training_table import training_table

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "benchmarks.md")
IMAGES = "docs/images"  # from the README, the page that shows them
MARKER = r"(<!-- ([^:\n]+): (\S+)(?: beside (\S+))? -->\n).*?(<!-- end -->)"
PICTURES = {
    "decode picture": (
        bars.decode_panels,
        "Decode, one new token per request: bytes of the cache read per second",
    ),
    "prefill picture": (bars.prefill_panels, "Prefill, causal, 16 bits: operations per second"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks table` takes: nothing."""


def main(arguments: argparse.Namespace) -> None:
    """Writes every table into its page, between its markers, and draws the pictures that pages show."""
    for page in PAGES:
        text = page.read_text()
        page.write_text(filled(text))
        for path, drawing in pictures(text).items():
            (ROOT / path).write_text(drawing)


def filled(text: str) -> str:
    """A page with each table made anew from the files that its marker names."""
    makers = {
        "decode": decode_table,
        "decode in 8 bits": eight_bit_table,
        "prefill": prefill_table,
        "sparse": sparse_table,
        "sparse beside vLLM": sparse_peers_table,
        "graphs": graphs_table,
        "write": write_table,
        "engine": engine_table,
        "server": server_table,
        "drafts": drafts_table,
        "cascades": cascades_table,
        "gradients": gradients_table,
        "training": training_table,
        "quantization": quantization_table,
        "GPU tests": gpu_tests_line,
    }

    def made(match: re.Match[str]) -> str:
        start, name, *files, end = match.groups()
        if name in PICTURES:
            return start + picture(name, *files) + end
        return start + makers[name](*(file for file in files if file)) + end

    return re.sub(MARKER, made, text, flags=re.DOTALL)


def pictures(text: str) -> dict[str, str]:
    """Path -> SVG of each picture that a page shows."""
    found = re.findall(MARKER, text, flags=re.DOTALL)
    return {
        f"{IMAGES}/{name.split()[0]}.svg": bars.svg(PICTURES[name][0](file, beside))
        for _, name, file, beside, _ in found
        if name in PICTURES
    }


def picture(name: str, file: str, beside: str) -> str:
    """Return the lines that show a picture: the image, its caption and the numbers of its first panel."""
    make_panels, title = PICTURES[name]
    panels = make_panels(file, beside)
    caption = bars.caption(title, file, panels)
    return f"![{title}]({IMAGES}/{name.split()[0]}.svg)\n\n{caption}\n{bars.numbers(panels[0])}"


def sparse_table(file: str) -> str:
    """Rows of one run, each against the dense rows before it; none is left out."""
    key = lambda row, name: (name, *(row.get(field) for field in ("cache", "page", "wanted")))
    rows = {key(row, row["name"]): row for row in rows_of(file) if "density" in row}
    first, *_ = rows.values()
    lines = [
        f"{first['gpu']}, jax {first['jax']}.",
        "",
        "| case | cache | density | us | lists, choice | dense / ours | of ideal | planned, us | of ideal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        if row["name"].startswith("planned_"):
            continue
        planned = rows.get(key(row, f"planned_{row['name']}"))
        cells = [
            row["name"],
            f"{row['cache'].replace('none', 'bf16')}, blocks of {row['page']}" if "cache" in row else "bf16",
            f"{row['density']:.3f}" + (f", {row['read']:.3f} read" if _reads_more(row) else ""),
            f"{row['us']:.0f}",
            f"{row['us'] - row['kernel_us']:.0f}",
            f"{row['dense_us'] / row['us']:.2f}",
            f"{row['of_ideal']:.2f}",
            *(("", "") if planned is None else (f"{planned['us']:.0f}", f"{planned['of_ideal']:.2f}")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _reads_more(row: dict[str, Any]) -> bool:
    """Whether keys are read that some of the query heads that share them do not see."""
    return row.get("read", row["density"]) > row["density"] + 0.001


def sparse_peers_table(file: str, beside: str) -> str:
    """The rows of one run that vLLM's block-sparse kernels were timed on, too, in the same run."""
    key = lambda row: (row["name"], row.get("cache", "none"))
    ours = {key(row): row for row in rows_of(file)}
    lines = [
        "| case | cache | vLLM, us | ours, us | vLLM / ours | planned, us | vLLM / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer in rows_of(beside):
        name, cache = key(peer)
        planned = ours.get((f"planned_{name}", cache))
        cells = [name, cache.replace("none", "bf16"), f"{peer['us']:.0f}"]
        for row in (ours[name, cache], planned):
            cells += ["", ""] if row is None else [f"{row['us']:.0f}", f"{peer['us'] / row['us']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def graphs_table(file: str) -> str:
    """Steps of models against the sum of their kernels; an engine's rows have no such sum, and no place."""
    rows = [row for row in rows_of(file) if "kernel_sum_us" in row]
    lines = [
        f"{rows[0]['gpu']}, jax {rows[0]['jax']}.",
        "",
        "| step | command buffers | kernels, us | in flight, us | in flight / kernels | waited for, us |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        kernels, flight = row["kernel_sum_us"], row["in_flight_us"]
        has_buffers = "enable_command_buffer=" not in row["xla_flags"]
        times = [f"{kernels:.0f}", f"{flight:.0f}", f"{flight / kernels:.2f}", f"{row['sync_us']:.0f}"]
        lines.append("| " + " | ".join([row["name"], "yes" if has_buffers else "no", *times]) + " |")
    return "\n".join(lines) + "\n"


def write_table(file: str) -> str:
    """Writes of one run, a row for each layout and number of tokens, the 16-bit write first."""
    rows = rows_of(file)
    formats = list(dict.fromkeys(row["quantization"] for row in rows))
    lines = [
        f"{rows[0]['gpu']}, jax {rows[0]['jax']}.",
        "",
        "| layout, tokens | 16 bits, us | " + " | ".join(name for name in formats if name) + " |",
        "|---|" + "---|" * len(formats),
    ]
    for layout, tokens in dict.fromkeys((row["layout"], row["tokens"]) for row in rows):
        us = {
            row["quantization"]: row["us"]
            for row in rows
            if (row["layout"], row["tokens"]) == (layout, tokens)
        }
        cells = [f"{us[name]:.1f}" + (f" ({us[name] / us[None]:.2f})" if name else "") for name in formats]
        lines.append("| " + " | ".join([f"{layout}, {tokens}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def quantization_table(file: str) -> str:
    """Rows of one run, the 16-bit cache first."""
    rows = rows_of(file)
    exact, count = rows[0], rows[0]["num_bytes"]
    lines = [
        f"{count} bytes of Python, jax {exact['jax']} on a {exact['gpu'].upper()}.",
        "",
        "| cache | bits per byte | more than 16 bits | same likeliest byte | cache bytes a token |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        change = (row["bits"] - exact["bits"]) / count
        size = row["cache_bytes_per_token"]
        cells = [
            row["cache"],
            f"{row['bits'] / count:.4f}",
            f"{change:+.4f}" if row is not exact else "-",
            f"{100 * row['same_choices'] / count:.1f} %",
            f"{size} ({100 * size / exact['cache_bytes_per_token']:.0f} %)",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def gpu_tests_line(file: str) -> str:
    """What the last run of all tests marked gpu came to."""
    rows = runs_of(rows_of(file))
    if not rows:
        return "No run of the GPU tests is recorded yet.\n"
    row = rows[-1]
    commit, driver = row["commit"] or "unknown", row["driver"] or "unknown"
    versions = f"jax {row['jax']}, jaxlib {row['jaxlib']}, driver {driver}"
    several = row.get("gpus", 1) > 1
    gpu = f"{row['gpus']} {row['gpu']}" if several else f"an {row['gpu']}"
    skipped = f", {row['skipped']} skipped" if row["skipped"] else ""
    return (
        f"GPU tests, last run {row['date']} at commit {commit} on {gpu} ({versions}):\n"
        f"{row['passed']} passed, {row['failed']} failed{skipped}, in {row['seconds']} s.\n"
    )
