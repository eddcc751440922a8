"""nano-vllm's bench.py: 256 requests of 100 to 1,024 tokens in and out, all at once."""

import random


def nano_workload() -> tuple[list[list[int]], list[int]]:
    """The prompts, and how many tokens each is to get: what its `seed(0)` draws, in its order."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return prompts, [draw.randint(100, 1024) for _ in range(256)]
