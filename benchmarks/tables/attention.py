"""The tables of decode and prefill in docs/benchmarks.md, each beside the peers that its run timed."""

from typing import Any

from benchmarks.runner import rows_of
from benchmarks.tables.bars import CUDNN, DECODE_PEERS, FA3, FLASHINFER, PREFILL_PEERS

SHORT = {FA3: "FA3", FLASHINFER: "FlashInfer", CUDNN: "cuDNN"}  # in the order of the columns
SUFFIXES = {"plain": "", "window": "_window1024"}  # of a peer's workload; of other modifiers `_name`

type Times = dict[str, dict[str, float]]
"""Engine -> workload -> microseconds; engines without a row are not in it."""


def times_of(beside: str, names: dict[str, str]) -> Times:
    """What peers of some names took in a run.

    Args:
        beside: The file of their rows.
        names: A row's peer -> its engine.
    """
    found: Times = {}
    for row in rows_of(beside):
        if row.get("peer") in names and "us" in row:
            found.setdefault(names[row["peer"]], {})[row["workload"]] = row["us"]
    return {engine: found[engine] for engine in SHORT if engine in found}


def line_of(cells: list[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


def decode_table(file: str, beside: str) -> str:
    """Rows over 16-bit caches of one run, beside its read ceiling and its peers; none is left out."""
    ceiling, *rows = rows_of(file)
    times = times_of(beside, DECODE_PEERS["none"])
    speed = ceiling["gb_per_s"]
    head = ["case", "us", "GB/s", "of the read ceiling", *_heads(times, ""), "ours / best"]
    lines = [
        f"{ceiling['gpu']}, jax {ceiling['jax']}, read ceiling {speed:.0f} GB/s.",
        "",
        line_of(head),
        "|---" * len(head) + "|",
    ]
    for row in rows:
        if row.get("quantization", "none") == "none":
            lines.append(line_of([row["name"], *_measured(row, speed), *_beside(row, times)]))
    return "\n".join(lines) + "\n"


def eight_bit_table(file: str, beside: str) -> str:
    """Rows over 8-bit caches of one run, beside its rows over 16 bits and its peers' over fp8."""
    ceiling, *rows = rows_of(file)
    wide = {row["name"]: row["us"] for row in rows if row["quantization"] == "none"}
    times = times_of(beside, DECODE_PEERS["fp8_e4m3"])
    measured = ["us", "GB/s", "of the read ceiling", "bf16 / ours"]
    head = ["case", "cache", *measured, *_heads(times, " fp8"), "ours / best"]
    lines = [line_of(head), "|---" * len(head) + "|"]
    for row in rows:
        if row["quantization"] != "none":
            cells = [row["name"], row["quantization"], *_measured(row, ceiling["gb_per_s"])]
            lines.append(line_of([*cells, f"{wide[row['name']] / row['us']:.2f}", *_beside(row, times)]))
    return "\n".join(lines) + "\n"


def _heads(times: Times, what: str) -> list[str]:
    return [f"{SHORT[engine]}{what}, us" for engine in times]


def _measured(row: dict[str, Any], ceiling: float) -> list[str]:
    """Microseconds, GB/s, share of the read ceiling."""
    return [f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", f"{100 * row['gb_per_s'] / ceiling:.0f} %"]


def _beside(row: dict[str, Any], times: Times) -> list[str]:
    """Each peer's microseconds, and ours over the best one's."""
    found = [of.get(row["name"]) for of in times.values()]
    best = min((us for us in found if us is not None), default=None)
    cells = ["-" if us is None else f"{us:.1f}" for us in found]
    return [*cells, "-" if best is None else f"{row['us'] / best:.2f}"]


def prefill_table(file: str, beside: str) -> str:
    """Rows of one run against the peers of the same run; none is left out."""
    rows = rows_of(file)
    times = {size: times_of(beside, names) for size, names in PREFILL_PEERS.items()}
    engines = [engine for engine in SHORT if any(engine in of for of in times.values())]
    (ceiling,) = [row["value"] for row in rows_of(beside) if row.get("ceiling") == "bf16_matmul_TFLOPs"]
    head = ["case", "keys", "ours, us", "ours", *(SHORT[engine] for engine in engines), "ours / best"]
    lines = [
        f"TFLOP/s, {rows[0]['gpu']}, jax {rows[0]['jax']}; a matmul reached {ceiling:.0f}.",
        "",
        line_of(head),
        "|---" * len(head) + "|",
    ]
    for row in rows:
        quantization, size = row.get("quantization"), row["block_size"]
        peers = {} if quantization is not None else times[size]  # over 8 bits nobody else was timed
        workload = row["name"] + SUFFIXES.get(row["modifier"], "_" + row["modifier"])
        found = [peers.get(engine, {}).get(workload) for engine in engines]
        rates = [None if us is None else row["tflop_per_s"] * row["us"] / us for us in found]
        best = max((rate for rate in rates if rate is not None), default=None)
        cells = [
            row["name"] + ("" if row["modifier"] == "plain" else f", {row['modifier']}"),
            "packed" if size is None else f"{quantization or ''} blocks of {size}".strip(),
            f"{row['us']:.0f}",
            f"{row['tflop_per_s']:.0f}",
            *("-" if rate is None else f"{rate:.0f}" for rate in rates),
            "-" if best is None else f"{row['tflop_per_s'] / best:.2f}",
        ]
        lines.append(line_of(cells))
    return "\n".join(lines) + "\n"
