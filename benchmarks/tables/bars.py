"""Bar charts of decode and prefill beside their peers, as SVG drawn from the raw rows."""

from typing import Any, NamedTuple

from benchmarks.runner import read_rows, run_date
from benchmarks.tables.markdown import table

OURS, FA3, FLASHINFER, CUDNN = "jattn", "FlashAttention-3", "FlashInfer", "cuDNN"
ENGINES = {OURS: "#1f6feb", FA3: "#9a6700", FLASHINFER: "#8250df", CUDNN: "#1a7f37"}
INK = "#797e85"  # as far from GitHub's white as from its black
# What the rows of peers are called, by what is read.
DECODE_PEERS = {
    "none": {"fa3_page16": FA3, "flashinfer_decode_bf16_page16": FLASHINFER, "cudnn_dense": CUDNN},
    "fp8_e4m3": {"fa3_fp8_page16": FA3, "flashinfer_decode_fp8kv_page16": FLASHINFER},
}
PREFILL_PEERS = {
    None: {"fa3_contig": FA3, "flashinfer_ragged_fa3": FLASHINFER, "torch_cudnn_sdpa": CUDNN},
    16: {"fa3_page16": FA3, "flashinfer_paged16_fa3": FLASHINFER},
}
LABELS, PANEL, MARGIN = 134, 424, 14  # widths in pixels: of a case's name, of a panel, at its right
BAR, GAP, TOP = 12, 8, 78  # heights: of a bar, between cases, above the first


class Panel(NamedTuple):
    """Cases, and a bar for each engine that has a row of it.

    Attributes:
        title: What is read.
        cases: Case -> engine -> rate.
        ceiling: What the machine reached without attention.
        ceiling_name: What that is.
    """

    title: str
    cases: dict[str, dict[str, float]]
    ceiling: float
    ceiling_name: str


def decode_panels(file: str, beside: str) -> tuple[Panel, ...]:
    """GB/s of decode over bf16 caches, and over fp8 ones."""
    ceiling, *rows = read_rows(file)
    peers = read_rows(beside)
    titles = {"none": "bf16 cache, GB/s", "fp8_e4m3": "fp8 cache, GB/s"}
    return tuple(
        Panel(
            title,
            {
                row["name"]: _rates(row, row["gb_per_s"], row["name"], peers, DECODE_PEERS[stored])
                for row in rows
                if row["quantization"] == stored
            },
            ceiling["gb_per_s"],
            "reading alone",
        )
        for stored, title in titles.items()
    )


def prefill_panels(file: str, beside: str) -> tuple[Panel, ...]:
    """TFLOP/s of causal prompts over packed keys, and over blocks of 16."""
    rows, peers = read_rows(file), read_rows(beside)
    (ceiling,) = [row["value"] for row in peers if row.get("ceiling") == "bf16_matmul_TFLOPs"]
    titles = {None: "packed keys, TFLOP/s", 16: "paged cache, blocks of 16, TFLOP/s"}
    is_plain = lambda row: row["modifier"] == "plain" and row.get("quantization") is None
    return tuple(
        Panel(
            title,
            {
                row["name"]: _rates(row, row["tflop_per_s"], row["name"], peers, PREFILL_PEERS[size])
                for row in rows
                if is_plain(row) and row["block_size"] == size
            },
            ceiling,
            "a matrix product",
        )
        for size, title in titles.items()
    )


def _rates(
    row: dict[str, Any], ours: float, workload: str, peers: list[dict[str, Any]], names: dict[str, str]
) -> dict[str, float]:
    """Our rate, and each peer's for the same bytes or operations."""
    us = {names[p["peer"]]: p["us"] for p in peers if p.get("workload") == workload and p["peer"] in names}
    return {OURS: ours} | {engine: ours * row["us"] / us[engine] for engine in ENGINES if engine in us}


def caption(what: str, file: str, panels: tuple[Panel, ...]) -> str:
    """The line below a picture: the machine, the day, and which peers have no rows in that run."""
    row = read_rows(file)[0]
    shown = _engines(panels)
    missing = [engine for engine in ENGINES if engine not in shown]
    lacks = f" No rows of {' and '.join(missing)} in this run." if missing else ""
    return f"{what}; {row['gpu']}, {run_date(file)}, jax {row['jax']}.{lacks} Longer is faster.\n"


def numbers(panel: Panel) -> str:
    """Return a panel as a table: a row per case, a column per engine."""
    engines = _engines((panel,))
    lines = []
    for case, rates in panel.cases.items():
        lines.append([case, *(f"{rates[engine]:,.0f}" if engine in rates else "-" for engine in engines)])
    return table([panel.title, *engines], lines)


def _engines(panels: tuple[Panel, ...]) -> list[str]:
    found = {engine for panel in panels for bars in panel.cases.values() for engine in bars}
    return [engine for engine in ENGINES if engine in found]


def svg(panels: tuple[Panel, ...]) -> str:
    """The panels side by side, with a legend. Legible on white and on black: it has no background."""
    engines = _engines(panels)
    height = TOP + max(_height(panel) for panel in panels)
    width = PANEL * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    ]
    for nth, engine in enumerate(engines):
        x = LABELS + 150 * nth
        lines.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{ENGINES[engine]}"/>')
        lines.append(f'<text x="{x + 18}" y="18">{engine}</text>')
    for nth, panel in enumerate(panels):
        lines += _drawn(panel, PANEL * nth)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _height(panel: Panel) -> int:
    return sum(BAR * len(bars) + GAP for bars in panel.cases.values())


def _drawn(panel: Panel, left: int) -> list[str]:
    """A panel from `left` on."""
    start = left + LABELS
    fastest = max([panel.ceiling, *(rate for bars in panel.cases.values() for rate in bars.values())])
    pixels = lambda rate: (PANEL - LABELS - MARGIN) * rate / fastest
    line = start + pixels(panel.ceiling)
    lines = [
        f'<text x="{start}" y="44" font-weight="600">{panel.title}</text>',
        f'<text x="{line:.1f}" y="66" font-size="10" text-anchor="end">'
        f"{panel.ceiling_name}: {panel.ceiling:.0f}</text>",
        f'<path d="M{line:.1f} 70V{TOP + _height(panel) - GAP}" stroke="{INK}" stroke-dasharray="3 3"/>',
    ]
    y = TOP
    for case, bars in panel.cases.items():
        middle = y + BAR * len(bars) / 2 + 4
        lines.append(f'<text x="{start - 6}" y="{middle:.1f}" font-size="11" text-anchor="end">{case}</text>')
        for engine, rate in bars.items():
            lines.append(
                f'<rect x="{start}" y="{y}" width="{pixels(rate):.1f}" height="{BAR - 1}" '
                f'fill="{ENGINES[engine]}"/>'
            )
            lines.append(
                f'<text x="{start + pixels(rate) - 2:.1f}" y="{y + 9}" font-size="9" fill="#fff" '
                f'text-anchor="end">{rate:.0f}</text>'
            )
            y += BAR
        y += GAP
    return lines
