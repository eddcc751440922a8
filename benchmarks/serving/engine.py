"""The engine on a Qwen3 of 8B sizes with random weights: start, decode steps, prefill, nano-vllm's workload.

Rows are recorded only if the log-probabilities that the engine reports agree with those of a forward pass by
XLA.
"""

import argparse
import dataclasses
import gc
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.models.step_profile import profile_steps
from benchmarks.runner import Rows
from benchmarks.serving.engine_steps import kernels_of_steps, step_times_by_bucket
from benchmarks.serving.nano_workload import RUNS, nano_workload
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.step import with_implementation

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DECODES = ((1, 1024), (8, 1024), (64, 4096), (256, 1024))
SAMPLED = SamplingParams(temperature=0.6, ignore_eos=True)
# Limit of the mean difference of log-probabilities. Between bf16 and float32 with these weights the mean is
# 0.05 and the maximum 0.3; if a request reads the keys of another one, the mean is above 1.
TOLERANCE = 0.15
# Cases that start engines of their own, each in a process of its own (`benchmarks starts`).
SEPARATE_CASES = ("ready", "full_speed", "first_minute")
SHARED_ENGINE_CASES = ("start", "decode", "host", "prefill", "first_token", "nano", "steps")
CASES = (*SHARED_ENGINE_CASES, "kernels", "prefix", "fp8", "fp8_beside")
FP8_LAYERS = 12  # with so many layers, 256 requests of 4,096 tokens fit in memory in bf16, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks engine`."""
    parser.add_argument(
        "cases",
        nargs="*",
        help=f"Cases to run, of {', '.join(CASES)} (default: all), or one of {', '.join(SEPARATE_CASES)}.",
    )
    parser.add_argument("--cache-dir", help="Directory of the compilation cache. Default: none.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Run the cases that share one engine with all buckets, then those that create their own engines."""
    rows, cases = Rows("engine", arguments.out), arguments.cases or CASES
    model = random_decoder(QWEN3_8B)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    if cases[0] in SEPARATE_CASES:
        measure = first_minute if cases[0] == "first_minute" else measure_start
        row = measure(model, arguments.cache_dir, wait=cases[0] == "full_speed")
        rows.add(name=cases[0], cache_dir=arguments.cache_dir is not None, **row)
        return
    if set(cases) & {*SHARED_ENGINE_CASES}:
        run_shared_engine_cases(model, cases, arguments.cache_dir, rows)
    gc.collect()
    if "kernels" in cases:
        for batch, context in DECODES[:1:-1]:
            engine = make_engine(model, arguments.cache_dir, max_num_seqs=batch)
            errors = checked_tokens(engine, model)
            rows.add(name=f"kernels_{batch}x{context}", **kernels(engine, batch, context), **errors)
            del engine
            gc.collect()
    if "prefix" in cases:
        rows.add(
            name="prefix_2048_of_2248",
            **shared_prefix(make_engine(model, arguments.cache_dir, num_blocks=38_000, max_num_seqs=256)),
        )
        gc.collect()
    if "fp8" in cases:
        engine = make_engine(
            model,
            arguments.cache_dir,
            kv_cache_dtype="fp8_per_token_head",
            num_blocks=40_000,
            max_num_seqs=64,
        )
        rows.add(
            name="decode_fp8_64x4096", **kernels(engine, 64, 4096), logprob_error=logprob_error(engine, model)
        )
        del engine
        gc.collect()
    if "fp8_beside" in cases:
        rows.add(name="decode_fp8_256x4096", **fp8_and_bf16_steps(256, 4096, arguments.cache_dir))


def run_shared_engine_cases(model: Any, cases: Sequence[str], cache_dir: str | None, rows: Rows) -> None:
    """Run the requested cases of SHARED_ENGINE_CASES on one engine, after a check of its tokens."""
    engine, start_times = start_engine(model, cache_dir, wait=True)
    checked = checked_tokens(engine, model)
    if "start" in cases:
        rows.add(name="start", cache_dir=cache_dir is not None, **start_times, **checked)
    if "decode" in cases:
        for batch, context in DECODES:
            rows.add(name=f"decode_{batch}x{context}", **decode_step(engine, batch, context), **checked)
    if "host" in cases:
        rows.add(name="host_256x1024", **host_time(engine, 256, 1024), **checked)
    if "prefill" in cases:
        prompts = random_prompts(16, 4096, seed=1)
        seconds = time_call(lambda: engine.generate(prompts, SAMPLED, max_tokens=1))
        rows.add(name="prefill_16x4096", s=seconds, tokens_per_s=16 * 4096 / seconds, **checked)
    if "first_token" in cases:
        rows.add(name="first_token_1024_beside_64", **first_token(engine), **checked)
    if "nano" in cases:
        for name, run in RUNS:
            rows.add(name=name, **nano_bench(engine, run), **checked)
    if "steps" in cases:
        rows.add(name="nano_steps", **step_times_by_bucket(engine), **checked)
        for row in kernels_of_steps(engine):
            rows.add(name="nano_kernels", **row, **checked)


def checked_tokens(engine: Engine, model: Any) -> dict[str, Any]:
    """Return the error of the engine's log-probabilities as a column of a row.

    Raises:
        SystemExit: The error exceeds TOLERANCE.
    """
    error = logprob_error(engine, model)
    if error > TOLERANCE:
        raise SystemExit(f"the engine's log-probabilities are {error} off. No rows are recorded.")
    return {"logprob_error": error}


def start_engine(model: Any, cache_dir: str | None, *, wait: bool) -> tuple[Engine, dict[str, Any]]:
    """Start an engine and measure how long that takes.

    Args:
        model: Model to serve.
        cache_dir: Directory of the compilation cache; None disables the cache.
        wait: Whether to wait until every bucket is compiled.

    Returns:
        The engine, and a dict with the number of files in the cache before the start, the seconds until the
        engine can serve and, with `wait`, until everything is compiled.
    """
    num_files = 0 if cache_dir is None else sum(path.is_file() for path in pathlib.Path(cache_dir).rglob("*"))
    start = time.perf_counter()
    num_bytes = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    engine = make_engine(model, cache_dir, num_blocks=24_000 if num_bytes > 80e9 else 10_000)
    engine.precompile(progress=False, wait=False)
    times: dict[str, Any] = {"kept": num_files, "ready_s": time.perf_counter() - start}
    times["executables_when_ready"] = engine.stats.num_compiles
    if wait:
        engine.graphs.wait()
        engine.warm_up()
        times |= {"all_s": time.perf_counter() - start, "executables": engine.stats.num_compiles}
    return engine, times


def measure_start(model: Any, cache_dir: str | None, *, wait: bool) -> dict[str, Any]:
    """Return the times of `start_engine`; `full_speed_s` is the time until every bucket is compiled."""
    engine, times = start_engine(model, cache_dir, wait=wait)
    if "all_s" in times:
        times["full_speed_s"] = times.pop("all_s")
    return times | checked_tokens(engine, model)


def first_minute(model: Any, cache_dir: str | None, *, wait: bool, seconds: float = 60.0) -> dict[str, Any]:
    """Serve nano-vllm's requests from the moment that the engine is ready, and again at full speed.

    Returns:
        The times of `start_engine`, the tokens generated in the first `seconds` and in as many at full speed,
        and their ratio `first_minute_share`.
    """
    engine, times = start_engine(model, cache_dir, wait=wait)
    # 60 seconds take up to 2,000 requests. Both runs serve the same lengths, with other tokens.
    supplies = [list(nano_requests(range(first_run, first_run + 8))) for first_run in (0, 8)]
    first = tokens_within(engine, supplies[0], seconds)
    engine.graphs.wait()
    engine.warm_up()
    full = tokens_within(engine, supplies[1], seconds)
    times |= {"first_minute_tokens": first, "full_speed_tokens": full, "first_minute_share": first / full}
    return times | checked_tokens(engine, model)


def nano_requests(runs: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """Yield the prompts and numbers of new tokens of several runs of nano-vllm's workload."""
    for run in runs:
        yield from zip(*nano_workload(run), strict=True)


def tokens_within(engine: Engine, supply: Iterable[tuple[list[int], int]], seconds: float) -> int:
    """Return how many tokens the engine generates in some seconds.

    Args:
        engine: Engine without requests.
        supply: Prompts and numbers of new tokens, more than the engine serves in that time.
        seconds: Time to measure.
    """
    requests = iter(supply)
    deadline, count = time.perf_counter() + seconds, 0
    unfinished: set[int | str] = set()
    while time.perf_counter() < deadline:
        while len(unfinished) < 2 * engine.scheduler.max_num_seqs:
            prompt, max_tokens = next(requests)
            unfinished.add(engine.add_request(prompt, dataclasses.replace(SAMPLED, max_tokens=max_tokens)))
        for output in engine.step():
            count += len(output.new_token_ids)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    abort_all(engine, list(unfinished))
    return count


def make_engine(
    model: Any,
    cache_dir: str | None,
    *,
    kv_cache_dtype: str = "auto",
    num_blocks: int = 24_000,
    max_num_seqs: int | None = None,
) -> Engine:
    """Create an engine with prefix caching; every timed run therefore needs new prompts.

    Args:
        model: Model to serve.
        cache_dir: Directory of the compilation cache; None disables the cache.
        kv_cache_dtype: Format of the KV cache; "auto" stores 16 bits.
        num_blocks: Number of KV-cache blocks.
        max_num_seqs: Batch size of a case with a single batch: the engine has only the three buckets that the
            case needs. None creates the default buckets for 256 requests, nano-vllm's limit.
    """
    return Engine(
        model,
        num_blocks=num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs or 256,
        max_num_batched_tokens=8192,
        buckets=None if max_num_seqs is None else single_batch_buckets(max_num_seqs),
        cascade_attention=False,  # its executables would compile in the background during measurements
        cache_dir=cache_dir,
    )


def single_batch_buckets(batch: int) -> list[jattn.Bucket]:
    """Return buckets for decodes, for prompts, and for both, of up to `batch` requests."""
    return [
        jattn.Bucket(max_blocks=512, max_decodes=batch),
        jattn.Bucket(max_blocks=512, max_prefills=batch, max_prefill_tokens=8192),
        jattn.Bucket(max_blocks=512, max_decodes=batch, max_prefills=batch, max_prefill_tokens=8192),
    ]


def logprob_error(engine: Engine, model: Any) -> float:
    """Return the mean difference of the engine's log-probabilities from those of a forward pass by XLA."""
    prompts = random_prompts(3, 200, seed=2)
    params = SamplingParams(max_tokens=8, logprobs=5, ignore_eos=True)
    graphdef, state = nnx.split(with_implementation(model, "xla"))

    @jax.jit
    def logprobs(state: Any, ids: jax.Array, metadata: Any) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        hidden, _ = merged(ids, None, metadata)
        return jax.nn.log_softmax(merged.logits(hidden))

    errors = []
    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
        ids = [*prompt, *result.token_ids]
        expected = logprobs(state, jnp.asarray(ids), jattn.build_batch_metadata([len(ids)], [len(ids)], None))
        for position, top_logprobs in enumerate(result.logprobs or (), len(prompt) - 1):
            errors += [
                abs(entry.logprob - float(expected[position, token])) for token, entry in top_logprobs.items()
            ]
    return statistics.mean(errors)


def decode_step(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Return milliseconds per decode step, measured in two ways.

    "step_ms" times calls of `Engine.step` while all requests decode. "in_completions_ms" is the difference
    between long and short completions divided by their difference in length; it also contains steps that
    compute other requests' prompts and steps in which some requests have finished.
    """
    short_len, long_len, seeds = 8, 136, itertools.count(100)

    def completion_seconds(max_tokens: int) -> float:
        prompts = random_prompts(batch, context, seed=next(seeds))
        return time_call(lambda: engine.generate(prompts, SAMPLED, max_tokens=max_tokens))

    # Warm-up: the first run of an executable loads it (33 ms), the second captures a CUDA graph (14 ms).
    for _ in range(2):
        completion_seconds(long_len)
    short, long = (min(completion_seconds(length) for _ in range(2)) for length in (short_len, long_len))
    request_ids = start_decoding(engine, batch, context)
    seconds = seconds_per_step(engine, 60)
    abort_all(engine, request_ids)
    return {"step_ms": 1e3 * seconds, "in_completions_ms": 1e3 * (long - short) / (long_len - short_len)}


def host_time(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Return milliseconds per decode step, and the part of them in which the host waits for the device."""
    request_ids = start_decoding(engine, batch, context)
    waits: list[float] = []
    with mock.patch.object(jax, "device_get", lambda x, get=jax.device_get: timed_device_get(waits, get, x)):
        seconds = seconds_per_step(engine, 100)
    abort_all(engine, request_ids)
    return {"step_ms": 1e3 * seconds, "host_waits_ms": 1e3 * sum(waits) / 100}


def kernels(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Return milliseconds per decode step, and the kernels of one step."""
    request_ids = start_decoding(engine, batch, context)
    seconds = seconds_per_step(engine, 60)
    row = profile_steps(lambda: [engine.step() for _ in range(10)], 10)
    abort_all(engine, request_ids)
    return {"step_ms": 1e3 * seconds, **row}


def start_decoding(engine: Engine, batch: int, context: int) -> list[int | str]:
    """Add requests, run steps until all of them have decoded some tokens, and return their ids.

    Args:
        engine: Idle engine.
        batch: Number of requests.
        context: Tokens per prompt.
    """
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=250)
    request_ids = [engine.add_request(prompt, params) for prompt in random_prompts(batch, context, seed=3)]
    while engine.stats.num_waiting or engine.stats.num_running < batch:
        engine.step()
    for _ in range(20):
        engine.step()
    return request_ids


def seconds_per_step(engine: Engine, count: int) -> float:
    """Run `count` steps and return the mean seconds per step."""
    return time_call(lambda: [engine.step() for _ in range(count)]) / count


def abort_all(engine: Engine, request_ids: Sequence[int | str]) -> None:
    """Abort the requests and run the step that frees their blocks."""
    for request_id in request_ids:
        engine.abort(request_id)
    engine.step()


def timed_device_get(waits: list[float], device_get: Callable[[Any], Any], arrays: Any) -> Any:
    """Return `device_get(arrays)` and append the seconds that it took to `waits`."""
    start = time.perf_counter()
    result = device_get(arrays)
    waits.append(time.perf_counter() - start)
    return result


def first_token(engine: Engine) -> dict[str, Any]:
    """Return milliseconds to the first token of 1,024 prompt tokens, alone and while 64 requests decode."""
    long = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000)

    def first_token_ms(seed: int) -> float:
        (prompt,) = random_prompts(1, 1024, seed=seed)
        start = time.perf_counter()
        request_id = engine.add_request(
            prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2)
        )
        while not any(output.request_id == request_id for output in engine.step()):
            pass
        seconds = time.perf_counter() - start
        engine.abort(request_id)
        return 1e3 * seconds

    alone_ms = min(first_token_ms(seed) for seed in range(10, 15))
    request_ids = [engine.add_request(prompt, long) for prompt in random_prompts(64, 1024, seed=4)]
    while engine.stats.num_waiting or engine.stats.num_running < 64:
        engine.step()
    loaded_ms = []
    for seed in range(20, 30):
        for _ in range(10):
            engine.step()
        loaded_ms.append(first_token_ms(seed))
    abort_all(engine, request_ids)
    return {"alone_ms": alone_ms, "ms": statistics.median(loaded_ms), "worst_ms": max(loaded_ms)}


def shared_prefix(engine: Engine) -> dict[str, Any]:
    """Return seconds for 256 prompts of 2,248 tokens, with 2,048 shared tokens and with none."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=100)
    suffixes = random_prompts(256, 200, seed=5)

    def seconds(prompts: list[list[int]]) -> float:
        return time_call(lambda: engine.generate(prompts, params))

    def with_prefix(seed: int) -> list[list[int]]:
        (prefix,) = random_prompts(1, 2048, seed=seed)
        return [[*prefix, *suffix] for suffix in suffixes]

    seconds(with_prefix(seed=6))  # compiles
    shared_s = seconds(with_prefix(seed=7))
    num_hits = engine.stats.num_prefix_hit_tokens
    unshared_s = seconds(random_prompts(256, 2248, seed=8))
    # No request was preempted: it would have found its own prefix in the cache.
    assert engine.stats.num_prefix_hit_tokens == num_hits > 0
    return {"s": shared_s, "without_s": unshared_s, "gain": unshared_s / shared_s}


def fp8_and_bf16_steps(batch: int, context: int, cache_dir: str | None) -> dict[str, Any]:
    """Return milliseconds per decode step of FP8_LAYERS layers, with a cache in fp8 and in bf16."""
    model, row = random_decoder(QWEN3_8B | {"num_hidden_layers": FP8_LAYERS}), {"layers": FP8_LAYERS}
    num_blocks = batch * (context // 16 + 16)
    for key, kv_cache_dtype in (("step_ms_bf16", "auto"), ("step_ms", "fp8_per_token_head")):
        engine = make_engine(
            model, cache_dir, kv_cache_dtype=kv_cache_dtype, num_blocks=num_blocks, max_num_seqs=batch
        )
        errors = checked_tokens(engine, model)
        request_ids = start_decoding(engine, batch, context)
        row |= {key: 1e3 * seconds_per_step(engine, 60), **errors}
        abort_all(engine, request_ids)
        del engine
        gc.collect()
    return row | {"ratio": row["step_ms"] / row["step_ms_bf16"]}


def nano_bench(engine: Engine, run: int, *, requests: int = 256, max_len: int = 1024) -> dict[str, Any]:
    """Return seconds and tokens per second of nano-vllm's workload.

    Args:
        engine: Idle engine.
        run: Number of the run; prompts of a run that was served before are in the prefix cache.
        requests: Number of requests.
        max_len: Length to which prompts and completions are cut.
    """
    prompts, counts = nano_workload(run, requests=requests, max_len=max_len)
    seconds = time_call(lambda: engine.generate(prompts, SAMPLED, max_tokens=counts))
    return {"s": seconds, "tokens_per_s": sum(counts) / seconds}


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `length` random token ids below 9,999."""
    return np.random.default_rng(seed).integers(1, 9999, (count, length)).tolist()


def time_call(run: Callable[[], Any]) -> float:
    """Call a function and return the seconds that it took."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
