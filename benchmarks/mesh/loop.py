"""Loops of decode steps on several devices: many steps from the host, and `decode_loop`."""

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
    layouts,
    randomize,
    step_metadata,
    token_gap,
)
from benchmarks.models.random_decoder import random_decoder
from jattn.models import use_peer_memory
from jattn.parallel import TP
from jattn.runtime.decode_loop import decode_loop

NUM_PARTS = 10  # parts of a loop, each with a row, so that a loop that hangs leaves rows


def measure_loop(
    config: dict[str, Any], size: StepSize, steps: int, mesh: Mesh, sums: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each tenth of a loop of steps in flight.

    Args:
        config: Contents of the model's config.json.
        size: Size of the step.
        steps: Number of steps, a multiple of ten.
        mesh: Devices.
        sums: Implementation of the all-reduce: "psum" or "all_reduce".

    Raises:
        SystemExit: The results of a part's last step are not bit-identical to those of the first step.
    """
    model = random_decoder(config, mesh)
    if sums == "all_reduce":
        use_peer_memory(model, max_rows=max(size.reqs, 2))
    run = Steps(model, [size])
    expected = run.results(size)
    for part in range(1, NUM_PARTS + 1):
        start = time.perf_counter()
        for _ in range(steps // NUM_PARTS - 1):
            run.start(size)
        results = run.results(size)
        us = 1e6 * (time.perf_counter() - start) / (steps // NUM_PARTS)
        num_steps = part * steps // NUM_PARTS
        if not all(map(np.array_equal, results, expected)):
            raise SystemExit(
                f"results of step {num_steps} differ from those of the first. No row is recorded."
            )
        yield {"name": f"loop_{size.name}", "sums": sums, "steps": num_steps, "step_us": us}


def measure_decode_loop(
    config: dict[str, Any], size: StepSize, rounds: int, mesh: Mesh, sums: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows of greedy decode_loop calls on one device and on the mesh.

    Args:
        config: Contents of the model's config.json.
        size: Size of the first step.
        rounds: Number of steps per call.
        mesh: Devices.
        sums: Implementations of the all-reduce on the mesh.

    Raises:
        SystemExit: Calls return different tokens, or the first tokens on the mesh are far from the best ones
            by the logits of one device.
    """
    logits, one_device_us = None, 0.0
    for layout, uses_peers in layouts([mesh], sums):
        model = random_decoder(config, layout)
        if uses_peers:
            use_peer_memory(model, max_rows=max(size.reqs, 2))
        loop = DeviceLoop(model, size, rounds)
        del model
        if layout is None:
            logits = loop.first_logits()
        assert logits is not None
        gap = token_gap(loop.tokens[: size.reqs, 0], logits)
        if not gap <= TOKEN_TOLERANCE:
            raise SystemExit(
                f"first tokens are {gap} standard deviations below the best. No row is recorded."
            )
        us = loop.step_us()
        one_device_us = us if layout is None else one_device_us
        yield {
            "name": f"decode_loop_{size.name}",
            "tp": 1 if layout is None else layout.shape[TP],
            "sums": "all_reduce" if uses_peers else "psum",
            "rounds": rounds,
            "step_us": us,
            "of_one": us / one_device_us,
            "token_gap": gap,
            "first_run_s": loop.first_run_s,
        }
        del loop
        gc.collect()  # one model and its caches at a time


class DeviceLoop:
    """A greedy decode_loop that always starts with the same tokens.

    Attributes:
        tokens: Tokens of the first run [rows, rounds].
        first_run_s: Seconds of the first run, including compilation.
    """

    def __init__(self, model: Any, size: StepSize, rounds: int) -> None:
        """Run the loop once.

        Args:
            model: Model to run.
            size: Size of the first step.
            rounds: Number of steps per call.
        """
        graphdef, self._params = nnx.split(model)

        def step(params: Any, caches: Any, metadata: Any, tokens: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params)
            hidden, caches = model(tokens, caches, metadata)
            return model.logits(hidden), caches

        self._step = jax.tree_util.Partial(step)
        self._greedy = jax.tree_util.Partial(lambda logits, index: jnp.argmax(logits, axis=-1))
        self._rounds = rounds
        self._metadata = step_metadata(size, extra_tokens=rounds)
        self._ids: Any = np.arange(1, self._metadata.bucket.max_decodes + 1, dtype=np.int32)
        num_blocks = self._metadata.block_table.size + 1
        self._caches = randomize(model.create_caches(num_blocks, block_size=BLOCK_SIZE))
        start = time.perf_counter()
        self.tokens = np.asarray(self._run())
        self.first_run_s = time.perf_counter() - start

    def first_logits(self) -> np.ndarray:
        """Return the logits of the first step [rows, vocab]."""
        step = jax.jit(lambda *args: self._step(*args)[0])
        rows = int(self._metadata.num_decodes)
        return np.asarray(step(self._params, self._caches, self._metadata, self._ids), np.float32)[:rows]

    def step_us(self) -> float:
        """Return the microseconds per step, from the difference between one call in flight and three."""
        seconds = [(self._seconds(3) - self._seconds(1)) / (2 * self._rounds) for _ in range(3)]
        return 1e6 * statistics.median(seconds)

    def _seconds(self, count: int) -> float:
        start = time.perf_counter()
        runs = [self._run() for _ in range(count)]
        if not all(np.array_equal(tokens, self.tokens) for tokens in runs):
            raise SystemExit("a call returned other tokens than the first one. No row is recorded.")
        return time.perf_counter() - start

    def _run(self) -> jax.Array:
        args = self._step, self._params, self._caches, self._metadata, self._ids
        out = decode_loop(*args, num_steps=self._rounds, sample=self._greedy)
        self._caches = out.caches
        return out.tokens
