"""Cascade attention: decode steps of a Qwen3 of 8B sizes whose requests share a prefix of 8k tokens.

A row is recorded only if the log-probabilities of a decode step with and without cascade attention agree.
"""

import argparse
from typing import Any

from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B, SAMPLED, TOLERANCE, random_prompts, time_call
from jattn.serving import Engine, SamplingParams

SHARED_LEN, SUFFIX_LEN = 8192, 100  # prompt tokens that all requests share; prompt tokens after them
SHORT_LEN, LONG_LEN = 8, 136  # new tokens of a short and of a long completion
BATCHES = (64, 256)
NUM_BLOCKS = 8000  # the shared prefix and 300 tokens per request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks cascades`."""
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every batch size with and without cascade attention, on the same weights."""
    rows = Rows("cascades", arguments.out)
    model = random_decoder(QWEN3_8B | {"max_position_embeddings": 2 * SHARED_LEN})
    plain, cascading = make_engine(model, False), make_engine(model, None)
    for batch in BATCHES:
        prompts = make_prompts(batch)
        error = logprob_error(plain, cascading, prompts)
        num_cascade_steps = cascading.stats.num_cascade_steps
        plain_ms, cascade_ms = (step_ms(engine, prompts) for engine in (plain, cascading))
        rows.add(
            name=f"shared_{batch}x{SHARED_LEN}",
            step_ms=cascade_ms,
            step_ms_without=plain_ms,
            ratio=cascade_ms / plain_ms,
            cascade_steps=cascading.stats.num_cascade_steps - num_cascade_steps,
            logprob_error=error,
        )


def make_engine(model: Any, cascade_attention: bool | None) -> Engine:
    """Create an engine with prefix caching.

    Args:
        model: Model to serve.
        cascade_attention: False disables cascade attention; None is the engine's default.
    """
    return Engine(
        model,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8192,
        max_model_len=SHARED_LEN + 512,
        cascade_attention=cascade_attention,
    )


def make_prompts(batch: int) -> list[list[int]]:
    """Return random prompts that share their first SHARED_LEN tokens."""
    (prefix,) = random_prompts(1, SHARED_LEN, seed=11)
    return [[*prefix, *suffix] for suffix in random_prompts(batch, SUFFIX_LEN, seed=batch)]


def logprob_error(plain: Engine, cascading: Engine, prompts: list[list[int]]) -> float:
    """Return the largest difference between both engines' log-probabilities of the second new token.

    A decode step computes the second new token. Requests whose first tokens differ are not compared.

    Raises:
        SystemExit: The difference exceeds TOLERANCE, or no request can be compared.
    """
    params = SamplingParams(max_tokens=2, logprobs=5, ignore_eos=True)
    results = []
    for engine in (plain, cascading):
        engine.generate(prompts[:1], SAMPLED, max_tokens=1)  # caches the shared prefix
        results.append(engine.generate(prompts, params))
    errors = []
    for expected, result in zip(*results, strict=True):
        if expected.token_ids[0] == result.token_ids[0]:
            expected_logprobs, logprobs = ((output.logprobs or [])[1] for output in (expected, result))
            common = expected_logprobs.keys() & logprobs.keys()
            errors += [abs(expected_logprobs[i].logprob - logprobs[i].logprob) for i in common]
    if not errors or max(errors) > TOLERANCE:
        error = max(errors, default=None)
        raise SystemExit(f"log-probabilities with cascade attention are {error} off. No rows are recorded.")
    return max(errors)


def step_ms(engine: Engine, prompts: list[list[int]]) -> float:
    """Return milliseconds per decode step, from the difference between long and short completions."""

    def seconds(max_tokens: int) -> float:
        return time_call(lambda: engine.generate(prompts, SAMPLED, max_tokens=max_tokens))

    seconds(SHORT_LEN)  # compiles
    short, long = (min(seconds(length) for _ in range(2)) for length in (SHORT_LEN, LONG_LEN))
    return 1e3 * (long - short) / (LONG_LEN - SHORT_LEN)
