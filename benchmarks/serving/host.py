"""Host time of a decode step: an engine over a model that computes almost nothing, on any machine.

The model has as many parameters and caches as one of 36 layers, all tiny, because the host passes each of
them to JAX. A row has the wall time, the CPU time of calls into JAX (without an accelerator they include
computation), and the CPU time of everything else in the thread that runs the steps. Every token is checked.
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
    """The attributes of a model configuration that the engine reads."""

    vocab_size, max_position_embeddings, eos_token_ids = VOCAB, POSITIONS, ()


class LetterTokenizer:
    """A tokenizer with one character per token."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Return the characters of token ids."""
        return "".join(chr(97 + i % 26) for i in ids)


class Layer(nnx.Module):
    """A layer with the number of parameters of a real one, each of a single element."""

    def __init__(self) -> None:
        for n in range(PARAMETERS):
            setattr(self, f"weight{n}", nnx.Param(jnp.zeros(1)))


class CountingModel(nnx.Module):
    """A ServedModel in which token i + 1 follows token i."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.layers = nnx.List([Layer() for _ in range(LAYERS)])
        self.tokenizer, self.config = tokenizer, Sizes()

    def cache_specs(self, num_blocks: int, *, block_size: int, **_: Any) -> tuple[jattn.CacheSpec, ...]:
        """Return the specs of caches with one element per token and layer."""
        spec = jattn.CacheSpec(num_blocks=num_blocks, block_size=block_size, num_kv_heads=1, head_dim=1)
        return (spec,) * LAYERS

    def create_caches(self, num_blocks: int, *, block_size: int, **_: Any) -> tuple[jattn.PagedCache, ...]:
        """Create the caches."""
        return tuple(map(jattn.PagedCache.create, self.cache_specs(num_blocks, block_size=block_size)))

    def plan(self, metadata: Any, caches: Any) -> None:
        """Return no plan: the model has no attention."""

    def __call__(self, token_ids: Any, caches: Any, metadata: Any, *, plan: Any) -> tuple[Any, Any]:
        """Return the token ids as hidden states, and the unchanged caches."""
        return token_ids[:, None].astype(jnp.float32), caches

    def logits(self, hidden: Any) -> Any:
        """Return logits whose largest element is that of the next token."""
        return jax.nn.one_hot((hidden[:, 0].astype(jnp.int32) + 1) % VOCAB, VOCAB) * 99.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks host`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument(
        "--profile", action="store_true", help="Print a profile of the largest batch by function."
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Record a row for each case and batch size."""
    rows = Rows("host", arguments.out)
    for case in arguments.cases or CASES:
        for batch in BATCHES:
            steps = DecodeSteps(case, batch)
            rows.add(name=f"{case}_{batch}x{CONTEXT}", **steps.measure())
            if arguments.profile and batch == BATCHES[-1]:
                steps.profile()


class TimedCallable:
    """A wrapper that adds up the thread's CPU seconds in calls of a function or of a callable object."""

    def __init__(self, function: Any) -> None:
        self._function, self.seconds = function, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function and return its result."""
        start = time.thread_time()
        result = self._function(*arguments, **options)
        self.seconds += time.thread_time() - start
        return result


class DecodeSteps:
    """An engine whose requests all decode."""

    def __init__(self, case: str, batch: int) -> None:
        """Run the prompts and the first decode steps, in which executables compile.

        Args:
            case: Name of a case of CASES.
            batch: Number of requests.
        """
        model = CountingModel(LetterTokenizer() if case == "text" else None)
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
        self.calls = TimedCallable(runner.graphs), TimedCallable(runner._sampler)
        runner.graphs, runner._sampler = self.calls
        params = SamplingParams(max_tokens=None, **CASES[case])
        prompts = np.random.default_rng(0).integers(VOCAB, size=(batch, CONTEXT))
        self.expected = {self.engine.add_request(p, params): int(p[-1]) + 1 for p in prompts}
        for _ in range(-(-batch * CONTEXT // 8192) + 20):
            self.step()

    def step(self) -> tuple[float, float, float]:
        """Run a step, check its tokens and return its wall time, CPU time and CPU time in JAX, in seconds."""
        jax_seconds = sum(call.seconds for call in self.calls)
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        outputs = self.engine.step()
        wall_seconds, cpu_seconds = time.perf_counter() - wall_start, time.thread_time() - cpu_start
        for output in outputs:
            assert output.error is None, output
            for token in output.new_token_ids:
                assert token == self.expected[output.request_id] % VOCAB, output
                self.expected[output.request_id] += 1
        return wall_seconds, cpu_seconds, sum(call.seconds for call in self.calls) - jax_seconds

    def measure(self) -> dict[str, Any]:
        """Return median milliseconds per step, and deciles of the time outside JAX.

        The first decile is the least affected by other processes on the machine.
        """
        wall, cpu, jax_calls = (
            [1e3 * seconds for seconds in column]
            for column in zip(*(self.step() for _ in range(STEPS)), strict=True)
        )
        own = [total - jax_part for total, jax_part in zip(cpu, jax_calls, strict=True)]
        low, *_, high = statistics.quantiles(own, n=10)
        return {
            "step_ms": statistics.median(wall),
            "jax_ms": statistics.median(jax_calls),
            "own_ms": statistics.median(own),
            "own_spread_ms": [round(low, 3), round(high, 3)],
        }

    def profile(self) -> None:
        """Print the functions in which 50 steps spend most time."""
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(50):
            self.engine.step()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
