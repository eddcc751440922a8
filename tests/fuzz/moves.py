"""Metadata, writes, block moves, merges, cascades and decode loops against loops in numpy."""

import random

import numpy as np

import jattn
from tests.fuzz import blocks, loops, merging, metadata
from tests.fuzz.draw import weighted_choice

CHECKS = {
    "metadata": metadata.check,
    "write": blocks.write,
    "copy": blocks.copy,
    "swap": blocks.swap,
    "merge": merging.merge,
    "cascade": merging.cascade,
    "loop": loops.check,
}


def draw(seed: int) -> dict:
    """Return the operation and sizes of a case; everything else is drawn from the seed."""
    rng, formats = random.Random(f"moves-{seed}"), list(jattn.cache.spec.QUANTIZATIONS)
    operation = weighted_choice(rng, metadata=4, write=4, copy=2, swap=2, merge=1, cascade=1, loop=2)
    case = {"seed": seed, "operation": operation, "layout": rng.choice(jattn.cache.spec.LAYOUTS)}
    case |= {"quantization": rng.choice(formats), "dtype": rng.choice(["float32", "bfloat16", "float16"])}
    case |= {"block_size": rng.choice([1, 3, 4, 8, 16]), "num_kv_heads": rng.choice([1, 2, 3])}
    return case | {"head_dim": rng.choice([16, 32, 48]), "num_blocks": rng.randint(1, 9)}


def check(case: dict) -> None:
    CHECKS[case["operation"]](case, np.random.default_rng(case["seed"]))
