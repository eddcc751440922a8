"""Models with experts beside transformers: the same weights, a decode step of 64 requests, a prompt of 8k."""

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
from benchmarks.models.graphs import Call, walls
from benchmarks.models.phi3small import Step, step_of
from benchmarks.runner import Rows
from jattn.models import load
from jattn.models.decoder import Decoder

LAYER_TOKENS = (64, 8192)
STEPS = {"decode": Step([1] * 64, [1024] * 64), "prefill": Step([8192], [8192])}


def main(names: list[str], out: str | None) -> None:
    """Rows of transformers, then of this library with the same checkpoint, where its logits are as near.

    transformers comes first, in processes of its own: nothing else is in the device's memory then.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = {name: pathlib.Path(folder) / name for name in names}
        for name, directory in made.items():
            directory.mkdir()
            command = [sys.executable, "-m", "benchmarks.kernels.transformers_process", name, str(directory)]
            subprocess.run(command, check=True, timeout=300)
        rows = Rows("experts-beside-transformers", out)
        for name, directory in made.items():
            measure(rows, name, directory)


def measure(rows: Rows, name: str, directory: pathlib.Path) -> None:
    """One model's rows."""
    theirs = json.loads((directory / "times.json").read_text())
    for row in theirs:
        rows.add(name=name, by="transformers", **row)
    model = load(directory, progress=False)
    rows.add(name=name, case="check", **agreement(model, dict(np.load(directory / "expected.npz"))))
    ours = [*layer_times(model), *(step_times(model, case, step) for case, step in STEPS.items())]
    for row in ours:
        like = [one for one in theirs if (one["case"], one["tokens"]) == (row["case"], row["tokens"])]
        best = {
            f"best_{key}": min((one[key] for one in like if key in one), default=None)
            for key in ("in_flight_us", "kernel_sum_us")
        }
        rows.add(name=name, by="jattn", **row, **best)


def agreement(model: Decoder, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Root mean squares of both libraries' errors against transformers in f32, over its logits'.

    Raises:
        SystemExit: This library's is more than twice the other's.
    """
    tokens = expected["tokens"]
    step = Step([len(tokens)], [len(tokens)])
    metadata, caches = step.metadata(), model.create_caches(1 + step.num_blocks, block_size=64)
    places = np.flatnonzero(metadata.is_valid_token)
    ids = np.zeros(metadata.bucket.max_tokens, np.int32)
    ids[places] = tokens
    run = nnx.jit(lambda model, ids, caches: model.logits(model(ids, caches, metadata)[0]))
    found = np.asarray(run(model, jnp.asarray(ids), caches).astype(jnp.float32))[places]
    exact = expected["f32"]
    off = {"jattn": found - exact, "transformers": expected["bf16"] - exact}
    errors = {f"{key}_error": float(np.sqrt(np.mean(of**2) / np.mean(exact**2))) for key, of in off.items()}
    if not errors["jattn_error"] <= 2 * errors["transformers_error"]:
        raise SystemExit(f"the logits are off f32's: {errors}: no rows")
    return errors


def layer_times(model: Decoder) -> list[dict[str, Any]]:
    """A layer's router and experts alone."""
    graph, state = nnx.split(model.layers[0].mlp)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    rows = []
    for tokens in LAYER_TOKENS:
        x = jax.random.normal(jax.random.key(0), (tokens, model.config.hidden_size), jnp.bfloat16)
        call = Call(lambda x: (run(state, x), x), x)
        rows.append({"case": "layer", "tokens": tokens, **times(call)})
    return rows


def step_times(model: Decoder, case: str, step: Step) -> dict[str, Any]:
    """A step of the whole model."""
    graph, params = nnx.split(model)
    metadata: jattn.BatchMetadata = step.metadata()
    ids = jax.random.randint(jax.random.key(1), (metadata.bucket.max_tokens,), 0, model.config.vocab_size)
    caches = model.create_caches(1 + step.num_blocks, block_size=64)
    run = step_of(graph)
    call = Call(lambda caches: run(params, caches, ids, metadata), caches)
    return {"case": case, "tokens": sum(step.query_lens), **times(call)}


def times(call: Call) -> dict[str, Any]:
    """Of a call: in flight, and the sum of its kernels."""
    flights = walls(call, rounds=10)
    _, runs = profiler.measure(call, aggregate=False, iterations=3)()
    sums = [1e3 * sum(ms for _, ms in run) for run in runs]
    return {"in_flight_us": flights["in_flight_us"], "kernel_sum_us": statistics.median(sums)}
