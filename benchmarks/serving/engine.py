"""The engine on an 8B-wide Qwen3 with random weights: start, decode steps, prefill, nano-vllm's workload.

Tokens are checked first: the log-probabilities that the engine reports must be those of a step by XLA alone.
"""

import argparse
import gc
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.models.step_profile import traced
from benchmarks.runner import Rows
from benchmarks.serving.engine_steps import by_bucket, kernels_on_the_way
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
WARM = SamplingParams(temperature=0.6, ignore_eos=True)
# Of log-probabilities, in the mean: between such weights in bf16 and in f32 it is 0.05, the largest of some
# hundreds 0.3; where a request sees others' keys it is above 1.
TOLERANCE = 0.15
READY = "ready"  # as start, without waiting for what compiles behind: of no use beside other cases
OF_ONE_ENGINE = ("start", "decode", "host", "prefill", "first_token", "nano", "steps")
CASES = (*OF_ONE_ENGINE, "kernels", "prefix", "fp8", "fp8_beside")
FEW_LAYERS = 12  # of which 256 requests of 4,096 tokens have room in bf16, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks engine` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all; or {READY}")
    parser.add_argument("--cache-dir", help="where executables are kept from one run to the next")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """The cases that one engine with all buckets serves, then those with engines of their own."""
    rows, cases = Rows("engine", arguments.out), arguments.cases or CASES
    model = random_decoder(QWEN3_8B)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    if set(cases) & {READY, *OF_ONE_ENGINE}:
        of_one_engine(model, cases, arguments.cache_dir, rows)
    gc.collect()
    if "kernels" in cases:
        for batch, context in DECODES[:1:-1]:
            engine = engine_of(model, arguments.cache_dir, rows=batch)
            checked = checked_tokens(engine, model)
            rows.add(name=f"kernels_{batch}x{context}", **kernels(engine, batch, context), **checked)
            del engine
            gc.collect()
    if "prefix" in cases:
        rows.add(
            name="prefix_2048_of_2248",
            **shared_prefix(engine_of(model, arguments.cache_dir, blocks=38_000, rows=256)),
        )
        gc.collect()
    if "fp8" in cases:
        how: Any = {"quantization": "fp8_per_token_head", "blocks": 40_000, "rows": 64}
        engine = engine_of(model, arguments.cache_dir, **how)
        rows.add(
            name="decode_fp8_64x4096", **kernels(engine, 64, 4096), logprob_error=logprob_error(engine, model)
        )
        del engine
        gc.collect()
    if "fp8_beside" in cases:
        rows.add(name="decode_fp8_256x4096", **fp8_beside(256, 4096, arguments.cache_dir))


def of_one_engine(model: Any, cases: Sequence[str], cache_dir: str | None, rows: Rows) -> None:
    """`OF_ONE_ENGINE`; nothing but the start is measured before the tokens are right."""
    engine, taken = started(model, cache_dir, waits=READY not in cases)
    checked = checked_tokens(engine, model)
    for name in {"start", READY}.intersection(cases):
        rows.add(name=name, cache_dir=cache_dir is not None, **taken, **checked)
    if "decode" in cases:
        for batch, context in DECODES:
            rows.add(name=f"decode_{batch}x{context}", **decode_step(engine, batch, context), **checked)
    if "host" in cases:
        rows.add(name="host_256x1024", **host_time(engine, 256, 1024), **checked)
    if "prefill" in cases:
        prompts = drawn_prompts(16, 4096, seed=1)
        seconds = timed(lambda: engine.generate(prompts, WARM, max_tokens=1))
        rows.add(name="prefill_16x4096", s=seconds, tokens_per_s=16 * 4096 / seconds, **checked)
    if "first_token" in cases:
        rows.add(name="first_token_1024_beside_64", **first_token(engine), **checked)
    if "nano" in cases:
        for name, run in RUNS:
            rows.add(name=name, **nano_bench(engine, run), **checked)
    if "steps" in cases:
        rows.add(name="nano_steps", **by_bucket(engine), **checked)
        for row in kernels_on_the_way(engine):
            rows.add(name="nano_kernels", **row, **checked)


def checked_tokens(engine: Engine, model: Any) -> dict[str, Any]:
    """The error of the engine's log-probabilities; ends the suite where it is too large."""
    error = logprob_error(engine, model)
    if error > TOLERANCE:
        raise SystemExit(f"the engine's log-probabilities are {error} off: no rows")
    return {"logprob_error": error}


