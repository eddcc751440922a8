"""Mixture-of-experts models beside transformers: a layer, a decode step and a prompt of 8k tokens."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks.models.graphs import Call, call_times
from benchmarks.models.phi3small import Step, jit_step
from benchmarks.runner import Rows
from jattn.models import load
from jattn.models.decoder import Decoder

LAYER_TOKENS = (64, 8192)
STEPS = {"decode": Step([1] * 64, [1024] * 64), "prefill": Step([8192], [8192])}


def main(names: list[str], out: str | None) -> None:
    """Record rows of transformers, then rows of jattn with the same checkpoints.

    transformers runs first, in a separate process per model, with the device's memory to itself.

    Args:
        names: Names of the models.
        out: Directory for the result rows; None is benchmarks/results.
    """
    with tempfile.TemporaryDirectory() as folder:
        directories = {name: pathlib.Path(folder) / name for name in names}
        for name, directory in directories.items():
            directory.mkdir()
            command = [sys.executable, "-m", "benchmarks.kernels.transformers_process", name, str(directory)]
            subprocess.run(command, check=True, timeout=300)
        rows = Rows("experts-beside-transformers", out)
        for name, directory in directories.items():
            measure(rows, name, directory)


def measure(rows: Rows, name: str, directory: pathlib.Path) -> None:
    """Record the rows of a model, after a comparison of its logits with those of transformers."""
    peer_rows = json.loads((directory / "times.json").read_text())
    for row in peer_rows:
        rows.add(name=name, by="transformers", **row)
    model = load(directory, progress=False)
    rows.add(name=name, case="check", **agreement(model, dict(np.load(directory / "expected.npz"))))
    for row in [*layer_times(model), *(step_times(model, case, step) for case, step in STEPS.items())]:
        same_case = [
            peer for peer in peer_rows if (peer["case"], peer["tokens"]) == (row["case"], row["tokens"])
        ]
        best = {
            f"best_{key}": min((peer[key] for peer in same_case if key in peer), default=None)
            for key in ("in_flight_us", "kernel_sum_us")
        }
        rows.add(name=name, by="jattn", **row, **best)


def agreement(model: Decoder, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the error of both libraries' bf16 logits against transformers in float32.

    An error is the root mean square of the differences relative to that of the float32 logits.

    Args:
        model: Model with the weights of the checkpoint.
        expected: Prompt and logits that `transformers_process.logits` saved.

    Raises:
        SystemExit: The error of jattn is more than twice that of transformers.
    """
    tokens = expected["tokens"]
    step = Step([len(tokens)], [len(tokens)])
    metadata, caches = step.metadata(), model.create_caches(1 + step.num_blocks, block_size=64)
    rows = np.flatnonzero(metadata.is_valid_token)
    ids = np.zeros(metadata.bucket.max_tokens, np.int32)
    ids[rows] = tokens
    run = nnx.jit(lambda model, ids, caches: model.logits(model(ids, caches, metadata)[0]))
    logits = np.asarray(run(model, jnp.asarray(ids), caches).astype(jnp.float32))[rows]
    exact = expected["f32"]
    differences = {"jattn": logits - exact, "transformers": expected["bf16"] - exact}
    errors = {
        f"{library}_error": float(np.sqrt(np.mean(difference**2) / np.mean(exact**2)))
        for library, difference in differences.items()
    }
    if not errors["jattn_error"] <= 2 * errors["transformers_error"]:
        raise SystemExit(f"the logits differ too much from those in float32: {errors}. No rows are recorded.")
    return errors


def layer_times(model: Decoder) -> list[dict[str, Any]]:
    """Return rows of a layer's router and experts, by number of tokens."""
    graph, state = nnx.split(model.layers[0].mlp)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    rows = []
    for tokens in LAYER_TOKENS:
        x = jax.random.normal(jax.random.key(0), (tokens, model.config.hidden_size), jnp.bfloat16)
        call = Call(lambda x: (run(state, x), x), x)
        rows.append({"case": "layer", "tokens": tokens, **call_and_kernel_times(call)})
    return rows


def step_times(model: Decoder, case: str, step: Step) -> dict[str, Any]:
    """Return a row of a step of the whole model."""
    graph, params = nnx.split(model)
    metadata: jattn.BatchMetadata = step.metadata()
    ids = jax.random.randint(jax.random.key(1), (metadata.bucket.max_tokens,), 0, model.config.vocab_size)
    caches = model.create_caches(1 + step.num_blocks, block_size=64)
    run = jit_step(graph)
    call = Call(lambda caches: run(params, caches, ids, metadata), caches)
    return {"case": case, "tokens": sum(step.query_lens), **call_and_kernel_times(call)}


def call_and_kernel_times(call: Call) -> dict[str, Any]:
    """Return microseconds of a call: in flight, and the sum of its kernels."""
    in_flight_us = call_times(call, rounds=10)["in_flight_us"]
    _, runs = profiler.measure(call, aggregate=False, iterations=3)()
    sums = [1e3 * sum(ms for _, ms in run) for run in runs]
    return {"in_flight_us": in_flight_us, "kernel_sum_us": statistics.median(sums)}
