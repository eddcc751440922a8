"""The prefill kernels over lists that ship, to compile ahead of time."""

import functools

import jax
import jax.numpy as jnp

from jattn import masks
from jattn.cache import PagedCache
from jattn.implementations import mosaic_gpu
from jattn.metadata.batch import abstract_metadata
from jattn.spec import AttentionSpec, Bucket, CacheSpec

BLOCKS = jax.ShapeDtypeStruct((32, 128, 128), jnp.bool_)
block_mask = lambda block_q, block_kv: jax.eval_shape(
    lambda: masks.BlockMask(blocks=jnp.zeros((32, 128, 128), bool), block_q=block_q, block_kv=block_kv)
)
MASKS = {
    "blocks_128": lambda: block_mask(128, 128),
    "blocks_64": lambda: block_mask(64, 64),
    "local_strided": masks.LocalStrided,
    "streaming": lambda: masks.streaming_heads([0, 3], num_first=4, num_recent=256),
    "big_bird": masks.BigBird,
    "dilated": lambda: masks.Dilated(64, 4),
    "blocks_32": lambda: block_mask(32, 32),
    "vertical_slash": lambda: jax.eval_shape(
        lambda: masks.VerticalSlash(
            columns=jnp.zeros((32, 16384), bool), slashes=jnp.zeros((32, 16384), bool)
        )
    ),
    "prefix_of_documents": lambda: jax.eval_shape(
        lambda: (
            (masks.Causal() | masks.Prefix(length=jnp.zeros(2, jnp.int32)))
            & masks.Document(ids=jnp.zeros((2, 16384), jnp.int32))
        )
    ),
}
SPECS = {
    "plain": {},
    "window_sinks": {"window": (4095, 0), "has_sinks": True},
    "cap_alibi": {"soft_cap": 30.0, "has_alibi": True},
}


def case(mask_name, block_size, head_dim, *, has_sinks=False, has_alibi=False, **changes):
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim, **changes)
    bucket = Bucket(max_prefills=2, max_prefill_tokens=8192, max_blocks=16384 // block_size)
    metadata = abstract_metadata(bucket, block_size)
    sizes = {"num_blocks": 2048, "block_size": block_size, "num_kv_heads": 8, "head_dim": head_dim}
    cache = jax.eval_shape(lambda: PagedCache.create(CacheSpec(**sizes)))
    per_head = jax.ShapeDtypeStruct((32,), jnp.float32)
    arrays = {
        "query": jax.ShapeDtypeStruct((8192, 32, head_dim), jnp.bfloat16),
        "kv": cache,
        "metadata": metadata,
        "mask": MASKS[mask_name](),
        "sinks": per_head if has_sinks else None,
        "alibi_slopes": per_head if has_alibi else None,
    }
    run = functools.partial(mosaic_gpu.attend, spec=spec)
    return lambda arrays: run(**arrays), (arrays,)


def aot_cases():
    """Name -> function and abstract arguments."""
    cases = {f"{mask}-plain-16-128": case(mask, 16, 128) for mask in MASKS}
    cases |= {
        f"blocks_128-{name}-16-128": case("blocks_128", 16, 128, **spec) for name, spec in SPECS.items()
    }
    cases |= {
        f"local_strided-{name}-64-64": case("local_strided", 64, 64, **spec) for name, spec in SPECS.items()
    }
    cases |= {
        f"vertical_slash-{name}-64-64": case("vertical_slash", 64, 64, **spec) for name, spec in SPECS.items()
    }
    return cases
