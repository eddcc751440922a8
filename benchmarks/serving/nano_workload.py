"""Workload of nano-vllm's bench.py: 256 requests of 100 to 1,024 tokens in and out, all queued at once."""

import random

RUNS = (("nano_bench_first", 0), ("nano_bench", 1), ("nano_bench_again", 1))


def nano_workload(
    run: int = 0, *, requests: int = 256, max_len: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """Return the prompts as token ids, and the number of new tokens of each request.

    The numbers are those that bench.py draws with `seed(0)`.

    Args:
        run: Number added to every token id. Prompts of different runs have the same lengths but share no
            prefix, so prefix caching does not help.
        requests: Number of requests; at most 256.
        max_len: Length to which prompts and completions are cut.
    """
    generator = random.Random(0)
    prompts = [
        [(generator.randint(0, 10000) + run) % 10001 for _ in range(generator.randint(100, 1024))]
        for _ in range(256)
    ]
    counts = [generator.randint(100, 1024) for _ in range(256)]
    return [prompt[:max_len] for prompt in prompts[:requests]], [min(n, max_len) for n in counts[:requests]]
