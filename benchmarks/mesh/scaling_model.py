"""What more GPUs and hosts would bring, calculated from what two H200 took.

A step of decodes is its bytes at the read ceiling, on each GPU its part; its sums over the GPUs; and a
rest, small kernels and the host: what a measured step took beyond these. Nothing here is a measurement.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.runner import RESULTS
from pallas_kernels.collectives import LINK_BYTES_PER_US, WAIT_US, bytes_sent, default_shots

MEASURED = "mesh-later-nvidia-h200-2026-11-24.jsonl"
BY, BEST = ("all_reduce_norm_", "sum_norm_"), {(1, "psum"), (2, "all_reduce")}  # rows of it that count
REQUESTS = ((1, 1024), (1, 131_072), (1, 1_000_000), (64, 4096), (256, 4096), (512, 1024))  # what is planned
GPUS, HOSTS, MEMORY = 8, 4, 135  # of a host; of them; GB of a GPU
SIZES = (1, 2, 4, 8)
READ = 4.47e12  # bytes a second, of a sum of 4 GiB on an H200
WEIGHTS, KEYS, SUMS = 15.1e9, 147_456, 73  # bytes in all, bytes of a token; two sums a layer, and one
# Not measured: 400 Gb/s a GPU between hosts, and what a message takes there.
NETWORK, NETWORK_US = 50e9, 20.0
WIDTH = 4096 * 2  # bytes of a row that is summed


class Model(NamedTuple):
    """What two GPUs of one host took.

    Attributes:
        sums_us: (rows, microseconds of a sum with residual and norm), by the kernel.
        others_us: The same by XLA, which serves several hosts.
        rests_us: GPUs (1 or 2) to (rows, microseconds of a step beyond its bytes and sums).
    """

    sums_us: dict[int, float]
    others_us: dict[int, float]
    rests_us: dict[int, dict[int, float]]

    @classmethod
    def measured(cls) -> "Model":
        """From the rows of the suite `mesh`."""
        rows = [json.loads(line) for line in (RESULTS / MEASURED).read_text().splitlines()]
        sums, others = ({_sizes(r)[0]: r["us"] for r in rows if r["name"].startswith(name)} for name in BY)
        rests: dict[int, dict[int, float]] = {1: {}, 2: {}}
        for row in rows:
            if row["name"].startswith("step_") and (row["tp"], row["sums"]) in BEST:
                requests, context = _sizes(row)
                known = _bytes_us(row["tp"], requests, context)
                known += SUMS * _at(sums, requests) * (row["tp"] > 1)
                rests[row["tp"]][requests] = row["step_us"] - known
        return cls(sums, others, rests)

    def step_us(self, gpus: int, requests: int, context: int, *, hosts: int = 1) -> float:
        """A step of so many requests on so many GPUs, of so many hosts together."""
        sums = 0.0
        if gpus > 1:
            sums = SUMS * (_at(self.sums_us, requests) + _more_us(gpus, requests))
        if hosts > 1:
            sums = SUMS * _at(self.others_us, requests)
            sums += SUMS * (NETWORK_US + 1e6 * 2 * requests * WIDTH / NETWORK)
        return _bytes_us(gpus, requests, context) + sums + _at(self.rests_us[min(gpus, 2)], requests)


def _sizes(row: dict[str, Any]) -> tuple[int, int]:
    """Of a row NAME_1x1024: (1, 1024)."""
    rows, other = row["name"].split("_")[-1].split("x")
    return int(rows), int(other)


def _more_us(gpus: int, rows: int) -> float:
    """How much longer a sum takes than one of two GPUs: for what more is sent, and the second shot's wait."""
    shots = default_shots(rows, WIDTH // 2, gpus)
    more = bytes_sent(rows * WIDTH, gpus, shots) - bytes_sent(rows * WIDTH, 2, 1)
    return (shots - 1) * WAIT_US + more / LINK_BYTES_PER_US


def _bytes_us(gpus: int, requests: int, context: int) -> float:
    return 1e6 * (WEIGHTS + KEYS * requests * context) / gpus / READ


def _at(measured: dict[int, float], rows: int) -> float:
    """Between what was measured a straight line, beyond it the last one goes on."""
    known = sorted(measured.items())
    if rows > known[-1][0]:
        (x0, y0), (x1, y1) = known[-2:]
        return y1 + (rows - x1) * (y1 - y0) / (x1 - x0)
    places, values = zip(*known, strict=True)
    return float(np.interp(rows, places, values))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks scaling-model` takes."""
    parser.add_argument("--out", help="ignored: a calculation has no rows")


def main(arguments: argparse.Namespace) -> None:
    """The table of docs/scaling.md."""
    print(table(Model.measured()), end="")


def table(model: Model) -> str:
    """A host's GPUs as replicas of 1, 2, 4 and 8 each, and four hosts as one, for so many requests a host."""
    columns = ["requests per host", "context", "layout", "ms per step", "tokens/s per host", "GB per GPU"]
    lines = [columns, ["---"] * len(columns), *_rows(model)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rows(model: Model) -> Iterator[list[str]]:
    for requests, context in REQUESTS:
        for size in SIZES:
            yield _row(model, requests, context, size)
        yield _row(model, requests, context, HOSTS * GPUS, hosts=HOSTS)


def _row(model: Model, a_host: int, context: int, size: int, *, hosts: int = 1) -> list[str]:
    engines = hosts * GPUS // size
    requests = -(-hosts * a_host // engines)
    layout = (
        f"{engines} x tp {size}" if hosts == 1 else f"{engines} x tp {GPUS}, cp {hosts}, over {hosts} hosts"
    )
    gigabytes = (WEIGHTS + KEYS * requests * context) / size / 1e9
    cells = [str(a_host), str(context), layout]
    if gigabytes > MEMORY:
        return [*cells, "-", "-", f"{gigabytes:.0f} (too large)"]
    us = model.step_us(size, requests, context, hosts=hosts)
    return [*cells, f"{us / 1e3:.1f}", f"{a_host / us * 1e6:,.0f}", f"{gigabytes:.0f}"]
