"""What a decode step costs the host: an engine over a model that computes next to nothing, on any machine.

The model has the parameters and caches of 36 layers, of a few numbers each: the host hands all of them on.
Besides the wall's clock: processor time of JAX's calls (without an accelerator they do some of its work, too)
and of all else in the thread that runs the steps. Every token is checked: the model counts.
"""

import argparse
import cProfile
import functools
import pstats
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.runner import Rows
from jattn.serving import Engine, SamplingParams

LAYERS, PARAMETERS, VOCAB, POSITIONS = 36, 11, 128, 2048
BATCHES = (1, 64, 256)
CONTEXT, STEPS = 512, 200
CASES = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 0},
    "penalised": {"presence_penalty": 0.01},
    "text": {"stop": ("never",)},
}


class Sizes:
    """What the engine reads of a configuration."""

    vocab_size, max_position_embeddings, eos_token_ids = VOCAB, POSITIONS, ()


class Letters:
    """A tokenizer whose tokens are one character each."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Their characters; none is special."""
        return "".join(chr(97 + i % 26) for i in ids)


class Layer(nnx.Module):
    """As many parameters as a layer has."""

    def __init__(self) -> None:
        for n in range(PARAMETERS):
            setattr(self, f"weight{n}", nnx.Param(jnp.zeros(1)))


class Counting(nnx.Module):
    """A ServedModel: token i is followed by token i + 1."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.layers = nnx.List([Layer() for _ in range(LAYERS)])
        self.tokenizer, self.config = tokenizer, Sizes()

    def cache_specs(self, num_blocks: int, *, block_size: int, **_: Any) -> tuple[jattn.CacheSpec, ...]:
        """One number a token and layer."""
        spec = jattn.CacheSpec(num_blocks=num_blocks, block_size=block_size, num_kv_heads=1, head_dim=1)
        return (spec,) * LAYERS

    def create_caches(self, num_blocks: int, *, block_size: int, **_: Any) -> tuple[jattn.PagedCache, ...]:
        """Those."""
        return tuple(map(jattn.PagedCache.create, self.cache_specs(num_blocks, block_size=block_size)))

    def plan(self, metadata: Any, caches: Any) -> None:
        """Nothing is shared."""

    def __call__(self, token_ids: Any, caches: Any, metadata: Any, *, plan: Any) -> tuple[Any, Any]:
        """The tokens themselves; the caches as they were."""
        return token_ids[:, None].astype(jnp.float32), caches

    def logits(self, hidden: Any) -> Any:
        """High where the next token is."""
        return jax.nn.one_hot((hidden[:, 0].astype(jnp.int32) + 1) % VOCAB, VOCAB) * 99.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks host` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--profile", action="store_true", help="print where the largest batch's time goes")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """A row for each case and batch."""
    rows = Rows("host", arguments.out)
    for case in arguments.cases or CASES:
        for batch in BATCHES:
            steps = Steps(case, batch)
            rows.add(name=f"{case}_{batch}x{CONTEXT}", **steps.measured())
            if arguments.profile and batch == BATCHES[-1]:
                steps.profile()


class Timed:
    """A function, or an object that is called like one, and the thread's processor time that calls take."""

    def __init__(self, function: Any) -> None:
        self._function, self.seconds = function, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Its result."""
        start = time.thread_time()
        result = self._function(*arguments, **options)
        self.seconds += time.thread_time() - start
        return result


class Steps:
    """An engine in the midst of decoding."""

    def __init__(self, case: str, batch: int) -> None:
        """Runs all prompts, and the first decode steps, in which things compile."""
        model = Counting(Letters() if case == "text" else None)
        bucket = functools.partial(jattn.Bucket, max_decodes=batch, max_blocks=64)
        self.engine = Engine(
            model,
            max_num_seqs=batch,
            max_num_batched_tokens=8192,
            num_blocks=batch * 64 + 1,
            max_model_len=1024,
            buckets=[bucket(), bucket(max_prefills=batch, max_prefill_tokens=8192)],
        )
        runner = self.engine._runner
        self.calls = Timed(runner.graphs), Timed(runner._sampler)
        runner.graphs, runner._sampler = self.calls
        params = SamplingParams(max_tokens=None, **CASES[case])
        prompts = np.random.default_rng(0).integers(VOCAB, size=(batch, CONTEXT))
        self.expected = {self.engine.add_request(p, params): int(p[-1]) + 1 for p in prompts}
        for _ in range(-(-batch * CONTEXT // 8192) + 20):
            self.step()

    def step(self) -> tuple[float, float, float]:
        """Seconds of a step: the wall's, the processor's, and those of JAX's calls."""
        before = sum(call.seconds for call in self.calls)
        wall, processor = time.perf_counter(), time.thread_time()
        outputs = self.engine.step()
        taken = time.perf_counter() - wall, time.thread_time() - processor
        for output in outputs:
            assert output.error is None, output
            for token in output.new_token_ids:
                assert token == self.expected[output.request_id] % VOCAB, output
                self.expected[output.request_id] += 1
        return *taken, sum(call.seconds for call in self.calls) - before

    def measured(self) -> dict[str, Any]:
        """Milliseconds, medians; the lowest decile is what others on the machine disturb least."""
        wall, processor, jax_calls = (
            [1e3 * seconds for seconds in column]
            for column in zip(*(self.step() for _ in range(STEPS)), strict=True)
        )
        own = [whole - part for whole, part in zip(processor, jax_calls, strict=True)]
        low, *_, high = statistics.quantiles(own, n=10)
        return {
            "step_ms": statistics.median(wall),
            "jax_ms": statistics.median(jax_calls),
            "own_ms": statistics.median(own),
            "own_spread_ms": [round(low, 3), round(high, 3)],
        }

    def profile(self) -> None:
        """What the time goes into, function by function."""
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(50):
            self.engine.step()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
