"""Calculated times of decode steps on layouts that are not measured, from measurements on one host.

A step takes as long as the slower of the GPUs and of the host that launches their kernels. The time of the
GPUs is the sum of reading each GPU's part of the bytes at the read ceiling, of the all-reduces, and of a
remainder for small kernels.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.runner import read_rows
from pallas_kernels.collectives import default_shots

# Rows of H200s with one process per GPU: all-reduces and steps.
TWO_GPUS = tuple(f"mesh-{name}-nvidia-h200-2026-11-25.jsonl" for name in ("sums-processes", "processes"))
EIGHT_GPUS = ("mesh-eight-nvidia-h200-2026-11-27.jsonl",) * 2
GPU = "NVIDIA H200"
PEER_SUMS, XLA_SUMS = ("all_reduce_norm_", "two_shots_norm_"), ("sum_norm_",)  # names of all-reduce rows
REQUESTS = (
    (1, 1024),
    (1, 131_072),
    (1, 1_000_000),
    (64, 4096),
    (256, 4096),
    (512, 1024),
)  # per host; context
GPUS, HOSTS, MEMORY = 8, 4, 135  # GPUs per host, hosts, GB per GPU
SIZES = (1, 2, 4, 8)
READ = 4.47e12  # bytes per second of summing 4 GiB on an H200
LAYERS, SUMS = 36, 73  # layers; all-reduces per step
WEIGHTS, KEYS = 15.1e9, 147_456  # bytes of weights; bytes per cached token
WIDTH = 4096  # values per row of an all-reduce
# Assumptions: 400 Gb/s per GPU between hosts, and the latency of a message.
NETWORK, NETWORK_US = 50e9, 20.0


class Model(NamedTuple):
    """Measurements on GPUs of one host, with one process per GPU.

    Attributes:
        sums_us: GPUs (2 or 8) -> rows -> microseconds of an all-reduce with residual and norm, by the kernel.
        xla_sums_us: Rows -> microseconds of the same by XLA on eight GPUs. XLA works across hosts.
        remainders_us: GPUs (1 or 2) -> rows -> microseconds of a step besides reading and all-reduces.
        host_us: Rows -> microseconds of a step on eight GPUs, which the host limits.
    """

    sums_us: dict[int, dict[int, float]]
    xla_sums_us: dict[int, float]
    remainders_us: dict[int, dict[int, float]]
    host_us: dict[int, float]

    @classmethod
    def measured(cls) -> "Model":
        """Read the measurements from rows of the suite `mesh`."""
        sums = {2: _sum_times(TWO_GPUS[0], PEER_SUMS), 8: _sum_times(EIGHT_GPUS[0], PEER_SUMS)}
        steps = {
            1: _step_times(EIGHT_GPUS[1], 1, "psum"),
            2: _step_times(TWO_GPUS[1], 2, "all_reduce"),
            8: _step_times(EIGHT_GPUS[1], 8, "all_reduce"),
        }
        remainders: dict[int, dict[int, float]] = {1: {}, 2: {}}
        for gpus in (1, 2):
            for (requests, context), us in steps[gpus].items():
                us -= _read_us(gpus, requests, context)
                us -= SUMS * _interpolate(sums[2], requests) * (gpus > 1)
                # The host limits a step of one request on two GPUs; its kernels take no longer than on one.
                remainders[gpus][requests] = min(us, remainders[1].get(requests, us))
        host = {requests: us for (requests, _), us in steps[8].items()}
        return cls(sums, _sum_times(EIGHT_GPUS[0], XLA_SUMS), remainders, host)

    def step_us(self, gpus: int, requests: int, context: int, *, hosts: int = 1) -> float:
        """Return the microseconds of a decode step.

        Args:
            gpus: Number of GPUs on all hosts together.
            requests: Number of requests.
            context: Cached tokens per request.
            hosts: Number of hosts. Tensor parallelism within hosts, context parallelism between them.
        """
        sums = 0.0
        if hosts > 1:  # each layer also exchanges its log-sum-exps, which takes as long as one row
            sums = SUMS * (_interpolate(self.xla_sums_us, requests) + 1e6 * 4 * requests * WIDTH / NETWORK)
            sums += LAYERS * _interpolate(self.xla_sums_us, 1) + (SUMS + LAYERS) * NETWORK_US
        elif gpus > 1:
            sums = SUMS * self.sum_us(gpus, requests)
        remainder = _interpolate(self.remainders_us[min(gpus, 2)], requests)
        gpu_us = _read_us(gpus, requests, context) + sums + remainder
        return max(gpu_us, _interpolate(self.host_us, requests) if gpus > 1 else 0.0)

    def sum_us(self, gpus: int, rows: int) -> float:
        """Return the microseconds of an all-reduce of `rows` rows of 4,096 values on 2 to 8 GPUs.

        Args:
            gpus: Number of GPUs, whose logarithm is interpolated between two and eight.
            rows: Number of rows.
        """
        two, eight = (_interpolate(self.sums_us[count], rows) for count in (2, 8))
        return two + (eight - two) * float(np.log2(gpus / 2)) / 2


def _sum_times(file: str, prefixes: tuple[str, ...]) -> dict[int, float]:
    """Return rows -> microseconds of the fastest all-reduce of rows of 4,096 values."""
    times: dict[int, float] = {}
    for row in read_rows(file):
        if row.get("name", "").startswith(prefixes) and row["processes"] == row["num_devices"]:
            rows, width = _parse_size(row)
            if width == WIDTH:
                times[rows] = min(times.get(rows, row["us"]), row["us"])
    return times


def _step_times(file: str, tp: int, sums: str) -> dict[tuple[int, int], float]:
    """Return (requests, context) -> microseconds of a step with one process per GPU."""
    return {
        _parse_size(row): row["step_us"]
        for row in read_rows(file)
        if row["name"].startswith("step_")
        and row["processes"] == row["num_devices"]
        and (row["tp"], row.get("cp", 1), row["sums"]) == (tp, 1, sums)
    }


def _parse_size(row: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers at the end of a row's name, such as (1, 1024) for step_1x1024."""
    rows, width = row["name"].split("_")[-1].split("x")
    return int(rows), int(width)


