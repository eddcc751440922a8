"""Loops of decode steps on several devices: many from the host, that they end; `decode_loop` against one."""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.mesh.steps import (
    BLOCK_SIZE,
    TOKEN_TOLERANCE,
    Steps,
    StepSize,
    filled,
    metadata_of,
    token_gap,
    ways,
)
from benchmarks.models.random_decoder import random_decoder
from jattn.models import use_peer_memory
from jattn.parallel import TP
from jattn.runtime.decode_loop import decode_loop

PARTS = 10  # of a loop: a row each, so that one that hangs leaves those before it


def measure_loop(
    config: dict[str, Any], size: StepSize, steps: int, mesh: Mesh, sums: str
) -> Iterator[dict[str, Any]]:
    """A row for each tenth of the steps, in flight; the last of each must be the first step's, to the bit.

    Args:
        config: Of the model.
        size: Requests of a step, and their context.
        steps: How many, a multiple of ten.
        mesh: The devices.
        sums: Implementation of the all-reduce: "psum" or "all_reduce".
    """
    model = random_decoder(config, mesh)
    if sums == "all_reduce":
        use_peer_memory(model, max_rows=max(size.reqs, 2))
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
        how = {"sums": sums, "steps": part * steps // PARTS}
        yield {"name": f"loop_{size.name}", **how, "step_us": us}


def measure_decode_loop(
    config: dict[str, Any], size: StepSize, rounds: int, mesh: Mesh, sums: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Rounds of `decode_loop`, greedy, on one device and on the mesh: all rounds are one call.

    Each run must make the same tokens, and the mesh's first must be good ones by one device's logits.

    Args:
        config: Of the model.
        size: Requests, and their context at first.
        rounds: Of a loop.
        mesh: The devices.
        sums: Implementations of the all-reduce on the mesh.
    """
    logits, of_one = None, 0.0
    for on, by_peers in ways([mesh], sums):
        model = random_decoder(config, on)
        if by_peers:
            use_peer_memory(model, max_rows=max(size.reqs, 2))
        loop = DeviceLoop(model, size, rounds)
        del model
        if on is None:
            logits = loop.first_logits()
        assert logits is not None
        gap = token_gap(loop.tokens[: size.reqs, 0], logits)
        if not gap <= TOKEN_TOLERANCE:
            raise SystemExit(f"first tokens are {gap} deviations off one device's best: no row")
        us = loop.microseconds()
        of_one = us if on is None else of_one
        tp = 1 if on is None else on.shape[TP]
        how = {"tp": tp, "sums": "all_reduce" if by_peers else "psum", "rounds": rounds}
        checked = {"token_gap": gap, "first_run_s": loop.first_run_s}
        name = f"decode_loop_{size.name}"
        yield {"name": name, **how, "step_us": us, "of_one": us / of_one, **checked}
        del loop
        gc.collect()  # one model and its caches at a time


class DeviceLoop:
    """A model's decode loop, greedy, always from the same tokens.

    Attributes:
        tokens: What it makes: [rows, rounds].
        first_run_s: Seconds of its first run, compiled in it.
    """

    def __init__(self, model: Any, size: StepSize, rounds: int) -> None:
        """Runs it once."""
        graphdef, self._params = nnx.split(model)

        def step(params: Any, caches: Any, metadata: Any, tokens: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params)
            hidden, caches = model(tokens, caches, metadata)
            return model.logits(hidden), caches

        self._step = jax.tree_util.Partial(step)
        self._greedy = jax.tree_util.Partial(lambda logits, index: jnp.argmax(logits, axis=-1))
        self._rounds = rounds
        self._metadata = metadata_of(size, room=rounds)
        self._ids: Any = np.arange(1, self._metadata.bucket.max_decodes + 1, dtype=np.int32)
        num_blocks = self._metadata.block_table.size + 1
        self._caches = filled(model.create_caches(num_blocks, block_size=BLOCK_SIZE))
        start = time.perf_counter()
        self.tokens = np.asarray(self._run())
        self.first_run_s = time.perf_counter() - start

    def first_logits(self) -> np.ndarray:
        """Of the loop's first step: [rows, vocab]."""
        step = jax.jit(lambda *args: self._step(*args)[0])
        rows = int(self._metadata.num_decodes)
        return np.asarray(step(self._params, self._caches, self._metadata, self._ids), np.float32)[:rows]

    def microseconds(self) -> float:
        """Of a round: the slope between one loop in flight and three."""
        slopes = [(self._seconds(3) - self._seconds(1)) / (2 * self._rounds) for _ in range(3)]
        return 1e6 * statistics.median(slopes)

    def _seconds(self, count: int) -> float:
        start = time.perf_counter()
        made = [self._run() for _ in range(count)]
        if not all(np.array_equal(tokens, self.tokens) for tokens in made):
            raise SystemExit("a loop made other tokens than the first: no row")
        return time.perf_counter() - start

    def _run(self) -> jax.Array:
        args = self._step, self._params, self._caches, self._metadata, self._ids
        out = decode_loop(*args, num_steps=self._rounds, sample=self._greedy)
        self._caches = out.caches
        return out.tokens
