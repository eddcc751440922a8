"""The shipped decode kernels to compile ahead of time: every head_dim, dtype, layout and feature."""

import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS
from pallas_kernels.paged_decode import BlockList, default_sizes, paged_decode
from pallas_kernels.shared.memory import EIGHT_BIT_HEAD_DIMS, HEAD_DIMS
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
    "gqa16": (64, 4, 1),
    "mqa64": (64, 1, 1),
    "speculative": (32, 8, 8),
}
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
# Keys and values: their dtype (None = that of the queries), and the granularity of their scales.
PLAIN = ((None, None), (None, None))
STORED = {
    "fp8": (("float8_e4m3fn", "tensor"), ("float8_e4m3fn", "head")),
    "fp8_token_head": (("float8_e4m3fn", "token"), ("float8_e4m3fn", "token")),
    "fp8e5": (("float8_e5m2", None), ("float8_e5m2", "head")),
    "int8_token_head": (("int8", "token"), ("int8", "token")),
    "int8_static_v": (("int8", "token"), ("int8", "channel")),
    "int8_k_only": (("int8", "token"), (None, None)),
    "fp8_v_only": ((None, "head"), ("float8_e4m3fn", "token")),
}


def case(heads, head_dim, block_size, layout, dtype, stored=PLAIN, *, has_sinks=False, has_alibi=False,
         is_batch_invariant=False, list_block_size=None, lists_have_head_bits=False, **score):  # fmt: skip
    q_heads, kv_heads, query_len = heads
    shape, blocks = jax.ShapeDtypeStruct, 100_000
    per_block = (block_size, kv_heads) if layout == "NHD" else (kv_heads, block_size)
    per_token = blocks, kv_heads, block_size
    scale_shapes = {"tensor": (), "head": (kv_heads,), "channel": (kv_heads, head_dim), "token": per_token}
    kv_dtypes = tuple(jnp.dtype(stored_dtype or dtype) for stored_dtype, _ in stored)
    k_cache, v_cache = (shape((blocks, *per_block, head_dim), kv_dtype) for kv_dtype in kv_dtypes)
    k_scale, v_scale = (kind and shape(scale_shapes[kind], jnp.float32) for _, kind in stored)
    run = functools.partial(
        paged_decode,
        score=Score(scale=0.1, **score),
        layout=layout,
        decode_query_len=query_len,
        list_block_size=list_block_size,
        lists_have_head_bits=lists_have_head_bits,
        sizes=default_sizes(
            head_dim,
            rows=q_heads // kv_heads * query_len,
            kv_dtypes=kv_dtypes,
            batch_invariant=is_batch_invariant,
            list_block_size=list_block_size,
            gpu=kernel_architecture(),
        ),
    )
    per_head = shape((q_heads,), jnp.float32)
    modifiers = {"k_scale": k_scale, "v_scale": v_scale}
    modifiers |= {"sinks": per_head} if has_sinks else {}
    modifiers |= {"alibi_slopes": per_head} if has_alibi else {}
    if list_block_size is not None:
        ids = shape((32, kv_heads, 8192 // list_block_size), jnp.int32)
        modifiers["block_list"] = BlockList(ids, shape((32, kv_heads), jnp.int32))
    arguments = (
        shape((32 * query_len, q_heads, head_dim), dtype),
        k_cache,
        v_cache,
        shape((32, 8192 // block_size), jnp.int32),
        shape((32,), jnp.int32),
    )
    return lambda args, modifiers: run(*args, **modifiers), (arguments, modifiers)


def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    cases = {}
    grid = itertools.product(HEADS, HEAD_DIMS, FEATURES)
    for i, (heads, head_dim, feature) in enumerate(grid):
        block_size = BLOCK_SIZES[i % 6]
        layout, dtype = ("NHD", "HND")[i // 3 % 2], ("bfloat16", "float16")[i // 2 % 2]
        name = f"{heads}-d{head_dim}-{feature}-block{block_size}-{layout}-{dtype}"
        cases[name] = case(HEADS[heads], head_dim, block_size, layout, jnp.dtype(dtype), **FEATURES[feature])
    for i, (heads, head_dim) in enumerate(itertools.product(HEADS, EIGHT_BIT_HEAD_DIMS)):
        for stored in (list(STORED)[i % 7], list(STORED)[(i + 3) % 7]):
            i += len(cases)
            feature, block_size = list(FEATURES)[i % 6], BLOCK_SIZES[i % 5]
            layout, dtype = ("NHD", "HND")[i % 2], ("bfloat16", "float16")[i // 2 % 2]
            name = f"{heads}-d{head_dim}-{feature}-block{block_size}-{layout}-{dtype}-{stored}"
            cases[name] = case(
                HEADS[heads],
                head_dim,
                block_size,
                layout,
                jnp.dtype(dtype),
                STORED[stored],
                **FEATURES[feature],
            )
    for i, (heads, size) in enumerate(itertools.product(HEADS, (16, 32, 64, 128, 256))):
        feature, block_size, head_dim = list(FEATURES)[i % 6], BLOCK_SIZES[i % 5], (64, 128, 256)[i % 3]
        layout, dtype = ("NHD", "HND")[i % 2], ("bfloat16", "float16")[i // 2 % 2]
        stored, kind = (("plain", PLAIN), *STORED.items())[i % 8]
        q_heads, kv_heads, _ = HEADS[heads]
        by_head = q_heads <= MAX_QUERY_BLOCKS * kv_heads and i % 2 == 0
        name = f"{heads}-d{head_dim}-{feature}-block{block_size}-{layout}-{dtype}-{stored}-listed{size}"
        cases[name + "-by-head" * by_head] = case(
            HEADS[heads], head_dim, block_size, layout, jnp.dtype(dtype), kind,
            list_block_size=size, lists_have_head_bits=by_head, **FEATURES[feature],
        )  # fmt: skip
    for i, heads in enumerate(HEADS):
        feature, block_size, head_dim = list(FEATURES)[i % 6], BLOCK_SIZES[i % 6], (64, 128, 256)[i % 3]
        layout, stored = ("NHD", "HND")[i % 2], (PLAIN, STORED["fp8"])[i // 2 % 2]
        name = f"{heads}-d{head_dim}-{feature}-block{block_size}-{layout}-listed1" + "-fp8" * (
            stored != PLAIN
        )
        cases[name] = case(
            HEADS[heads], head_dim, block_size, layout, jnp.dtype("bfloat16"), stored, list_block_size=1,
            **FEATURES[feature],
        )  # fmt: skip
    return cases