def _read_us(gpus: int, requests: int, context: int) -> float:
    return 1e6 * (WEIGHTS + KEYS * requests * context) / gpus / READ


def _interpolate(measured: dict[int, float], rows: int) -> float:
    """Interpolate measurements linearly; extrapolate beyond the largest number of rows."""
    points = sorted(measured.items())
    if rows > points[-1][0]:
        (x0, y0), (x1, y1) = points[-2:]
        return y1 + (rows - x1) * (y1 - y0) / (x1 - x0)
    return float(np.interp(rows, [x for x, _ in points], [y for _, y in points]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks scaling-model`."""
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="Files with rows of `mesh` to compare with the model and with the targets.",
    )
    parser.add_argument("--out", help="Ignored: calculated numbers are not recorded.")


def main(arguments: argparse.Namespace) -> None:
    """Print the table of docs/scaling.md, or a comparison of measured rows with the model."""
    if arguments.compare is None:
        print(table(Model.measured()), end="")
        return
    rows = [
        json.loads(line) for file in arguments.compare for line in pathlib.Path(file).read_text().splitlines()
    ]
    print(comparison(rows))
    print(targets(rows), end="")


def comparison(rows: list[dict[str, Any]]) -> str:
    """Return a table of measured decode steps and all-reduces beside the times that the model calculates.

    It has the rows that the model covers: of H200s with one process per GPU, through peer memory, by heads.
    """
    model, lines = Model.measured(), []
    for row in rows:
        if row["gpu"] != GPU or row["processes"] != row["num_devices"]:
            continue
        if row["name"].startswith("step_") and row["sums"] == "all_reduce" and "cp" not in row:
            if row["name"].endswith("_prompt"):
                continue
            us, gpus = row["step_us"], row["tp"]
            calculated = model.step_us(gpus, *_parse_size(row))
        elif row["name"].startswith(PEER_SUMS):
            (count, width), us, gpus = _parse_size(row), row["us"], row["num_devices"]
            shots = 2 if row["name"].startswith("two_shots") else 1
            if width != WIDTH or shots != default_shots(count, width, gpus):
                continue
            calculated = model.sum_us(gpus, count)
        else:
            continue
        ratio = us / calculated
        note = "off" if abs(ratio - 1) > 0.1 else ""
        lines.append([row["name"], str(gpus), f"{us:.1f}", f"{calculated:.1f}", f"{ratio:.2f}", note])
    head = ["row", "GPUs", "measured us", "calculated us", "ratio", "off by more than 10 %"]
    return _markdown([head, *lines])


def targets(rows: list[dict[str, Any]]) -> str:
    """Return a table of the targets for eight GPUs, beside the best rows."""

    def best(prefix: str, key: str, **columns: Any) -> float:
        values = [
            row[key]
            for row in rows
            if row["name"].startswith(prefix)
            and key in row
            and all(row.get(column) == value for column, value in columns.items())
        ]
        return max(values, default=float("nan"))

    ceiling = best("read_ceiling", "gb_per_s")
    steps = min(best("loop_", "steps", sums=name) for name in ("psum", "all_reduce"))
    heads, keys = (best("attention_8x128k", "speedup", split=split) for split in ("heads", "keys"))
    step, loop = (ceiling / best(name, "gb_per_s", tp=8) for name in ("large_64x4096", "large_loop_"))
    lines = [
        ["attention, 8 x 128k, by heads", ">= 7.5", f"{heads:.2f}"],
        ["attention, 8 x 128k, by keys", ">= 7.2", f"{keys:.2f}"],
        ["step of a model with 70B sizes relative to reading its bytes, tp 8", "<= 1.35", f"{step:.2f}"],
        ["the same in decode_loop", "<= 1.35", f"{loop:.2f}"],
        ["steps without a hang, NCCL and peer memory", "10,000", f"{steps:,.0f}"],
    ]
    return _markdown([["measurement", "target", "measured"], *lines])


def table(model: Model) -> str:
    """Return the table of docs/scaling.md: replicas of 1 to 8 GPUs on a host, and one on four hosts."""
    layouts = [f"{GPUS // size} x tp {size}" for size in SIZES]
    columns = ["requests per host x context", *layouts, f"tp {GPUS}, cp {HOSTS}, {HOSTS} hosts"]
    return _markdown([columns, *_rows(model)])


def _markdown(lines: list[list[str]]) -> str:
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _rows(model: Model) -> Iterator[list[str]]:
    for requests, context in REQUESTS:
        cells = [_cell(model, requests, context, size) for size in SIZES]
        cells.append(_cell(model, requests, context, HOSTS * GPUS, hosts=HOSTS))
        yield [f"{requests} x {context:,}", *cells]


def _cell(model: Model, host_requests: int, context: int, size: int, *, hosts: int = 1) -> str:
    """Return the milliseconds per step and the tokens per second of a host."""
    engines = hosts * GPUS // size
    requests = -(-hosts * host_requests // engines)
    if (WEIGHTS + KEYS * requests * context) / size / 1e9 > MEMORY:
        return "too large"
    us = model.step_us(size, requests, context, hosts=hosts)
    return f"{us / 1e3:.1f} ({host_requests / us * 1e6:,.0f})"
