"""Bar charts of decode and prefill beside their peers, as SVG generated from the raw rows."""

from typing import Any, NamedTuple

from benchmarks.runner import read_rows, run_date
from benchmarks.tables.markdown import table

OURS, FA3, FLASHINFER, CUDNN = "jattn", "FlashAttention-3", "FlashInfer", "cuDNN"
ENGINES = {OURS: "#1f6feb", FA3: "#9a6700", FLASHINFER: "#8250df", CUDNN: "#1a7f37"}
INK = "#797e85"  # has equal contrast on GitHub's light and dark background
# Cache format or block size -> name of a peer in its rows -> engine.
DECODE_PEERS = {
    "none": {"fa3_page16": FA3, "flashinfer_decode_bf16_page16": FLASHINFER, "cudnn_dense": CUDNN},
    "fp8_e4m3": {"fa3_fp8_page16": FA3, "flashinfer_decode_fp8kv_page16": FLASHINFER},
}
PREFILL_PEERS = {
    None: {"fa3_contig": FA3, "flashinfer_ragged_fa3": FLASHINFER, "torch_cudnn_sdpa": CUDNN},
    16: {"fa3_page16": FA3, "flashinfer_paged16_fa3": FLASHINFER},
}
LABEL_WIDTH, PANEL_WIDTH, MARGIN = 134, 424, 14  # pixels; the margin is at the right of a panel
BAR_HEIGHT, GAP, TOP = 12, 8, 78  # pixels; the gap is between cases, the top above the first bar


class Panel(NamedTuple):
    """A panel of a bar chart: cases, each with a bar for every engine that has a row of it.

    Attributes:
        title: Title with the unit of the rates.
        cases: Case -> engine -> rate.
        ceiling: Rate that the machine reached without attention.
        ceiling_name: Name of the operation that reached the ceiling.
    """

    title: str
    cases: dict[str, dict[str, float]]
    ceiling: float
    ceiling_name: str


def decode_panels(file: str, peer_file: str) -> tuple[Panel, ...]:
    """Return the panels of decode over bf16 caches and over fp8 caches, in GB/s."""
    ceiling, *rows = read_rows(file)
    peers = read_rows(peer_file)
    titles = {"none": "bf16 cache, GB/s", "fp8_e4m3": "fp8 cache, GB/s"}
    return tuple(
        Panel(
            title,
            {
                row["name"]: _rates(row, row["gb_per_s"], row["name"], peers, DECODE_PEERS[cache_format])
                for row in rows
                if row["quantization"] == cache_format
            },
            ceiling["gb_per_s"],
            "reading alone",
        )
        for cache_format, title in titles.items()
    )


def prefill_panels(file: str, peer_file: str) -> tuple[Panel, ...]:
    """Return the panels of causal prefill over packed keys and over blocks of 16 tokens, in TFLOP/s."""
    rows, peers = read_rows(file), read_rows(peer_file)
    rows = [row for row in rows if row["modifier"] == "plain" and row.get("quantization") is None]
    (ceiling,) = [row["value"] for row in peers if row.get("ceiling") == "bf16_matmul_TFLOPs"]
    titles = {None: "packed keys, TFLOP/s", 16: "paged cache, blocks of 16, TFLOP/s"}
    return tuple(
        Panel(
            title,
            {
                row["name"]: _rates(row, row["tflop_per_s"], row["name"], peers, PREFILL_PEERS[size])
                for row in rows
                if row["block_size"] == size
            },
            ceiling,
            "a matrix product",
        )
        for size, title in titles.items()
    )


def _rates(
    row: dict[str, Any], jattn_rate: float, workload: str, peers: list[dict[str, Any]], names: dict[str, str]
) -> dict[str, float]:
    """Return engine -> rate for a case. Peers' rates count the same bytes or operations as jattn's."""
    us = {names[p["peer"]]: p["us"] for p in peers if p.get("workload") == workload and p["peer"] in names}
    return {OURS: jattn_rate} | {
        engine: jattn_rate * row["us"] / us[engine] for engine in ENGINES if engine in us
    }


def caption(title: str, file: str, panels: tuple[Panel, ...]) -> str:
    """Return the caption of a picture: machine, date and versions, and the peers without rows in the run."""
    row = read_rows(file)[0]
    engines = _engines(panels)
    missing = [engine for engine in ENGINES if engine not in engines]
    note = f" No rows of {' and '.join(missing)} in this run." if missing else ""
    return f"{title}; {row['gpu']}, {run_date(file)}, jax {row['jax']}.{note} Longer is faster.\n"


def numbers(panel: Panel) -> str:
    """Return a panel as a table: a row per case, a column per engine."""
    engines = _engines((panel,))
    lines = []
    for case, rates in panel.cases.items():
        lines.append([case, *(f"{rates[engine]:,.0f}" if engine in rates else "-" for engine in engines)])
    return table([panel.title, *engines], lines)


def _engines(panels: tuple[Panel, ...]) -> list[str]:
    engines = {engine for panel in panels for bars in panel.cases.values() for engine in bars}
    return [engine for engine in ENGINES if engine in engines]


def svg(panels: tuple[Panel, ...]) -> str:
    """Return an SVG with the panels side by side and a legend.

    It has no background and is legible on white and on black.
    """
    engines = _engines(panels)
    height = TOP + max(_height(panel) for panel in panels)
    width = PANEL_WIDTH * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    ]
    for index, engine in enumerate(engines):
        x = LABEL_WIDTH + 150 * index
        lines.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{ENGINES[engine]}"/>')
        lines.append(f'<text x="{x + 18}" y="18">{engine}</text>')
    for index, panel in enumerate(panels):
        lines += _panel_elements(panel, PANEL_WIDTH * index)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _height(panel: Panel) -> int:
    return sum(BAR_HEIGHT * len(bars) + GAP for bars in panel.cases.values())


def _panel_elements(panel: Panel, left: int) -> list[str]:
    """Return the SVG elements of a panel whose left edge is at `left` pixels."""
    start = left + LABEL_WIDTH
    max_rate = max([panel.ceiling, *(rate for bars in panel.cases.values() for rate in bars.values())])
    pixels_per_unit = (PANEL_WIDTH - LABEL_WIDTH - MARGIN) / max_rate
    line = start + pixels_per_unit * panel.ceiling
    lines = [
        f'<text x="{start}" y="44" font-weight="600">{panel.title}</text>',
        f'<text x="{line:.1f}" y="66" font-size="10" text-anchor="end">'
        f"{panel.ceiling_name}: {panel.ceiling:.0f}</text>",
        f'<path d="M{line:.1f} 70V{TOP + _height(panel) - GAP}" stroke="{INK}" stroke-dasharray="3 3"/>',
    ]
    y = TOP
    for case, bars in panel.cases.items():
        middle = y + BAR_HEIGHT * len(bars) / 2 + 4
        lines.append(f'<text x="{start - 6}" y="{middle:.1f}" font-size="11" text-anchor="end">{case}</text>')
        for engine, rate in bars.items():
            lines.append(
                f'<rect x="{start}" y="{y}" width="{pixels_per_unit * rate:.1f}" height="{BAR_HEIGHT - 1}" '
                f'fill="{ENGINES[engine]}"/>'
            )
            lines.append(
                f'<text x="{start + pixels_per_unit * rate - 2:.1f}" y="{y + 9}" font-size="9" fill="#fff" '
                f'text-anchor="end">{rate:.0f}</text>'
            )
            y += BAR_HEIGHT
        y += GAP
    return lines
