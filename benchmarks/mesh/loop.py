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

from benchmarks.mesh.processes import on_host
from benchmarks.mesh.steps import (
    BLOCK_SIZE,
    TOKEN_TOLERANCE,
    Steps,
    StepSize,
    bytes_per_device,
    layouts,
    randomize,
    step_metadata,
    token_gap,
)
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import read_ceiling
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
        loop = DeviceLoop(_create_model(config, layout, size, uses_peers), size, rounds)
        if layout is None:
            logits = loop.first_logits()
        assert logits is not None
        columns = _first_run(loop, logits)
        us = loop.step_us()
        one_device_us = us if layout is None else one_device_us
        yield {
            "name": f"decode_loop_{size.name}",
            "tp": 1 if layout is None else layout.shape[TP],
            "sums": "all_reduce" if uses_peers else "psum",
            "rounds": rounds,
            "step_us": us,
            "of_one": us / one_device_us,
            **columns,
        }
        del loop
        gc.collect()  # one model and its caches at a time


def measure_large_loop(
    config: dict[str, Any], size: StepSize, quantization: str, rounds: int, mesh: Mesh, sums: str
) -> Iterator[dict[str, Any]]:
    """Yield a row of greedy decode_loop calls of a model that is too large for one device.

    On a GPU, a second row has the read ceiling. The first tokens are compared with the logits of XLA's
    attention on the mesh.

    Args:
        config: Contents of the model's config.json.
        size: Size of the first step.
        quantization: Format of the caches.
        rounds: Number of steps per call.
        mesh: Devices.
        sums: Implementation of the all-reduce: "psum" or "all_reduce".

    Raises:
        SystemExit: Calls return different tokens, or the first tokens are far from the best ones.
    """
    model = random_decoder(config, mesh, implementation="xla")
    logits = DeviceLoop(model, size, rounds, quantization=quantization).first_logits()
    del model
    gc.collect()  # one model and its caches at a time
    model = _create_model(config, mesh, size, sums == "all_reduce")
    loop = DeviceLoop(model, size, rounds, quantization=quantization)
    columns = _first_run(loop, logits)
    us, num_bytes = loop.step_us(), loop.bytes_per_device
    yield {
        "name": f"large_loop_{size.name}",
        "tp": mesh.shape[TP],
        "sums": sums,
        "rounds": rounds,
        "step_us": us,
        "gb_of_device": num_bytes / 1e9,
        "gb_per_s": num_bytes / us / 1e3,
        **columns,
    }
    if jax.default_backend() == "gpu":
        yield {"name": "read_ceiling", "gb_per_s": read_ceiling()}


def _create_model(config: dict[str, Any], mesh: Mesh | None, size: StepSize, uses_peers: bool) -> Any:
    model = random_decoder(config, mesh)
    if uses_peers:
        use_peer_memory(model, max_rows=max(size.reqs, 2))
    return model


def _first_run(loop: "DeviceLoop", logits: np.ndarray) -> dict[str, float]:
    """Run a loop for the first time and compare its first tokens with the expected logits [reqs, vocab]."""
    start = time.perf_counter()
    tokens = loop.run()
    seconds = time.perf_counter() - start
    gap = token_gap(tokens[: len(logits), 0], logits)
    if not gap <= TOKEN_TOLERANCE:
        raise SystemExit(f"first tokens are {gap} standard deviations below the best. No row is recorded.")
    return {"token_gap": gap, "first_run_s": seconds}


class DeviceLoop:
    """A greedy decode_loop that always starts with the same tokens."""

    def __init__(self, model: Any, size: StepSize, rounds: int, *, quantization: str | None = None) -> None:
        """Create the caches.

        Args:
            model: Model to run.
            size: Size of the first step.
            rounds: Number of steps per call.
            quantization: Format of the caches; None stores 16 bits.
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
        self._caches = randomize(
            model.create_caches(num_blocks, block_size=BLOCK_SIZE, quantization=quantization)
        )

    @property
    def bytes_per_device(self) -> int:
        """Return the bytes of caches and weights on a device; the last step reads nearly all of them."""
        return bytes_per_device(self._params, self._caches)

    def first_logits(self) -> np.ndarray:
        """Return the logits of the first step [reqs, vocab]."""
        step = jax.jit(self._step, donate_argnums=1)
        logits, self._caches = step(self._params, self._caches, self._metadata, self._ids)
        return on_host(logits).astype(np.float32)[: int(self._metadata.num_decodes)]

    def run(self) -> np.ndarray:
        """Run the loop and return its tokens [rows, rounds]."""
        return on_host(self._start())

    def step_us(self) -> float:
        """Return the microseconds per step, from the difference between one call in flight and three.

        Raises:
            SystemExit: A call returned other tokens than another one.
        """
        expected = self.run()
        seconds = [
            (self._seconds(3, expected) - self._seconds(1, expected)) / (2 * self._rounds) for _ in range(3)
        ]
        return 1e6 * statistics.median(seconds)

    def _seconds(self, count: int, expected: np.ndarray) -> float:
        start = time.perf_counter()
        runs = [self._start() for _ in range(count)]
        if not all(np.array_equal(on_host(tokens), expected) for tokens in runs):
            raise SystemExit("a call returned other tokens than the first one. No row is recorded.")
        return time.perf_counter() - start

    def _start(self) -> jax.Array:
        args = self._step, self._params, self._caches, self._metadata, self._ids
        out = decode_loop(*args, num_steps=self._rounds, sample=self._greedy)
        self._caches = out.caches
        return out.tokens