def started(model: Any, cache_dir: str | None, *, waits: bool) -> tuple[Engine, dict[str, Any]]:
    """An engine, and seconds until it could serve, and until all was compiled where that is waited for.

    With them how many files were kept in the folder before: 0 = a cold start.
    """
    kept = 0 if cache_dir is None else sum(path.is_file() for path in pathlib.Path(cache_dir).rglob("*"))
    start = time.perf_counter()
    engine = engine_of(model, cache_dir)
    engine.precompile(progress=False, wait=False)
    taken: dict[str, Any] = {"kept": kept, "ready_s": time.perf_counter() - start}
    taken["executables_when_ready"] = engine.stats.num_compiles
    if waits:
        engine.graphs.wait()
        engine.warm_up()
        taken |= {"all_s": time.perf_counter() - start, "executables": engine.stats.num_compiles}
    return engine, taken


def engine_of(
    model: Any,
    cache_dir: str | None,
    *,
    quantization: str | None = None,
    blocks: int = 24_000,
    rows: int | None = None,
) -> Engine:
    """As nano-vllm is run: 256 requests at most, prefixes kept, so each run that is timed has new prompts.

    With `rows`, three buckets of so many requests: what a case with one batch needs.
    """
    return Engine(
        model,
        num_blocks=blocks,
        quantization=quantization,
        max_num_seqs=rows or 256,
        max_num_batched_tokens=8192,
        buckets=None if rows is None else few_buckets(rows),
        cascade_attention=False,  # whose executables would compile while others run
        cache_dir=cache_dir,
    )


def few_buckets(rows: int) -> list[jattn.Bucket]:
    """What a case with one batch needs."""
    prompts: Any = {"max_prefills": rows, "max_prefill_tokens": 8192}
    sizes: list[Any] = [{"max_decodes": rows}, prompts, {"max_decodes": rows, **prompts}]
    return [jattn.Bucket(max_blocks=512, **size) for size in sizes]


def logprob_error(engine: Engine, model: Any) -> float:
    """The mean difference of log-probabilities from those of one step without a cache, by XLA."""
    prompts = drawn_prompts(3, 200, seed=2)
    asked = SamplingParams(max_tokens=8, logprobs=5, ignore_eos=True)
    graphdef, state = nnx.split(with_implementation(model, "xla"))

    @jax.jit
    def logprobs(state: Any, ids: jax.Array, metadata: Any) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        hidden, _ = merged(ids, None, metadata)
        return jax.nn.log_softmax(merged.logits(hidden))

    errors = []
    for prompt, result in zip(prompts, engine.generate(prompts, asked), strict=True):
        ids = [*prompt, *result.token_ids]
        table = logprobs(state, jnp.asarray(ids), jattn.build_batch_metadata([len(ids)], [len(ids)], None))
        for place, got in enumerate(result.logprobs or (), len(prompt) - 1):
            errors += [abs(one.logprob - float(table[place, token])) for token, one in got.items()]
    return statistics.mean(errors)


