"""What the scheduler's choices cost nano-vllm's workload: its own steps, timed by a table. Needs no GPU.

A step of decodes takes what its bucket's rows take, and the keys that it reads; one with prompts what its
bucket's tokens take, and the keys of its decodes. The numbers are of an 8B-wide Qwen3 on one H200.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving.nano_workload import nano_workload
from jattn.batch.bucket import Bucket, default_buckets
from jattn.batch.requests import exact_bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.config import prefill_sizes
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.scheduler import Scheduler

BLOCKS, COLUMNS, ROWS, BUDGET = 24_000, 512, 256, 8192


class Costs(NamedTuple):
    """Milliseconds.

    Attributes:
        rows: (rows of a bucket, a step of it without its attention): between them a straight line.
        key: A cached token that a decode reads, all layers together.
        token: A token of a bucket with prompts, their attention included.
        step: What each step takes besides: the device waits for the host.
    """

    rows: tuple[tuple[int, float], ...]
    key: float
    token: float
    step: float = 0.0

    def of(self, step: Step, bucket: Bucket) -> float:
        """Of a step in a bucket."""
        keys = self.step + self.key * sum(step.seq_lens[: step.num_decodes])
        if bucket.max_prefill_tokens:
            return keys + self.token * bucket.max_tokens
        return keys + float(np.interp(bucket.max_decodes, *zip(*self.rows, strict=True)))


# Rows: engine-kernels' steps less paged_decode, and engine's decode_1x1024 and 8x1024 less theirs. Key:
# paged_decode of 64 x 4k. Token: a step of 8,192 prompt tokens in engine-steps, of prompts such as these.
MEASURED = Costs(((2, 4.1), (8, 4.3), (64, 4.8), (256, 6.7)), 33.5e-6, 190 / 8192)
# 15.1 GB of weights and 147,456 bytes of a token's keys at 4.47 TB/s, products of 7.57e9 weights at 750
# TFLOP/s: what a step of this engine or of any other takes at the least.
FLOOR = Costs(((167, 3.38), (256, 5.17)), 33.0e-6, 2 * 7.57e9 / 750e12 * 1e3)

type Choose = Callable[[Step], Bucket]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks engine-model` takes."""
    parser.add_argument("--out", help="ignored: rows of no machine are printed alone")


def main(arguments: argparse.Namespace) -> None:
    """A line for each way to serve the workload."""
    for name, (costs, budget, choose) in ways().items():
        print(json.dumps({"name": name} | taken(costs, budget, choose)), flush=True)


def ways() -> dict[str, tuple[Costs, int, Choose]]:
    """Name to (costs, max_num_batched_tokens, bucket of a step)."""
    to_buckets = {budget: chosen_of(budget) for budget in (1024, 2048, 4096, BUDGET, 16384)}
    made: dict[str, tuple[Costs, int, Choose]] = {
        f"budget_{budget}": (MEASURED, budget, choose) for budget, choose in to_buckets.items()
    }
    return made | {
        "as_it_is": (MEASURED, BUDGET, to_buckets[BUDGET]),
        "without_padding": (MEASURED, BUDGET, exact),
        "two_row_buckets": (MEASURED, BUDGET, chosen_of(BUDGET, rows=(64, 256))),
        "host_0.2_ms_a_step": (MEASURED._replace(step=0.2), BUDGET, to_buckets[BUDGET]),
        "floor": (FLOOR, BUDGET, exact),
    }


def chosen_of(budget: int, rows: Sequence[int] | None = None) -> Choose:
    """The engine's choice among its default buckets, of decodes alone those with such rows."""
    buckets = default_buckets(ROWS, max_blocks=COLUMNS, prefill_tokens=prefill_sizes(budget))
    is_left = lambda one: rows is None or one.max_prefill_tokens or one.max_decodes in rows
    graphs = DecodeGraphs(_never_run, [one for one in buckets if is_left(one)])
    return lambda step: graphs.choose(step.query_lens, num_blocks=step.block_tables.shape[1])


def exact(step: Step) -> Bucket:
    """As if every size were compiled."""
    return exact_bucket(step.query_lens)


def taken(costs: Costs, budget: int, choose: Choose) -> dict[str, Any]:
    """Seconds of the workload, of them those of steps with prompts, and how many steps."""
    scheduler = Scheduler(BlockManager(BLOCKS, 16), max_num_seqs=ROWS, max_num_batched_tokens=budget)
    prompts, left = nano_workload()
    for number, (prompt, count) in enumerate(zip(prompts, left, strict=True)):
        scheduler.add(number, len(prompt), count)
    num_tokens, ms, counts = sum(left), {True: 0.0, False: 0.0}, {True: 0, False: 0}
    while (step := scheduler.schedule()) is not None:
        has_prompts = step.num_prefills > 0
        ms[has_prompts] += costs.of(step, choose(step))
        counts[has_prompts] += 1
        ended = []
        for number, samples in zip(step.request_ids, step.samples, strict=True):
            left[number] -= samples
            if not left[number]:
                ended.append(number)
        scheduler.complete(step, ended)
    seconds = sum(ms.values()) / 1e3
    return {
        "s": round(seconds, 2),
        "tokens_per_s": round(num_tokens / seconds),
        "s_with_prompts": round(ms[True] / 1e3, 2),
        "steps_with_prompts": counts[True],
        "steps": sum(counts.values()),
    }


def _never_run(*arguments: Any) -> Any:
    raise AssertionError("nothing runs here")
