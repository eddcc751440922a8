"""The decode kernels that ship, to compile ahead of time: every head_dim, dtype, layout and feature."""

import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_decode import default_tiles, paged_decode
from pallas_kernels.shared.head_dims import HEAD_DIMS
from pallas_kernels.shared.score import Score

FEATURES = {
    "plain": {},
    "window_sinks": {"window": (127, 0), "has_sinks": True},
    "cap_alibi": {"soft_cap": 30.0, "has_alibi": True},
    "chunk_sqrt_alibi": {"chunk_size": 8192, "sqrt_alibi": True, "has_alibi": True},
    "cross_window": {"causal": False, "window": (100, 4)},
    "invariant": {"is_batch_invariant": True},
}
HEADS = {
    "gqa4": (32, 8, 1),
    "mha": (8, 8, 1),
    "gqa8": (64, 8, 1),
    "mqa64": (64, 1, 1),
    "speculative": (32, 8, 8),
}
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def case(heads, head_dim, block_size, layout, dtype, *, has_sinks=False, has_alibi=False,
         is_batch_invariant=False, **score):  # fmt: skip
    q_heads, kv_heads, query_len = heads
    shape = jax.ShapeDtypeStruct
    per_block = (block_size, kv_heads) if layout == "NHD" else (kv_heads, block_size)
    cache = shape((100_000, *per_block, head_dim), dtype)
    run = functools.partial(
        paged_decode,
        score=Score(scale=0.1, **score),
        layout=layout,
        decode_query_len=query_len,
        tiles=default_tiles(
            head_dim, rows=q_heads // kv_heads * query_len, batch_invariant=is_batch_invariant
        ),
    )
    per_head = shape((q_heads,), jnp.float32)
    modifiers = {"sinks": per_head} if has_sinks else {}
    modifiers |= {"alibi_slopes": per_head} if has_alibi else {}
    arguments = (
        shape((32 * query_len, q_heads, head_dim), dtype),
        cache,
        cache,
        shape((32, 8192 // block_size), jnp.int32),
        shape((32,), jnp.int32),
    )
    return lambda args, modifiers: run(*args, **modifiers), (arguments, modifiers)


def aot_cases():
    """Name -> (function, abstract arguments)."""
    found = {}
    grid = itertools.product(HEADS, HEAD_DIMS, FEATURES)
    for nth, (heads, head_dim, feature) in enumerate(grid):
        block_size = BLOCK_SIZES[nth % 6]
        layout, dtype = ("NHD", "HND")[nth // 3 % 2], ("bfloat16", "float16")[nth // 2 % 2]
        name = f"{heads}-d{head_dim}-{feature}-block{block_size}-{layout}-{dtype}"
        found[name] = case(HEADS[heads], head_dim, block_size, layout, jnp.dtype(dtype), **FEATURES[feature])
    return found
