"""What more GPUs and hosts would bring, calculated from what two H200 took.

A step of decodes is its bytes at the read ceiling, on each GPU its part; its sums over the GPUs; and a
rest, small kernels and the host: what a measured step took beyond these. Nothing here is a measurement.
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
BY, BEST = ("all_reduce_norm_", "sum_norm_"), {(1, "psum"), (2, "all_reduce")}  # rows of it that count
REQUESTS = ((1, 1024), (1, 131_072), (1, 1_000_000), (64, 4096), (256, 4096), (512, 1024))  # what is planned
GPUS, HOSTS, MEMORY = 8, 4, 135  # of a host; of them; GB of a GPU
SIZES = (1, 2, 4, 8)
READ = 4.47e12  # bytes a second, of a sum of 4 GiB on an H200
H100_READ = 3.05e12  # bytes a second, of decode attention over 8 x 128k on an H100
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
H100_ROWS = tuple(f"mesh-{name}-nvidia-h100-80gb-hbm3-2026-11-26.jsonl" for name in ("one-row", "prompts"))
H200_ROWS = tuple(f"mesh-{name}-nvidia-h200-2026-11-25.jsonl" for name in ("sums-processes", "processes"))
# By GPU and number of processes on two GPUs: rate of reading, rows of sums and of steps.
SOURCES = {
    (H200, 1): (READ, (MEASURED, MEASURED)),
    (H200, 2): (READ, H200_ROWS),
    (H100, 1): (H100_READ, H100_ROWS),
    (H100, 2): (H100_READ, H100_ROWS),
}
LAYERS, ATTENTION = 36, 3.02e9  # bytes of the attention weights, which ranks of `cp` replicate
WEIGHTS, KEYS, SUMS = 15.1e9, 147_456, 73  # bytes in all, bytes of a token; two sums a layer, and one
# Not measured: 400 Gb/s a GPU between hosts, and what a message takes there.
NETWORK, NETWORK_US = 50e9, 20.0
WIDTH = 4096 * 2  # bytes of a row that is summed


class Model(NamedTuple):
    """What two GPUs of one host took.

    Attributes:
        read: Bytes per second that a GPU reads.
        sums_us: (rows, microseconds of a sum with residual and norm), by the kernel.
        others_us: The same by XLA, which serves several hosts.
        rests_us: GPUs (1 or 2) to (rows, microseconds of a step beyond its bytes and sums).
    """

    read: float
    sums_us: dict[int, float]
    others_us: dict[int, float]
    rests_us: dict[int, dict[int, float]]

    @classmethod
    def measured(cls, gpu: str = H200, processes: int = 1) -> "Model":
        """Return the model of two GPUs' rows of the suite `mesh`; of two rows of a sum the faster counts.

        Args:
            gpu: Name of the GPU.
            processes: 1, or 2 for one process per GPU. The page has the model of one process on H200s.
        """
        read, (sums_file, steps_file) = SOURCES[gpu, processes]
        sums: dict[int, float] = {}
        others: dict[int, float] = {}
        for row in read_rows(sums_file):
            for prefix, found in zip(BY, (sums, others), strict=True):
                if row["name"].startswith(prefix):
                    found[_sizes(row)[0]] = min(found.get(_sizes(row)[0], row["us"]), row["us"])
        rests: dict[int, dict[int, float]] = {1: {}, 2: {}}
        for row in read_rows(steps_file):
            is_used = _is_decode(row) and row.get("processes", 1) == processes
            if is_used and (row["tp"], row["sums"]) in BEST:
                requests, context = _sizes(row)
                known = _bytes_us(row["tp"], requests, context, read)
                known += SUMS * _at(sums, requests) * (row["tp"] > 1)
                rests[row["tp"]][requests] = row["step_us"] - known
        return cls(read, sums, others, rests)

    def step_us(self, gpus: int, requests: int, context: int, *, hosts: int = 1, cp: int = 1) -> float:
        """A step of so many requests on so many GPUs, of so many hosts together; `cp` is within a host."""
        sums = 0.0
        if gpus > 1:
            sums = SUMS * self.sum_us(gpus, requests)
        if cp > 1:  # log-sum-exps: one exchange per layer, as long as the sum of a row
            sums += LAYERS * self.sum_us(2, 1) + 1e6 * ATTENTION * (cp - 1) / gpus / self.read
        if hosts > 1:
            sums = SUMS * _at(self.others_us, requests)
            sums += SUMS * (NETWORK_US + 1e6 * 2 * requests * WIDTH / NETWORK)
        known = _bytes_us(gpus, requests, context, self.read) + sums
        return known + _at(self.rests_us[min(gpus, 2)], requests)

    def sum_us(self, gpus: int, rows: int) -> float:
        """Return the microseconds of an all-reduce of so many rows of 4,096 values through peer memory."""
        return _at(self.sums_us, rows) + _more_us(gpus, rows)


def _sizes(row: dict[str, Any]) -> tuple[int, int]:
    """Of a row NAME_1x1024: (1, 1024)."""
    rows, other = row["name"].split("_")[-1].split("x")
    return int(rows), int(other)


def _more_us(gpus: int, rows: int) -> float:
    """How much longer a sum takes than one of two GPUs: for what more is sent, and the second shot's wait."""
    shots = default_shots(rows, WIDTH // 2, gpus)
    more = bytes_sent(rows * WIDTH, gpus, shots) - bytes_sent(rows * WIDTH, 2, 1)
    return (shots - 1) * WAIT_US + more / LINK_BYTES_PER_US


def _bytes_us(gpus: int, requests: int, context: int, read: float) -> float:
    return 1e6 * (WEIGHTS + KEYS * requests * context) / gpus / read


def _is_decode(row: dict[str, Any]) -> bool:
    return row["name"].startswith("step_") and not row["name"].endswith("_prompt")


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
    parser.add_argument("--compare", nargs="+", metavar="FILE", help="rows of `mesh` to compare with")
    parser.add_argument("--out", help="ignored: a calculation has no rows")


def main(arguments: argparse.Namespace) -> None:
    """The table of docs/scaling.md, or a comparison of measured rows with the calculation."""
    if arguments.compare is None:
        print(table(Model.measured()), end="")
        return
    rows = [
        json.loads(line) for file in arguments.compare for line in pathlib.Path(file).read_text().splitlines()
    ]
    print(comparison(rows))
    print(targets(rows), end="")


def comparison(rows: list[dict[str, Any]]) -> str:
    """Return a table of measured decode steps and sums beside what the model of two GPUs calculates."""
    lines = []
    for row in rows:
        in_processes = row["processes"] > 1
        model = Model.measured(row["gpu"], 1 + in_processes)
        if _is_decode(row) and row["sums"] == "all_reduce":
            requests, context = _sizes(row)
            gpus, cp = row["tp"] * row.get("cp", 1), row.get("cp", 1)
            layout, us = f"tp {row['tp']}, cp {cp}", row["step_us"]
            calculated = model.step_us(gpus, requests, context, cp=cp)
        elif row["name"].startswith(("all_reduce_norm_", "two_shots_norm_")):
            (count, width), us = _sizes(row), row["us"]
            equal = count * width * 2 // WIDTH  # rows of 4,096 with as many bytes
            shots = 2 if row["name"].startswith("two_shots") else 1
            if shots != default_shots(count, width, row["num_devices"]):
                continue
            layout, calculated = f"{row['num_devices']} GPUs", model.sum_us(row["num_devices"], equal)
        else:
            continue
        ratio = us / calculated
        note = "off" if abs(ratio - 1) > 0.1 else ""
        processes = "one per GPU" if in_processes else "one"
        lines.append([row["name"], layout, processes, f"{us:.1f}", f"{calculated:.1f}", f"{ratio:.2f}", note])
    head = ["row", "layout", "processes", "measured us", "calculated us", "ratio", "off by more than 10 %"]
    return _markdown([head, *lines])


def targets(rows: list[dict[str, Any]]) -> str:
    """Return a table of what eight GPUs should reach, and the best of the rows."""

    def best(prefix: str, key: str, **columns: Any) -> float:
        found = [
            row[key]
            for row in rows
            if row["name"].startswith(prefix) and all(row.get(k) == v for k, v in columns.items())
        ]
        return max(found, default=float("nan"))

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
        ["70B-wide step over its bytes' floor, tp 8", "<= 1.35", f"{1 / share:.2f}"],
        ["steps without a hang, NCCL and peer memory", "10,000", f"{steps:,.0f}"],
    ]
    return _markdown([["measurement", "target", "measured"], *lines])


def table(model: Model) -> str:
    """A host's GPUs as replicas of 1, 2, 4 and 8 each, and four hosts as one, for so many requests a host."""
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
