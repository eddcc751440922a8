"""Model of nano-vllm's workload: the scheduler's steps, with step times from a table. Needs no GPU.

The time of a decode step depends on the rows of its bucket and the cached tokens that it reads; the time of a
step with prompts depends on the tokens of its bucket and the cached tokens that its decodes read. The table
was measured with a Qwen3 of 8B sizes on one H200.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving.nano_workload import nano_workload
from jattn.batch.bucket import Bucket, exact_bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.step import bucket_of, gpu_step_sizes

NUM_BLOCKS, MAX_BLOCKS, MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 24_000, 512, 256, 8192


class Costs(NamedTuple):
    """Parts of a step's time in milliseconds.

    Attributes:
        rows: Pairs of a bucket's rows and the time of its decode step without attention, interpolated
            linearly.
        key: Time per cached token that a decode reads, in all layers together.
        token: Time per token of a bucket with prompts, including the attention of the prompts.
        step: Constant time per step in which the device waits for the host.
    """

    rows: tuple[tuple[int, float], ...]
    key: float
    token: float
    step: float = 0.0

    def step_ms(self, step: Step, bucket: Bucket) -> float:
        """Return the milliseconds of a step that runs in a bucket."""
        overhead = self.step + self.key * sum(step.seq_lens[: step.num_decodes])
        if bucket.max_prefill_tokens:
            return overhead + self.token * bucket.max_tokens
        return overhead + float(np.interp(bucket.max_decodes, *zip(*self.rows, strict=True)))


# Measured by the suite `engine`. Rows: decode steps minus their paged_decode kernels. Key: paged_decode of 64
# requests with 4k tokens. Token: a step with 8,192 prompt tokens.
MEASURED = Costs(((2, 4.1), (8, 4.3), (64, 4.8), (256, 6.7)), 33.5e-6, 190 / 8192)
# Lower bound for any engine: 15.1 GB of weights and 147,456 bytes of keys and values per token read at 4.47
# TB/s, and matrix products with 7.57e9 weights at 750 TFLOP/s.
LOWER_BOUND = Costs(((167, 3.38), (256, 5.17)), 33.0e-6, 2 * 7.57e9 / 750e12 * 1e3)

type ChooseBucket = Callable[[Step], Bucket]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks engine-model`."""
    parser.add_argument("--out", help="Ignored: rows that are not measured are printed and not recorded.")


def main(arguments: argparse.Namespace) -> None:
    """Print a line for each configuration."""
    for name, (costs, budget, choose) in configurations().items():
        print(json.dumps({"name": name} | simulate(costs, budget, choose)), flush=True)


def configurations() -> dict[str, tuple[Costs, int, ChooseBucket]]:
    """Return name -> (costs, max_num_batched_tokens, function that chooses a step's bucket)."""
    choosers = {budget: bucket_chooser(budget) for budget in (1024, 2048, 4096, MAX_BATCHED_TOKENS, 16384)}
    budgets: dict[str, tuple[Costs, int, ChooseBucket]] = {
        f"budget_{budget}": (MEASURED, budget, choose) for budget, choose in choosers.items()
    }
    default = choosers[MAX_BATCHED_TOKENS]
    two_sizes = bucket_chooser(MAX_BATCHED_TOKENS, decode_rows=(64, 256))
    return budgets | {
        "as_it_is": (MEASURED, MAX_BATCHED_TOKENS, default),
        "without_padding": (MEASURED, MAX_BATCHED_TOKENS, unpadded_bucket),
        "two_row_buckets": (MEASURED, MAX_BATCHED_TOKENS, two_sizes),
        "host_0.2_ms_a_step": (MEASURED._replace(step=0.2), MAX_BATCHED_TOKENS, default),
        "floor": (LOWER_BOUND, MAX_BATCHED_TOKENS, unpadded_bucket),
    }


def bucket_chooser(budget: int, decode_rows: Sequence[int] | None = None) -> ChooseBucket:
    """Return a function that chooses a step's bucket as the engine does.

    Args:
        budget: Maximum number of new tokens per step.
        decode_rows: Sizes of the buckets for decodes only; None keeps all default buckets.
    """
    buckets = [
        bucket_of(rows, tokens, MAX_NUM_SEQS, MAX_BLOCKS)
        for rows, tokens in gpu_step_sizes(MAX_NUM_SEQS, budget)
        if decode_rows is None or tokens or rows in decode_rows
    ]
    graphs = DecodeGraphs(_never_run, buckets)
    return lambda step: graphs.choose(step.query_lens, num_blocks=step.block_tables.shape[1])


def unpadded_bucket(step: Step) -> Bucket:
    """Return the smallest possible bucket of a step, as if every size were compiled."""
    return exact_bucket(step.query_lens)


def simulate(costs: Costs, budget: int, choose: ChooseBucket) -> dict[str, Any]:
    """Schedule the whole workload and return its time in seconds and the numbers of steps.

    Args:
        costs: Parts of a step's time.
        budget: Maximum number of new tokens per step.
        choose: Function that chooses a step's bucket.
    """
    block_manager = BlockManager(NUM_BLOCKS, 16)
    scheduler = Scheduler(block_manager, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget)
    prompts, remaining = nano_workload()
    for request_id, (prompt, count) in enumerate(zip(prompts, remaining, strict=True)):
        scheduler.add(request_id, len(prompt), count)
    num_tokens, ms, counts = sum(remaining), {True: 0.0, False: 0.0}, {True: 0, False: 0}
    while (step := scheduler.schedule()) is not None:
        has_prompts = step.num_prefills > 0
        ms[has_prompts] += costs.step_ms(step, choose(step))
        counts[has_prompts] += 1
        finished = []
        for request_id, samples in zip(step.request_ids, step.samples, strict=True):
            remaining[request_id] -= samples
            if not remaining[request_id]:
                finished.append(request_id)
        scheduler.update_after_start(step, finished)
    seconds = sum(ms.values()) / 1e3
    return {
        "s": round(seconds, 2),
        "tokens_per_s": round(num_tokens / seconds),
        "s_with_prompts": round(ms[True] / 1e3, 2),
        "steps_with_prompts": counts[True],
        "steps": sum(counts.values()),
    }


def _never_run(*arguments: Any) -> Any:
    raise AssertionError("the model runs no step")
