"""Calculated step times on more GPUs and hosts, from measurements on two GPUs.

The time of a decode step is the sum of reading each GPU's part of the bytes at the read ceiling, of the
all-reduces, and of a remainder for small kernels and the host, which is the measured time minus the other
two.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.runner import read_rows
from pallas_kernels.collectives import LINK_BYTES_PER_US, WAIT_US, bytes_sent, default_shots

MEASURED = "mesh-later-nvidia-h200-2026-11-24.jsonl"
SUM_PREFIXES = ("all_reduce_norm_", "sum_norm_")  # rows of the all-reduce by the kernel and by XLA
STEP_LAYOUTS = {(1, "psum"), (2, "all_reduce")}  # tensor parallelism and all-reduce of the rows of steps
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
H100_READ = 3.05e12  # bytes per second of decode attention over 8 x 128k on an H100
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
H100_ROWS = tuple(f"mesh-{name}-nvidia-h100-80gb-hbm3-2026-11-26.jsonl" for name in ("one-row", "prompts"))
H200_ROWS = tuple(f"mesh-{name}-nvidia-h200-2026-11-25.jsonl" for name in ("sums-processes", "processes"))
# (GPU, number of processes on two GPUs) -> (bytes per second, (file of all-reduces, file of steps)).
SOURCES = {
    (H200, 1): (READ, (MEASURED, MEASURED)),
    (H200, 2): (READ, H200_ROWS),
    (H100, 1): (H100_READ, H100_ROWS),
    (H100, 2): (H100_READ, H100_ROWS),
}
LAYERS, ATTENTION = 36, 3.02e9  # layers; bytes of the attention weights, which the ranks of `cp` replicate
WEIGHTS, KEYS, SUMS = 15.1e9, 147_456, 73  # bytes of weights; bytes per cached token; all-reduces per step
# Assumptions: 400 Gb/s per GPU between hosts, and the latency of a message.
NETWORK, NETWORK_US = 50e9, 20.0
WIDTH = 4096 * 2  # bytes per row of an all-reduce


class Model(NamedTuple):
    """Measurements on two GPUs of one host.

    Attributes:
        read: Bytes per second that a GPU reads.
        sums_us: Rows -> microseconds of an all-reduce with residual and norm, by the kernel.
        xla_sums_us: The same by XLA, which works across hosts.
        remainders_us: GPUs (1 or 2) -> rows -> microseconds of a step besides reading and all-reduces.
    """

    read: float
    sums_us: dict[int, float]
    xla_sums_us: dict[int, float]
    remainders_us: dict[int, dict[int, float]]

    @classmethod
    def measured(cls, gpu: str = H200, processes: int = 1) -> "Model":
        """Read the measurements from rows of the suite `mesh`; of two rows of an all-reduce the faster.

        Args:
            gpu: Device name of the GPU.
            processes: 1, or 2 for one process per GPU. docs/scaling.md uses one process on H200s.
        """
        read, (sums_file, steps_file) = SOURCES[gpu, processes]
        sums: dict[int, float] = {}
        xla_sums: dict[int, float] = {}
        for row in read_rows(sums_file):
            for prefix, times in zip(SUM_PREFIXES, (sums, xla_sums), strict=True):
                if row["name"].startswith(prefix):
                    num_rows, _ = _parse_size(row)
                    times[num_rows] = min(times.get(num_rows, row["us"]), row["us"])
        remainders: dict[int, dict[int, float]] = {1: {}, 2: {}}
        for row in read_rows(steps_file):
            is_used = _is_decode(row) and row.get("processes", 1) == processes
            if is_used and (row["tp"], row["sums"]) in STEP_LAYOUTS:
                requests, context = _parse_size(row)
                us = _read_us(row["tp"], requests, context, read)
                us += SUMS * _interpolate(sums, requests) * (row["tp"] > 1)
                remainders[row["tp"]][requests] = row["step_us"] - us
        return cls(read, sums, xla_sums, remainders)

    def step_us(self, gpus: int, requests: int, context: int, *, hosts: int = 1, cp: int = 1) -> float:
        """Return the microseconds of a decode step.

        Args:
            gpus: Number of GPUs on all hosts together.
            requests: Number of requests.
            context: Cached tokens per request.
            hosts: Number of hosts.
            cp: Number of ranks over which keys are distributed, within a host.
        """
        sums = 0.0
        if gpus > 1:
            sums = SUMS * self.sum_us(gpus, requests)
        if cp > 1:  # log-sum-exps: one exchange per layer, which takes as long as an all-reduce of one row
            sums += LAYERS * self.sum_us(2, 1) + 1e6 * ATTENTION * (cp - 1) / gpus / self.read
        if hosts > 1:
            sums = SUMS * _interpolate(self.xla_sums_us, requests)
            sums += SUMS * (NETWORK_US + 1e6 * 2 * requests * WIDTH / NETWORK)
        remainder = _interpolate(self.remainders_us[min(gpus, 2)], requests)
        return _read_us(gpus, requests, context, self.read) + sums + remainder

    def sum_us(self, gpus: int, rows: int) -> float:
        """Return the microseconds of an all-reduce through peer memory of `rows` rows of 4,096 values."""
        return _interpolate(self.sums_us, rows) + _extra_sum_us(gpus, rows)


def _parse_size(row: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers at the end of a row's name, such as (1, 1024) for step_1x1024."""
    rows, width = row["name"].split("_")[-1].split("x")
    return int(rows), int(width)