def decode_step(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a step: stepped by hand once all decode, and by the difference of completions.

    The second has more in it: a long completion's first tokens are made beside the others' prompts, its last
    when some have ended.
    """
    few, many, seeds = 8, 136, itertools.count(100)

    def run(count: int) -> float:
        prompts = drawn_prompts(batch, context, seed=next(seeds))
        return timed(lambda: engine.generate(prompts, WARM, max_tokens=count))

    for _ in range(2):  # an executable's first run loads it, its second makes its CUDA graph: 33 and 14 ms
        run(many)
    short, long = (min(run(count) for _ in range(2)) for count in (few, many))
    names = decoding(engine, batch, context)
    seconds = seconds_a_step(engine, 60)
    ended(engine, names)
    return {"step_ms": 1e3 * seconds, "in_completions_ms": 1e3 * (long - short) / (many - few)}


def host_time(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a step, and of them how long the host waits for the device: if it does, it is ahead."""
    names = decoding(engine, batch, context)
    waits: list[float] = []
    with mock.patch.object(jax, "device_get", lambda x, get=jax.device_get: waited(waits, get, x)):
        seconds = seconds_a_step(engine, 100)
    ended(engine, names)
    return {"step_ms": 1e3 * seconds, "host_waits_ms": 1e3 * sum(waits) / 100}


def kernels(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds of a step by hand, and the kernels of one."""
    names = decoding(engine, batch, context)
    seconds = seconds_a_step(engine, 60)
    row = traced(lambda: [engine.step() for _ in range(10)], 10)
    ended(engine, names)
    return {"step_ms": 1e3 * seconds, **row}


def decoding(engine: Engine, batch: int, context: int) -> list[str]:
    """So many requests, which decode by now, some steps behind their prompts; their ids."""
    asked = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=250)
    names = [engine.add_request(prompt, asked) for prompt in drawn_prompts(batch, context, seed=3)]
    while engine.stats.num_waiting or engine.stats.num_running < batch:
        engine.step()
    for _ in range(20):
        engine.step()
    return names


def seconds_a_step(engine: Engine, count: int) -> float:
    """Of so many steps."""
    return timed(lambda: [engine.step() for _ in range(count)]) / count


def ended(engine: Engine, names: list[str]) -> None:
    """Ends these requests."""
    for name in names:
        engine.abort(name)
    engine.step()


def waited(waits: list[float], get: Callable[[Any], Any], x: Any) -> Any:
    """What `get(x)` is; how long it took goes to `waits`."""
    start = time.perf_counter()
    got = get(x)
    waits.append(time.perf_counter() - start)
    return got


def first_token(engine: Engine) -> dict[str, Any]:
    """Milliseconds until a prompt of 1,024 has its first token: alone, and while 64 requests decode."""
    long = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000)

    def taken(seed: int) -> float:
        (prompt,) = drawn_prompts(1, 1024, seed=seed)
        start = time.perf_counter()
        name = engine.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2))
        while not any(output.request_id == name for output in engine.step()):
            pass
        seconds = time.perf_counter() - start
        engine.abort(name)
        return 1e3 * seconds

    alone = min(taken(seed) for seed in range(10, 15))
    names = [engine.add_request(prompt, long) for prompt in drawn_prompts(64, 1024, seed=4)]
    while engine.stats.num_waiting or engine.stats.num_running < 64:
        engine.step()
    beside = []
    for seed in range(20, 30):
        for _ in range(10):
            engine.step()
        beside.append(taken(seed))
    for name in names:
        engine.abort(name)
    engine.step()
    return {"alone_ms": alone, "ms": statistics.median(beside), "worst_ms": max(beside)}


def shared_prefix(engine: Engine) -> dict[str, Any]:
    """Seconds of 256 prompts of 2,248 tokens with 100 new ones: 2,048 shared, and none."""
    asked = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=100)
    run = lambda prompts: timed(lambda: engine.generate(prompts, asked))
    own = drawn_prompts(256, 200, seed=5)
    run([[*drawn_prompts(1, 2048, seed=6)[0], *last] for last in own])  # compiles what it needs
    shared = run([[*drawn_prompts(1, 2048, seed=7)[0], *last] for last in own])
    hits = engine.stats.num_prefix_hit_tokens
    apart = run(drawn_prompts(256, 2248, seed=8))
    assert engine.stats.num_prefix_hit_tokens == hits > 0  # nobody was preempted, and found its own again
    return {"s": shared, "without_s": apart, "gain": apart / shared}


def fp8_beside(batch: int, context: int, cache_dir: str | None) -> dict[str, Any]:
    """Milliseconds of a step of a shallower model by hand, with a cache in fp8 and in bf16."""
    model, row = random_decoder(QWEN3_8B | {"num_hidden_layers": FEW_LAYERS}), {"layers": FEW_LAYERS}
    blocks = batch * (context // 16 + 16)
    for key, quantization in (("step_ms_bf16", None), ("step_ms", "fp8_per_token_head")):
        engine = engine_of(model, cache_dir, quantization=quantization, blocks=blocks, rows=batch)
        checked = checked_tokens(engine, model)
        names = decoding(engine, batch, context)
        row |= {key: 1e3 * seconds_a_step(engine, 60), **checked}
        ended(engine, names)
        del engine
        gc.collect()
    return row | {"ratio": row["step_ms"] / row["step_ms_bf16"]}


def nano_bench(engine: Engine, run: int, **part: int) -> dict[str, Any]:
    """Seconds of nano-vllm's workload, or a part; of a run that was before, prompts' keys are there."""
    prompts, counts = nano_workload(run, **part)
    seconds = timed(lambda: engine.generate(prompts, WARM, max_tokens=counts))
    return {"s": seconds, "tokens_per_s": sum(counts) / seconds}


def drawn_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(1, 9999, (count, length)).tolist()


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
