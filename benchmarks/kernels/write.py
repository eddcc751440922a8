"""Writes into the cache: kernel time, rounded to 8 bits on the way and not, in place."""

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
    """What `python -m benchmarks write` takes."""
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layout", nargs="+", default=["NHD", "HND"])
    parser.add_argument("--implementation", nargs="+", default=["mosaic_gpu", "xla"])
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every format with every combination of the options; the 16-bit write of a combination comes first."""
    rows = Rows("write", arguments.out)
    a = arguments
    for implementation, layout, tokens in itertools.product(a.implementation, a.layout, a.tokens):
        plain = None
        for quantization in FORMATS:
            try:
                time = measure(implementation, layout, tokens, quantization)
            except Exception as error:  # the other rows still count
                where = f"{implementation} {layout} {tokens} {quantization}"
                print(f"{where}: {type(error).__name__}: {error}"[:500], flush=True)
                continue
            plain = time["us"] if quantization is None else plain
            rows.add(
                implementation=implementation,
                layout=layout,
                tokens=tokens,
                quantization=quantization,
                **time,
                of_16_bits=plain and time["us"] / plain,
            )


def measure(implementation: str, layout: str, tokens: int, quantization: str | None) -> dict[str, Any]:
    """Microseconds of a write, checked against XLA's: a tie may be rounded to either side."""
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
    got = write(PagedCache.create(spec), key, value, slots)
    want = write_kv(PagedCache.create(spec), key, value, slots, implementation="xla")
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        ours, theirs = (x.astype(jnp.float32) for x in (ours, theirs))
        assert float((jnp.abs(ours - theirs) > jnp.abs(theirs) / 8 + 1).mean()) == 0
        assert float((ours != theirs).mean()) < 1e-2

    # The cache is made in the same program, so that it is written in place; filling it is not counted. Values
    # are filled with another number than keys: XLA would make one of the two and copy it.
    @jax.jit
    def run(key: jax.Array, value: jax.Array, slots: jax.Array) -> PagedCache:
        cache = PagedCache.create(spec)
        filled = jax.tree.map(lambda x: jnp.full_like(x, 2), (cache.v, cache.stored_v_scale))
        cache = replace(cache, v=filled[0], stored_v_scale=filled[1])
        return write(jax.lax.optimization_barrier(cache), key, value, slots)

    _, time = kernel_times(run, key, value, slots)
    is_filling = lambda name: "broadcast" in name or name.startswith("Memset")
    kernels = {name: us for name, us in time["kernels_us"].items() if not is_filling(name)}
    return {"us": sum(kernels.values()), "kernels_us": kernels}
