"""nano-vllm's bench.py: 256 requests of 100 to 1,024 tokens in and out, all at once."""

import random

RUNS = (("nano_bench_first", 0), ("nano_bench", 1), ("nano_bench_again", 1))


def nano_workload(
    run: int = 0, *, requests: int = 256, longest: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """The first prompts, and how many tokens each is to get: what its `seed(0)` draws, in its order.

    No prompt and no answer is longer than `longest`.

    In another `run` they are as long, and begin with other tokens: nobody has their keys of an earlier one.
    """
    draw = random.Random(0)
    drawn = lambda: (draw.randint(0, 10000) + run) % 10001
    prompts = [[drawn() for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    counts = [draw.randint(100, 1024) for _ in range(256)]
    return [prompt[:longest] for prompt in prompts[:requests]], [min(n, longest) for n in counts[:requests]]
