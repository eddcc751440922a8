"""Decode steps of whole models: wall time, synchronous and in flight, beside the sum of their kernel times.

The rows record XLA_FLAGS. Run the suite a second time with XLA_FLAGS=--xla_gpu_enable_command_buffer= to
measure without command buffers.
"""

import argparse
import collections
import concurrent.futures
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.layers import RMSNorm
from jattn.serving import Engine
from jattn.serving.engine.sampler import build_sampling_metadata, next_tokens
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.step import ModelInputs, ModelStep

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny_model"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONTEXT, BLOCK_SIZE, LOOP_STEPS, ROUNDS = 1024, 16, 64, 20
PROMPT, ENGINE_STEPS = 64, 128
MODELS = {
    "tiny": lambda: jattn.models.load(TINY, progress=False),
    "llama8b": lambda: random_decoder(LLAMA_8B),
}
MEASURES = ("graphs", "loop", "engine")
CASES = ("nothing", "chain", *(f"{measure}_{model}" for model in MODELS for measure in MEASURES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks graphs`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 64], help="Batch sizes. Default: 1 8 64."
    )
    parser.add_argument("--out", help="Directory for the result rows.")
    parser.add_argument("--trace", help="Directory for a profile of three synchronous calls of the chain.")


def main(arguments: argparse.Namespace) -> None:
    """Run every case at every batch size."""
    rows = Rows("graphs", arguments.out)
    for name in arguments.cases or CASES:
        if name == "nothing":
            measure_dispatch(rows)
        elif name == "chain":
            measure_chain(rows, arguments.batch, arguments.trace)
        else:
            measure, _, model = name.partition("_")
            {"graphs": measure_graphs, "loop": measure_loop, "engine": measure_engine}[measure](
                rows, model, MODELS[model](), arguments.batch
            )


class Chain(nnx.Module):
    """The attention layers of Llama 3 8B without MLPs: norm, projections, RoPE, cache write, decode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Initialize random parameters."""
        config = DecoderConfig.from_hf(LLAMA_8B)
        self.spec = config.attention_spec(0)
        self.norms = nnx.List(
            RMSNorm(config.hidden_size, eps=1e-5, is_offset=False, dtype=jnp.bfloat16)
            for _ in range(config.num_hidden_layers)
        )
        self.layers = nnx.List(
            jattn.PagedAttention(
                config.hidden_size,
                self.spec,
                rngs=rngs,
                rope=rope,
                param_dtype=jnp.bfloat16,
            )
            for rope in config.ropes
        )

    def __call__(self, x: jax.Array, caches: Any, metadata: jattn.BatchMetadata) -> tuple[jax.Array, Any]:
        """Return the hidden states of a step, and the written caches."""
        plan = jattn.plan(metadata, self.spec, caches[0])
        positions, written = metadata.positions, []
        for norm, layer, cache in zip(self.norms, self.layers, caches, strict=True):
            out, cache = layer(norm(x), cache, metadata, positions, plan)
            x = x + out
            written.append(cache)
        return x, tuple(written)


class Call(jax.stages.Wrapped):
    """A step with donated caches as a function without arguments, which the profiler can call repeatedly."""

    def __init__(self, step: Callable[[Any], tuple[Any, Any]], caches: Any) -> None:
        """Wrap a step.

        Args:
            step: Function of the caches that returns its output and the new caches.
            caches: Caches of the first call, which donates them.
        """
        self.step, self.caches = step, caches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start a step and return its output without waiting for it."""
        out, self.caches = self.step(self.caches)
        return out


def batch_metadata(batch: int, extra_tokens: int = 0) -> jattn.BatchMetadata:
    """Return the metadata of a decode step.

    Args:
        batch: Number of requests, each with CONTEXT tokens.
        extra_tokens: Number of further tokens per request for which the block table has blocks.
    """
    columns = -(-(CONTEXT + extra_tokens) // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(batch * columns).reshape(batch, columns) + 1
    bucket = jattn.Bucket(max_decodes=batch, max_blocks=columns)
    return jattn.build_batch_metadata(
        [1] * batch, [CONTEXT] * batch, table, block_size=BLOCK_SIZE, bucket=bucket
    )


def measure_dispatch(rows: Rows) -> None:
    """Record the time of a call that computes almost nothing, by its number of donated arrays."""
    for count in (1, 64, 256):
        arrays = tuple(jnp.zeros(8) for _ in range(count))
        add = jax.jit(lambda xs: (xs[0], tuple(x + 1 for x in xs)), donate_argnums=0)
        rows.add(name=f"nothing_{count}_arrays", **flags(), **call_times(Call(add, arrays)))


def measure_chain(rows: Rows, batches: list[int], trace: str | None) -> None:
    """Record a row per batch size for `Chain`, with the parameters flattened as DecodeGraphs passes them."""
    graphdef, params = nnx.split(Chain(nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    layers = LLAMA_8B["num_hidden_layers"]

    def step(leaves: Any, caches: Any, metadata: Any, x: Any) -> tuple[Any, Any]:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))(x, caches, metadata)

    metadata = {batch: batch_metadata(batch) for batch in batches}
    spec = jattn.CacheSpec(
        num_blocks=max(step.block_table.size for step in metadata.values()) + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=8,
        head_dim=128,
    )
    caches = tuple(jattn.PagedCache.create(spec) for _ in range(layers))
    inputs = {batch: jax.random.normal(jax.random.key(0), (batch, 4096), jnp.bfloat16) for batch in batches}
    jitted = jax.jit(step, donate_argnums=1)
    lowered = [jitted.lower(leaves, caches, metadata[batch], inputs[batch]) for batch in batches]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        executables = list(pool.map(lambda computation: computation.compile(), lowered))
    for batch, executable in zip(batches, executables, strict=True):
        run = functools.partial(_call_chain, executable, leaves, metadata[batch], inputs[batch])
        call = Call(run, caches)
        rows.add(
            name=f"chain_{batch}x{CONTEXT}", **flags(), **call_times(call), **kernels(call, layers=layers)
        )
        if trace:
            with jax.profiler.trace(trace, create_perfetto_trace=False):
                for _ in range(3):
                    jax.block_until_ready(call())
        caches = call.caches


def _call_chain(executable: Any, leaves: Any, metadata: Any, x: Any, caches: Any) -> tuple[Any, Any]:
    return executable(leaves, caches, metadata, x)


def measure_graphs(rows: Rows, name: str, model: Decoder, batches: list[int]) -> None:
    """Record a row per batch size: a step of DecodeGraphs with greedy sampling, called as the engine does."""
    graphdef, params = nnx.split(model)
    metadata = {batch: batch_metadata(batch) for batch in batches}
    num_blocks = max(step.block_table.size for step in metadata.values()) + 1
    caches = model.create_caches(num_blocks, block_size=BLOCK_SIZE)
    graphs = jattn.DecodeGraphs(ModelStep(graphdef), [step.bucket for step in metadata.values()])
    max_batch = max(batches)

    def inputs(batch: int) -> ModelInputs:
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return ModelInputs(zeros(batch), zeros(batch), zeros(max_batch), jnp.arange(batch))

    def abstract_inputs(bucket: jattn.Bucket) -> list[ModelInputs]:
        return [jax.eval_shape(lambda: inputs(bucket.max_tokens))]

    start = time.perf_counter()
    graphs.precompile(params, caches, block_size=BLOCK_SIZE, inputs=abstract_inputs, progress=False)
    precompiled = {"num_compiles": graphs.num_compiles, "compile_s": time.perf_counter() - start}
    for batch in batches:
        sampling = build_sampling_metadata([SamplingParams()] * batch)
        counts, tokens = jnp.zeros(batch, jnp.int32), inputs(batch)

        def step(caches: Any, batch=batch, sampling=sampling, counts=counts, tokens=tokens) -> Any:  # type: ignore[no-untyped-def]
            (logits, *_), caches = graphs(params, caches, metadata[batch], tokens)
            return next_tokens(logits, sampling, counts, max_rows=max_batch).token_ids, caches

        call = Call(step, caches)
        row = call_times(call) | kernels(call, layers=model.config.num_hidden_layers) | precompiled
        row["compiles_after"] = graphs.num_compiles - precompiled["num_compiles"]
        rows.add(name=f"graphs_{name}_{batch}x{CONTEXT}", **flags(), **row)
        caches = call.caches


def measure_loop(rows: Rows, name: str, model: Decoder, batches: list[int]) -> None:
    """Record a row per batch size: one step of decode_loop."""
    graphdef, params = nnx.split(model)

    def step(params: Any, caches: Any, metadata: Any, tokens: Any) -> tuple[Any, Any]:
        module = nnx.merge(graphdef, params)
        hidden, caches = module(tokens, caches, metadata, plan=module.plan(metadata, caches))
        return module.logits(hidden), caches

    def sample(logits: Any, index: Any) -> Any:
        return jnp.argmax(logits, axis=-1)

    loop = functools.partial(
        jattn.decode_loop,
        jax.tree_util.Partial(step),
        params,
        num_steps=LOOP_STEPS,
        sample=jax.tree_util.Partial(sample),
    )
    for batch in batches:
        metadata = batch_metadata(batch, LOOP_STEPS)
        caches = model.create_caches(metadata.block_table.size + 1, block_size=BLOCK_SIZE)

        def run(caches: Any, metadata=metadata, batch=batch) -> tuple[Any, Any]:  # type: ignore[no-untyped-def]
            result = loop(caches=caches, metadata=metadata, tokens=jnp.ones(batch, jnp.int32))
            return result.tokens, result.caches

        call = Call(run, caches)
        row = call_times(call, rounds=3) | kernels(call, layers=LOOP_STEPS * model.config.num_hidden_layers)
        per_step = {key: x / LOOP_STEPS if key.endswith("_us") else x for key, x in row.items()}
        rows.add(name=f"loop_{name}_{batch}x{CONTEXT}", **flags(), **per_step)


def measure_engine(rows: Rows, name: str, model: Decoder, batches: list[int]) -> None:
    """Record a row per batch size: a decode step of an engine, including its work on the host."""
    for batch in batches:
        num_blocks = max(batch, 2) * -(-(PROMPT + ENGINE_STEPS + 8) // BLOCK_SIZE) + 1
        columns = min(model.config.max_position_embeddings // BLOCK_SIZE, num_blocks - 1)
        bucket = functools.partial(jattn.Bucket, max_decodes=max(batch, 2), max_blocks=columns)
        engine = Engine(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * PROMPT,
            buckets=[bucket(), bucket(max_prefills=batch, max_prefill_tokens=batch * PROMPT)],
        )
        engine.precompile(progress=False)
        prompts = np.random.default_rng(0).integers(1, 200, (batch, PROMPT)).tolist()

        def seconds(max_tokens: int, engine=engine, prompts=prompts) -> float:  # type: ignore[no-untyped-def]
            start = time.perf_counter()
            engine.generate(prompts, max_tokens=max_tokens, ignore_eos=True)
            return time.perf_counter() - start

        seconds(8)
        runs = [seconds(8 + ENGINE_STEPS) - seconds(8) for _ in range(5)]
        step_us = [1e6 * run / ENGINE_STEPS for run in runs]
        row = {"step_us": statistics.median(step_us), "spread_us": [min(step_us), max(step_us)]}
        rows.add(name=f"engine_{name}_{batch}x{PROMPT}", **flags(), **row)


def call_times(call: Call, rounds: int = ROUNDS) -> dict[str, float]:
    """Return median microseconds of a call.

    "sync_us" includes waiting for the result, "polled_us" is the same with `is_ready` called in a loop,
    "host_us" is the time until the call returns, and "in_flight_us" is the time per call if many calls are in
    flight: the difference between `rounds` calls and three times as many, which cancels the start of the
    first call.

    Args:
        call: Call to measure.
        rounds: Number of timed calls.
    """
    jax.block_until_ready(call())
    synchronous, host = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        out = call()
        host.append(time.perf_counter() - start)
        jax.block_until_ready(out)
        synchronous.append(time.perf_counter() - start)
    in_flight = [
        (seconds_in_flight(call, 3 * rounds) - seconds_in_flight(call, rounds)) / (2 * rounds)
        for _ in range(3)
    ]
    polled = polled_seconds(call, rounds)
    seconds = {"sync_us": synchronous, "polled_us": polled, "in_flight_us": in_flight, "host_us": host}
    return {name: 1e6 * statistics.median(times) for name, times in seconds.items()}


def polled_seconds(call: Call, rounds: int) -> list[float]:
    """Return the seconds of each of `rounds` calls, polling `is_ready` until the result is there."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        leaf = jax.tree.leaves(call())[0]
        while not leaf.is_ready():
            pass
        times.append(time.perf_counter() - start)
    return times


def seconds_in_flight(call: Call, count: int) -> float:
    """Return the seconds of `count` calls, waiting only for the last one."""
    start = time.perf_counter()
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return time.perf_counter() - start


def kernels(call: Call, layers: int) -> dict[str, Any]:
    """Return kernel times of a call.

    Args:
        call: Call to measure.
        layers: Number of layers of the model.

    Returns:
        The sum of all kernel times in microseconds, the number of kernels per layer, and the launches and
        microseconds per layer of each kernel that every layer launches.
    """
    _, runs = profiler.measure(call, aggregate=False, iterations=5)()
    totals = [1e3 * sum(ms for _, ms in run) for run in runs]
    times: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.Counter(kernel_kind(name) for name, _ in runs[0])
    for kernel, ms in runs[0]:
        times[kernel_kind(kernel)] += 1e3 * ms / layers
    listed = {name: [count, round(times[name], 2)] for name, count in counts.items() if count >= layers}
    return {
        "kernel_sum_us": statistics.median(totals),
        "kernels_a_layer": len(runs[0]) / layers,
        "kernels": listed,
    }


def kernel_kind(kernel: str) -> str:
    """Return a kernel's name without the number that XLA appends."""
    return kernel.rstrip("0123456789").rstrip("_")[:60]


def flags() -> dict[str, str]:
    """Return XLA_FLAGS as a column of a row."""
    return {"xla_flags": os.environ.get("XLA_FLAGS", "")}
