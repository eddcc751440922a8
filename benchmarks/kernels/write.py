"""Cache writes in place: kernel time with and without quantization."""

import argparse
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runner import Rows, kernel_times
from jattn import CacheSpec, PagedCache, write_kv
from jattn.pytree import replace

TOKENS = (1, 64, 256, 8192)
FORMATS = (None, "fp8_e4m3", "fp8_e4m3_token_head", "int8_token_head", "int8_k_only")
KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 128, 16, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks write`."""
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="Numbers of tokens to write.")
    parser.add_argument("--layout", nargs="+", default=["NHD", "HND"], help="Cache layouts.")
    parser.add_argument(
        "--implementation", nargs="+", default=["mosaic_gpu", "xla"], help="Implementations to measure."
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every format with every combination of the options, the 16-bit write first."""
    rows = Rows("write", arguments.out)
    combinations = itertools.product(arguments.implementation, arguments.layout, arguments.tokens)
    for implementation, layout, tokens in combinations:
        unquantized_us = None
        for quantization in FORMATS:
            try:
                time = measure(implementation, layout, tokens, quantization)
            except Exception as error:  # continue with the other rows
                case = f"{implementation} {layout} {tokens} {quantization}"
                print(f"{case}: {type(error).__name__}: {error}"[:500], flush=True)
                continue
            unquantized_us = time["us"] if quantization is None else unquantized_us
            rows.add(
                implementation=implementation,
                layout=layout,
                tokens=tokens,
                quantization=quantization,
                **time,
                of_16_bits=unquantized_us and time["us"] / unquantized_us,
            )


def measure(implementation: str, layout: str, tokens: int, quantization: str | None) -> dict[str, Any]:
    """Measure a write in microseconds, after a comparison with XLA's result.

    Ties may be rounded to either side, so a small share of values may differ by one step of the format.
    """
    spec = CacheSpec(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layout=layout,
        quantization=quantization,
    )
    key, value = (
        jax.random.normal(jax.random.key(seed), (tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16) for seed in (0, 1)
    )
    slots = np.random.default_rng(0).permutation(NUM_BLOCKS * BLOCK_SIZE)[:tokens]
    slots = jnp.asarray(slots, jnp.int32)
    write = functools.partial(write_kv, implementation=implementation)
    written = write(PagedCache.create(spec), key, value, slots)
    expected = write_kv(PagedCache.create(spec), key, value, slots, implementation="xla")
    for array, expected_array in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        actual, reference = (x.astype(jnp.float32) for x in (array, expected_array))
        assert float((jnp.abs(actual - reference) > jnp.abs(reference) / 8 + 1).mean()) == 0
        assert float((actual != reference).mean()) < 1e-2

    # The program creates the cache itself so that XLA writes in place; the kernels that fill the cache are
    # not counted. Keys and values are filled with different numbers, otherwise XLA would fill one array and
    # copy it.
    @jax.jit
    def run(key: jax.Array, value: jax.Array, slots: jax.Array) -> PagedCache:
        cache = PagedCache.create(spec)
        filled = jax.tree.map(lambda x: jnp.full_like(x, 2), (cache.v, cache.stored_v_scale))
        cache = replace(cache, v=filled[0], stored_v_scale=filled[1])
        return write(jax.lax.optimization_barrier(cache), key, value, slots)

    _, time = kernel_times(run, key, value, slots)
    kernels = {
        name: us
        for name, us in time["kernels_us"].items()
        if "broadcast" not in name and not name.startswith("Memset")
    }
    return {"us": sum(kernels.values()), "kernels_us": kernels}
