"""The shipped prefill kernels to compile ahead of time: every head_dim, dtype, loader and feature."""

import functools
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.shared.memory import HEAD_DIMS
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import varlen_prefill

FEATURES = {
    "plain": {},
    "window_sinks": {"window": (127, 0), "has_sinks": True},
    "cap_alibi": {"soft_cap": 30.0, "has_alibi": True},
    "chunk_sqrt_alibi": {"chunk_size": 8192, "sqrt_alibi": True, "has_alibi": True},
    "cross_window": {"causal": False, "window": (100, 4)},
    "cross": {"causal": False},
}
# Of splits: windows that reach over as many keys as are worth cutting.
WIDE_FEATURES = FEATURES | {
    "window_sinks": {"window": (8191, 0), "has_sinks": True},
    "cross_window": {"causal": False, "window": (8000, 4)},
}
OF_SPLITS = "-splits"  # ends the names of kernels whose items may be splits
# Tokens of all requests and keys of one, at most.
FEWEST, FEW, MANY = (128, 65536), (256, 65536), (8192, 16384)
TWO_WARPGROUPS = f"d128-fewest-NHD16-bfloat16{OF_SPLITS}"
LOADERS = [("packed", None), *itertools.product(("NHD", "HND"), (8, 16, 64, 256))]


# Formats of 8 bits, by name: what keys and values are stored as, and whose their scales are.
STORED = {
    "fp8": ("float8_e4m3fn", None),
    "fp8_head": ("float8_e4m3fn", "head"),
    "fp8e5_head": ("float8_e5m2", "head"),
    "int8_token_head": ("int8", "token"),
    "int8_channel": ("int8", "channel"),
}


def case(
    head_dim, layout, block_size, dtype, *, sizes=MANY, stored=None, has_sinks=False, has_alibi=False, **score
):
    shape = jax.ShapeDtypeStruct
    (tokens, max_kv), reqs, q_heads, kv_heads = sizes, 24, 32, 8
    arrays = {
        "query": shape((tokens, q_heads, head_dim), dtype),
        "query_start_loc": shape((reqs + 1,), jnp.int32),
        "seq_lens": shape((reqs,), jnp.int32),
    }
    if block_size is None:
        kv = shape((tokens, kv_heads, head_dim), dtype)
        arrays["kv_start_loc"] = shape((reqs,), jnp.int32)
    else:
        per_block = (block_size, kv_heads) if layout == "NHD" else (kv_heads, block_size)
        stored_as, scale = STORED[stored] if stored else (dtype, None)
        kv = shape((10_000, *per_block, head_dim), stored_as)
        scales = {
            "head": (kv_heads,),
            "channel": (kv_heads, head_dim),
            "token": (10_000, kv_heads, block_size),
        }
        if scale:
            arrays |= dict.fromkeys(("k_scale", "v_scale"), shape(scales[scale], jnp.float32))
        arrays["block_table"] = shape((reqs, max_kv // block_size), jnp.int32)
    per_head = shape((q_heads,), jnp.float32)
    arrays |= {"sinks": per_head} if has_sinks else {}
    arrays |= {"alibi_slopes": per_head} if has_alibi else {}
    options = {"layout": "NHD" if block_size is None else layout, "return_lse": has_sinks}
    run = functools.partial(varlen_prefill, score=Score(scale=0.1, **score), **options)
    return lambda arrays: run(**arrays), ({**arrays, "key": kv, "value": kv},)


def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    cases = {}
    for i, (head_dim, feature) in enumerate(itertools.product(HEAD_DIMS, FEATURES)):
        layout, block_size = LOADERS[i % len(LOADERS)]
        dtype = ("bfloat16", "float16")[i // 2 % 2]
        name = f"d{head_dim}-{feature}-{layout}{block_size or ''}-{dtype}"
        cases[name] = case(head_dim, layout, block_size, jnp.dtype(dtype), **FEATURES[feature])
    for head_dim, dtype in itertools.product((64, 128, 256), ("bfloat16", "float16")):
        cases[f"d{head_dim}-alibi-packed-{dtype}"] = case(
            head_dim, "packed", None, jnp.dtype(dtype), has_alibi=True
        )
    cases["d128-cross_left_window-NHD16-bfloat16"] = case(
        128, "NHD", 16, jnp.dtype("bfloat16"), causal=False, window=(100, None)
    )
    for i, (head_dim, feature) in enumerate(itertools.product((64, 80, 128, 256), WIDE_FEATURES)):
        layout, block_size = LOADERS[1 + i % (len(LOADERS) - 1)]
        dtype = ("bfloat16", "float16")[i // 2 % 2]
        arguments = case(head_dim, layout, block_size, jnp.dtype(dtype), sizes=FEW, **WIDE_FEATURES[feature])
        cases[f"d{head_dim}-{feature}-{layout}{block_size}-{dtype}{OF_SPLITS}"] = arguments
    for i, (stored, head_dim) in enumerate(itertools.product(STORED, (64, 96, 128))):
        layout, block_size = LOADERS[1 + i % (len(LOADERS) - 1)]
        feature = list(WIDE_FEATURES)[i % len(WIDE_FEATURES)]
        dtype = ("bfloat16", "float16")[i // 2 % 2]
        options = {"sizes": FEW, "stored": stored, **WIDE_FEATURES[feature]}
        name = f"d{head_dim}-{feature}-{stored}-{layout}{block_size}-{dtype}{OF_SPLITS}"
        cases[name] = case(head_dim, layout, block_size, jnp.dtype(dtype), **options)
    cases[TWO_WARPGROUPS] = case(128, "NHD", 16, jnp.dtype("bfloat16"), sizes=FEWEST)
    return cases
