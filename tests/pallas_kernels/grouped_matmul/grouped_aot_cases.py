"""Expert matrix products of two models at the sizes of prefill, to compile for an H200."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import TILE_ROWS, grouped_matmul

# name -> groups, inputs, outputs, whether outputs come first
SHAPES = {
    "qwen3_30b_a3b_up": (128, 2048, 1536, True),
    "qwen3_30b_a3b_down": (128, 768, 2048, False),
    "gpt_oss_20b_up": (32, 2880, 5760, True),
    "gpt_oss_20b_down": (32, 2880, 2880, False),
    "narrow": (4, 64, 64, False),
    "tile_128": (4, 2048, 128, True),
    "tile_64": (4, 2048, 64, False),
}


def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    cases = {}
    for name, (groups, inputs, outputs, outputs_first) in SHAPES.items():
        for dtype in (jnp.bfloat16, jnp.float16):
            tiles = 640 if dtype == jnp.bfloat16 else 3
            matrix = (outputs, inputs) if outputs_first else (inputs, outputs)
            arguments = (
                jax.ShapeDtypeStruct((tiles * TILE_ROWS, inputs), dtype),
                jax.ShapeDtypeStruct((groups, *matrix), dtype),
                jax.ShapeDtypeStruct((tiles,), jnp.int32),
            )
            run = functools.partial(grouped_matmul, outputs_first=outputs_first)
            cases[f"{name}-{jnp.dtype(dtype).name}"] = (run, arguments)
    return cases
