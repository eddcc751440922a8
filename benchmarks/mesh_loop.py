"""Many decode steps of a small model on several devices: that they end, each as the first did."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks.mesh_steps import Steps
from benchmarks.random_decoder import random_decoder
from jattn.models import use_peer_memory

PARTS = 10  # of a loop: a row each, so that one that hangs leaves those before it


def measure_loop(
    config: dict[str, Any], size: tuple[int, int], steps: int, mesh: Mesh, *, uses_peers: bool
) -> Iterator[dict[str, Any]]:
    """A row for each tenth of the steps, in flight; the last of each must be the first step's, to the bit.

    Args:
        config: Of the model.
        size: Requests of a step, and their context.
        steps: How many, a multiple of ten.
        mesh: The devices.
        uses_peers: Sums are all_reduce's; else XLA's.
    """
    model = random_decoder(config, mesh)
    if uses_peers:
        use_peer_memory(model, max_rows=max(size[0], 2))
    run = Steps(model, [size])
    wanted = run.results(size)
    for part in range(1, PARTS + 1):
        start = time.perf_counter()
        for _ in range(steps // PARTS - 1):
            run.start(size)
        found = run.results(size)
        us = 1e6 * (time.perf_counter() - start) / (steps // PARTS)
        if not all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True)):
            raise SystemExit(f"step {part * steps // PARTS} is not the first one's: no row")
        how = {"sums": "all_reduce" if uses_peers else "psum", "steps": part * steps // PARTS}
        yield {"name": f"loop_{size[0]}x{size[1]}", **how, "step_us": us}
