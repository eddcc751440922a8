"""Measures every tile size that fits, so that the fastest can stand in the kernel's table."""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
from typing import Any

from benchmarks.kernels.prefill import Work, measure, name_of
from benchmarks.runner import Rows
from pallas_kernels.cases import PREFILL
from pallas_kernels.varlen_prefill import SHARED_MEMORY, PrefillSizes

KEYS_AND_STAGES = ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (128, 4))
VARIANTS = ((None, "plain"), (16, "plain"), (None, "soft_cap"), (None, "alibi"))  # block size and modifier
# Padded head_dim of varlen_prefill's table -> the (case, block size, modifier) that decide it.
PREFILL_ROWS: dict[int, tuple[tuple[str, int | None, str], ...]] = {
    64: tuple(("p_d64_8x2k", *variant) for variant in VARIANTS),
    128: (
        ("p_1x8k", None, "plain"),
        ("p_32x512", None, "plain"),
        *(("p_8x2k", *variant) for variant in VARIANTS),
        ("p_8x2k", None, "window"),
    ),
    192: tuple(("p_d192_1x8k", *variant) for variant in VARIANTS),
    256: tuple(("p_d256_1x8k", *variant) for variant in VARIANTS),
}
WIDTHS = sorted(PREFILL_ROWS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks tune` takes."""
    parser.add_argument("kernel", choices=["prefill"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=WIDTHS, choices=WIDTHS)
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that compile; one measures at a time"
    )
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Measures, shows how far it is, and prints the table that the rows make."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU's memory
    rows = Rows("prefill-tiles", arguments.out)
    works = [
        Work(case=PREFILL[name], block_size=block_size, modifier=modifier, sizes=sizes)
        for width, measured in PREFILL_ROWS.items()
        if width in arguments.head_dim
        for (name, block_size, modifier), sizes in itertools.product(measured, candidates(width))
    ]
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(arguments.processes, _keep_lock, (fresh.Lock(),)) as pool:
        for nth, (row, error) in enumerate(pool.imap_unordered(_row, works), 1):
            print(f"{nth}/{len(works)} {error}", flush=True)
            if row is not None:
                rows.add(**row)
    for width, tiles in fastest(rows.path).items():
        print(f"{width}: {tiles}", flush=True)


_device: contextlib.AbstractContextManager[Any]


def _keep_lock(lock: Any) -> None:
    global _device
    _device = lock


def _row(work: Work) -> tuple[dict[str, Any] | None, str]:
    """A row, or why there is none; the other rows still count."""
    try:
        return measure(work, _device), ""
    except Exception as error:
        return None, f"{work}: {type(error).__name__}: {error}"[:300]


def candidates(width: int) -> list[PrefillSizes]:
    """The tiles that fit shared memory, with two buffers of queries where those do."""
    found = []
    for (tile_kv, stages), warpgroups in itertools.product(KEYS_AND_STAGES, (2, 3)):
        # Three warpgroups have 160 registers each: no room for wide heads beside scores of many keys.
        if warpgroups == 3 and width + tile_kv > 192:
            continue
        for buffers in (2, 1):
            sizes = PrefillSizes(tile_kv=tile_kv, stages=stages, warpgroups=warpgroups, query_buffers=buffers)
            if sizes.shared_memory(width) <= SHARED_MEMORY:
                found.append(sizes)
                break
    return found


def fastest(path: pathlib.Path) -> dict[int, str]:
    """The tiles of each entry of the table whose rows are all there: least time, by geometric mean."""
    times: dict[tuple[str, int | None, str, str], float] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        times[row["name"], row["block_size"], row["modifier"], row["tiles"]] = row["us"]
    table = {}
    for width, measured in PREFILL_ROWS.items():
        means = {}
        for tiles in map(name_of, candidates(width)):
            taken = [times.get((*row, tiles), math.inf) for row in measured]
            means[tiles] = sum(map(math.log, taken))
        best = min(means, key=means.__getitem__)
        if means[best] < math.inf:
            table[width] = best
    return table
