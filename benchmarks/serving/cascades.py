"""Decode steps of an 8B-wide Qwen3 whose requests share 8k tokens: read once, and read by each.

Log-probabilities are compared first: no row where a decode step's differ by more than rounding.
"""

import argparse
from typing import Any

from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B, TOLERANCE, WARM, drawn_prompts, timed
from jattn.serving import Engine, SamplingParams

SHARED, OWN = 8192, 100  # tokens of a prompt
FEW, MANY = 8, 136  # new tokens
BATCHES = (64, 256)
NUM_BLOCKS = 8000  # the shared ones, and 300 tokens of each request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks cascades` takes."""
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Each batch with cascades and without, on the same weights."""
    rows = Rows("cascades", arguments.out)
    model = random_decoder(QWEN3_8B | {"max_position_embeddings": 2 * SHARED})
    plain, cascading = engine_of(model, False), engine_of(model, None)
    for batch in BATCHES:
        prompts = prompts_of(batch)
        error = logprob_error(plain, cascading, prompts)
        before = cascading.stats.num_cascade_steps
        without, with_them = (step_ms(engine, prompts) for engine in (plain, cascading))
        rows.add(
            name=f"shared_{batch}x{SHARED}",
            step_ms=with_them,
            step_ms_without=without,
            ratio=with_them / without,
            cascade_steps=cascading.stats.num_cascade_steps - before,
            logprob_error=error,
        )


def engine_of(model: Any, cascade_attention: bool | None) -> Engine:
    """Prefixes are shared in both: what differs is how often they are read."""
    return Engine(
        model,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8192,
        max_model_len=SHARED + 512,
        cascade_attention=cascade_attention,
    )


def prompts_of(batch: int) -> list[list[int]]:
    """All begin alike."""
    shared = drawn_prompts(1, SHARED, seed=11)[0]
    return [[*shared, *own] for own in drawn_prompts(batch, OWN, seed=batch)]


def logprob_error(plain: Engine, cascading: Engine, prompts: list[list[int]]) -> float:
    """The largest difference between log-probabilities of each request's second token, a decode step's."""
    params = SamplingParams(max_tokens=2, logprobs=5, ignore_eos=True)
    results = []
    for engine in (plain, cascading):
        engine.generate(prompts[:1], WARM, max_tokens=1)  # leaves the shared blocks to all
        results.append(engine.generate(prompts, params))
    errors = []
    for one, other in zip(*results, strict=True):
        if one.token_ids[0] == other.token_ids[0]:
            tables = [(result.logprobs or [])[1] for result in (one, other)]
            common = tables[0].keys() & tables[1].keys()
            errors += [abs(tables[0][i].logprob - tables[1][i].logprob) for i in common]
    if not errors or max(errors) > TOLERANCE:
        raise SystemExit(f"log-probabilities with cascades are {max(errors, default=None)} off: no rows")
    return max(errors)


def step_ms(engine: Engine, prompts: list[list[int]]) -> float:
    """Milliseconds of a step: the difference of long and short completions."""
    run = lambda count: timed(lambda: engine.generate(prompts, WARM, max_tokens=count))
    run(FEW)
    short, long = (min(run(count) for _ in range(2)) for count in (FEW, MANY))
    return 1e3 * (long - short) / (MANY - FEW)