def _extra_sum_us(gpus: int, rows: int) -> float:
    """Return the additional time of an all-reduce on more than two GPUs, for bytes and a second shot."""
    shots = default_shots(rows, WIDTH // 2, gpus)
    extra_bytes = bytes_sent(rows * WIDTH, gpus, shots) - bytes_sent(rows * WIDTH, 2, 1)
    return (shots - 1) * WAIT_US + extra_bytes / LINK_BYTES_PER_US


def _read_us(gpus: int, requests: int, context: int, read: float) -> float:
    return 1e6 * (WEIGHTS + KEYS * requests * context) / gpus / read


def _is_decode(row: dict[str, Any]) -> bool:
    return row["name"].startswith("step_") and not row["name"].endswith("_prompt")


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
        "--compare", nargs="+", metavar="FILE", help="Files with rows of `mesh` to compare with the model."
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
    """Return a table of measured decode steps and all-reduces beside the times that the model calculates."""
    lines = []
    for row in rows:
        in_processes = row["processes"] > 1
        model = Model.measured(row["gpu"], 1 + in_processes)
        if _is_decode(row) and row["sums"] == "all_reduce":
            requests, context = _parse_size(row)
            gpus, cp = row["tp"] * row.get("cp", 1), row.get("cp", 1)
            layout, us = f"tp {row['tp']}, cp {cp}", row["step_us"]
            calculated = model.step_us(gpus, requests, context, cp=cp)
        elif row["name"].startswith(("all_reduce_norm_", "two_shots_norm_")):
            (count, width), us = _parse_size(row), row["us"]
            equivalent_rows = count * width * 2 // WIDTH  # rows of 4,096 values with the same number of bytes
            shots = 2 if row["name"].startswith("two_shots") else 1
            if shots != default_shots(count, width, row["num_devices"]):
                continue
            layout, calculated = (
                f"{row['num_devices']} GPUs",
                model.sum_us(row["num_devices"], equivalent_rows),
            )
        else:
            continue
        ratio = us / calculated
        note = "off" if abs(ratio - 1) > 0.1 else ""
        processes = "one per GPU" if in_processes else "one"
        lines.append([row["name"], layout, processes, f"{us:.1f}", f"{calculated:.1f}", f"{ratio:.2f}", note])
    head = ["row", "layout", "processes", "measured us", "calculated us", "ratio", "off by more than 10 %"]
    return _markdown([head, *lines])


def targets(rows: list[dict[str, Any]]) -> str:
    """Return a table of the targets for eight GPUs, beside the best rows."""

    def best(prefix: str, key: str, **columns: Any) -> float:
        values = [
            row[key]
            for row in rows
            if row["name"].startswith(prefix) and all(row.get(k) == v for k, v in columns.items())
        ]
        return max(values, default=float("nan"))

    share = best("large_", "gb_per_s", tp=8) / best("read_ceiling", "gb_per_s")
    steps = min(best("loop_", "steps", sums=name) for name in ("psum", "all_reduce"))
    lines = [
        [
            "attention, 8 x 128k, by heads",
            ">= 7.5",
            f"{best('attention_8x128k', 'speedup', split='heads'):.2f}",
        ],
        [
            "attention, 8 x 128k, by keys",
            ">= 7.2",
            f"{best('attention_8x128k', 'speedup', split='keys'):.2f}",
        ],
        ["step of a model with 70B sizes relative to reading its bytes, tp 8", "<= 1.35", f"{1 / share:.2f}"],
        ["steps without a hang, NCCL and peer memory", "10,000", f"{steps:,.0f}"],
    ]
    return _markdown([["measurement", "target", "measured"], *lines])


def table(model: Model) -> str:
    """Return the table of docs/scaling.md: replicas of 1 to 8 GPUs on a host, and one on four hosts."""
    columns = ["requests per host", "context", "layout", "ms per step", "tokens/s per host", "GB per GPU"]
    return _markdown([columns, *_rows(model)])


def _markdown(lines: list[list[str]]) -> str:
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _rows(model: Model) -> Iterator[list[str]]:
    for requests, context in REQUESTS:
        for size in SIZES:
            yield _row(model, requests, context, size)
        yield _row(model, requests, context, HOSTS * GPUS, hosts=HOSTS)


def _row(model: Model, host_requests: int, context: int, size: int, *, hosts: int = 1) -> list[str]:
    engines = hosts * GPUS // size
    requests = -(-hosts * host_requests // engines)
    layout = (
        f"{engines} x tp {size}" if hosts == 1 else f"{engines} x tp {GPUS}, cp {hosts}, over {hosts} hosts"
    )
    gigabytes = (WEIGHTS + KEYS * requests * context) / size / 1e9
    cells = [str(host_requests), str(context), layout]
    if gigabytes > MEMORY:
        return [*cells, "-", "-", f"{gigabytes:.0f} (too large)"]
    us = model.step_us(size, requests, context, hosts=hosts)
    return [*cells, f"{us / 1e3:.1f}", f"{host_requests / us * 1e6:,.0f}", f"{gigabytes:.0f}"]
