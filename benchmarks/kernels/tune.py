"""Measure every tile size that fits, to choose the entries of the kernel's table of sizes."""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
from typing import Any

from benchmarks.kernels.cases import PREFILL
from benchmarks.kernels.prefill import Work, format_sizes, measure
from benchmarks.runner import Rows
from jattn.runtime.executables import available_cores
from pallas_kernels.varlen_prefill import SHARED_MEMORY, PrefillSizes

KEYS_AND_STAGES = ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3), (128, 4))
VARIANTS = ((None, "plain"), (16, "plain"), (None, "soft_cap"), (None, "alibi"))  # block size and modifier
# Padded head_dim in varlen_prefill's table -> the (case, block size, modifier) that determine its entry.
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
HEAD_DIMS = sorted(PREFILL_ROWS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks tune`."""
    parser.add_argument("kernel", choices=["prefill"], help="Kernel to tune.")
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS, help="Padded head sizes."
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=available_cores(),
        help="Processes that compile. One measures at a time.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure all candidates, print the progress, and print the table that follows from the rows."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU's memory
    rows = Rows("prefill-tiles", arguments.out)
    works = [
        Work(case=PREFILL[name], block_size=block_size, modifier=modifier, sizes=sizes)
        for head_dim, cases in PREFILL_ROWS.items()
        if head_dim in arguments.head_dim
        for (name, block_size, modifier), sizes in itertools.product(cases, candidates(head_dim))
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, _set_device_lock, (context.Lock(),)) as pool:
        for num_done, (row, error) in enumerate(pool.imap_unordered(_measure, works), 1):
            print(f"{num_done}/{len(works)} {error}", flush=True)
            if row is not None:
                rows.add(**row)
    for head_dim, tiles in fastest(rows.path).items():
        print(f"{head_dim}: {tiles}", flush=True)


_device_lock: contextlib.AbstractContextManager[Any]


def _set_device_lock(lock: Any) -> None:
    global _device_lock
    _device_lock = lock


def _measure(work: Work) -> tuple[dict[str, Any] | None, str]:
    """Return a row and an empty string, or None and the error message."""
    try:
        return measure(work, _device_lock), ""
    except Exception as error:
        return None, f"{work}: {type(error).__name__}: {error}"[:300]


def candidates(head_dim: int) -> list[PrefillSizes]:
    """Return the sizes that fit in shared memory, with two query buffers where those fit, too."""
    fitting = []
    for (tile_kv, stages), warpgroups in itertools.product(KEYS_AND_STAGES, (2, 3)):
        # With three warpgroups a thread has 160 registers, too few for wide heads and wide score tiles.
        if warpgroups == 3 and head_dim + tile_kv > 192:
            continue
        for buffers in (2, 1):
            sizes = PrefillSizes(tile_kv=tile_kv, stages=stages, warpgroups=warpgroups, query_buffers=buffers)
            if sizes.shared_memory(head_dim) <= SHARED_MEMORY:
                fitting.append(sizes)
                break
    return fitting


def fastest(path: pathlib.Path) -> dict[int, str]:
    """Return head_dim -> name of the sizes with the smallest geometric mean time.

    Args:
        path: File of rows. Sizes without a row for every case are left out, as are head sizes without any
            complete sizes.
    """
    times: dict[tuple[str, int | None, str, str], float] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        times[row["name"], row["block_size"], row["modifier"], row["tiles"]] = row["us"]
    table = {}
    for head_dim, cases in PREFILL_ROWS.items():
        log_sums = {}
        for tiles in map(format_sizes, candidates(head_dim)):
            case_times = [times.get((*case, tiles), math.inf) for case in cases]
            log_sums[tiles] = sum(map(math.log, case_times))
        best = min(log_sums, key=log_sums.__getitem__)
        if log_sums[best] < math.inf:
            table[head_dim] = best
    return table
