"""All-reduce kernels to compile ahead of time for an H200."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.collectives.ptx.all_gather import all_gather_kernel
from pallas_kernels.collectives.ptx.all_reduce import Norm, all_reduce_kernel
from pallas_kernels.collectives.ptx.exchange import Exchange, block_bytes_of

LLAMA, GEMMA = Norm(1e-6, is_offset=False, rounds_once=False), Norm(1e-6, is_offset=True, rounds_once=True)
SHAPES = {
    "1 row of 4096": (1, 4096, 2, None, jnp.bfloat16, 1),
    "64 rows of 4096, normed": (64, 4096, 2, LLAMA, jnp.bfloat16, 1),
    "300 rows of 5120, float16, 8 devices, Gemma's norm": (300, 5120, 8, GEMMA, jnp.float16, 1),
    "the same in two shots": (300, 5120, 8, GEMMA, jnp.float16, 2),
    "256 rows of 8192, 4 devices": (256, 8192, 4, None, jnp.bfloat16, 2),
    "128 rows of 8192, 8 devices, in two shots, normed": (128, 8192, 8, GEMMA, jnp.bfloat16, 2),
    "5 rows of 100, normed": (5, 100, 2, LLAMA, jnp.bfloat16, 1),
}
GATHERED = {"1 row of 32": (1, 32, 2), "300 rows of 96, 8 devices": (300, 96, 8)}


def aot_cases():
    """Return the function and abstract arguments by the name of the case."""
    cases = {}
    for name, (rows, width, devices, norm, dtype, shots) in SHAPES.items():
        options = {
            "exchange": Exchange(rows, width, devices, block_bytes_of(rows, width), shots),
            "norm": norm,
            "axis_name": "tp",
        }
        table = jax.ShapeDtypeStruct((2 + 2 * devices,), jnp.int32)
        x, weight = (jax.ShapeDtypeStruct(exchange, dtype) for exchange in ((rows, width), (width,)))
        plain = lambda table, x, options=options: all_reduce_kernel.on_gpu(table, x, **options)
        normed = functools.partial(all_reduce_kernel.on_gpu, **options)
        cases[name] = (plain, (table, x)) if norm is None else (normed, (table, x, x, weight))
    for name, (rows, width, devices) in GATHERED.items():
        exchange = Exchange(rows, 2 * width, devices, block_bytes_of(rows, 2 * width))
        table = jax.ShapeDtypeStruct((2 + 2 * devices,), jnp.int32)
        run = functools.partial(all_gather_kernel.on_gpu, exchange=exchange, axis_name="cp")
        cases[name] = (run, (table, jax.ShapeDtypeStruct((rows, width), jnp.float32)))
    return cases
