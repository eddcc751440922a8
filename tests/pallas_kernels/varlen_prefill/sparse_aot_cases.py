"""The shipped prefill kernels over tile lists to compile ahead of time."""

import functools

import jax
import jax.numpy as jnp

from jattn import masks
from jattn.batch.bucket import Bucket
from jattn.batch.metadata import abstract_metadata
from jattn.cache import CacheSpec, PackedKV, PagedCache
from jattn.spec import AttentionSpec
from tests.masks.custom_masks import KeyRanges
from tests.regions import attend_region


def block_mask(block_q, block_kv, *, heads=32, num_blocks=128):
    blocks = jax.ShapeDtypeStruct((heads, num_blocks if block_q else 1, num_blocks), bool)
    return jax.eval_shape(lambda b: masks.BlockMask(blocks=b, block_q=block_q, block_kv=block_kv), blocks)


MASKS = {
    "blocks_128": lambda: block_mask(128, 128),
    "blocks_64": lambda: block_mask(64, 64),
    "local_strided": masks.LocalStrided,
    "streaming": lambda: masks.streaming_heads([0, 3], num_first=4, num_recent=256),
    "big_bird": masks.BigBird,
    "dilated": lambda: masks.Dilated(64, 4),
    "blocks_of_all_queries": lambda: block_mask(None, 64),
    "blocks_32": lambda: block_mask(32, 32),
    "blocks_1": lambda: block_mask(1, 1, heads=1, num_blocks=16384),
    "vertical_slash": lambda: jax.eval_shape(
        lambda: masks.VerticalSlash(
            columns=jnp.zeros((32, 16384), bool), slashes=jnp.zeros((32, 16384), bool)
        )
    ),
    "gathered": lambda: jax.eval_shape(
        lambda: masks.VerticalSlash(
            columns=jnp.zeros((32, 16384), bool), slashes=jnp.zeros((32, 16384), bool), num_gathered=1000
        )
    ),
    "vertical_slash_of_each_row": lambda: jax.eval_shape(
        lambda: masks.VerticalSlash(
            columns=jnp.zeros((2, 32, 16384), bool), slashes=jnp.zeros((2, 32, 16384), bool)
        )
    ),
    "of_one_rank": lambda: jax.eval_shape(
        lambda: masks.InterleavedMask(
            mask=masks.Window(4095, None) & masks.Causal(),
            rank=jnp.int32(1),
            shift=jnp.zeros(2, jnp.int32),
            num_ranks=2,
            interleave=1,
        )
    ),
    "prefix_of_documents": lambda: jax.eval_shape(
        lambda: (
            (masks.Causal() | masks.Prefix(length=jnp.zeros(2, jnp.int32)))
            & masks.Document(ids=jnp.zeros((2, 16384), jnp.int32))
        )
    ),
}
# Block masks of which a tile of keys holds several blocks.
PACKED_MASKS = {
    "blocks_128_64": lambda: block_mask(128, 64, num_blocks=256),
    "blocks_128_32": lambda: block_mask(128, 32, num_blocks=512),
    "blocks_128_16": lambda: block_mask(128, 16, num_blocks=1024),
    "blocks_64_16": lambda: block_mask(64, 16, num_blocks=1024),
    "rows_32": lambda: block_mask(1, 32, heads=1, num_blocks=16384),
}
# Block masks that the heads of a KV head share, so that a tile holds several heads' queries of one block.
SHARED_MASKS = {
    "shared_64": lambda: block_mask(64, 64, heads=8, num_blocks=256),
    "shared_32": lambda: block_mask(32, 32, heads=8, num_blocks=512),
    "shared_16": lambda: block_mask(16, 16, heads=8, num_blocks=1024),
    "shared_documents_32": lambda: jax.eval_shape(
        lambda mask: mask & masks.Document(ids=jnp.zeros((2, 16384), jnp.int32)),
        block_mask(32, 32, heads=8, num_blocks=512),
    ),
}
# Masks of each token that 16 query heads share, which become rows of one head.
TOKEN_MASKS = {
    "tokens_64": lambda: block_mask(1, 64, heads=2, num_blocks=16384),
    "tokens_32": lambda: block_mask(1, 32, heads=2, num_blocks=16384),
}
USER_MASKS = {
    "key_ranges": lambda: jax.eval_shape(
        lambda: KeyRanges(begin=jnp.zeros((2, 16384), jnp.int32), end=jnp.zeros((2, 16384), jnp.int32))
    )
}
SPECS = {
    "plain": {},
    "window_sinks": {"window": (4095, 0), "has_sinks": True},
    "encoder": {"causal": False},
    "cap_alibi": {"soft_cap": 30.0, "has_alibi": True},
}


def case(mask_name, block_size, head_dim, *, has_sinks=False, has_alibi=False, **changes):
    """Return a case over a paged cache, or over packed keys if block_size is "packed" or "aligned"."""
    kv_heads = 2 if mask_name in TOKEN_MASKS else 8
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=kv_heads, head_dim=head_dim, **changes)
    is_packed = isinstance(block_size, str)
    max_blocks = 0 if is_packed else 16384 // block_size
    bucket = Bucket(max_prefills=2, max_prefill_tokens=8192, max_blocks=max_blocks)
    metadata = abstract_metadata(bucket, 16 if is_packed else block_size)
    per_head = jax.ShapeDtypeStruct((32,), jnp.float32)
    if is_packed:
        key = jax.ShapeDtypeStruct((8192, kv_heads, head_dim), jnp.bfloat16)
        is_aligned = block_size == "aligned"
        make = lambda k, starts: PackedKV(k=k, v=k, kv_start_loc=starts, is_aligned=is_aligned)
        kv = jax.eval_shape(make, key, metadata.seq_lens)
    else:
        sizes = {
            "num_blocks": 2048,
            "block_size": block_size,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
        }
        kv = jax.eval_shape(lambda: PagedCache.create(CacheSpec(**sizes)))
    arrays = {
        "query": jax.ShapeDtypeStruct((8192, 32, head_dim), jnp.bfloat16),
        "kv": kv,
        "metadata": metadata,
        "mask": (MASKS | PACKED_MASKS | SHARED_MASKS | TOKEN_MASKS | USER_MASKS)[mask_name](),
        "sinks": per_head if has_sinks else None,
        "alibi_slopes": per_head if has_alibi else None,
    }
    run = functools.partial(attend_region, spec=spec)
    return lambda arrays: run(**arrays), (arrays,)


def aot_cases():
    """Return the function and abstract arguments by the name of the case."""
    every = [(mask, "plain", 16, 128) for mask in MASKS] + [(mask, "encoder", 64, 64) for mask in MASKS]
    every += [("blocks_128", spec, 16, 128) for spec in SPECS]
    every += [(mask, spec, 64, 64) for mask in ("local_strided", "vertical_slash") for spec in SPECS]
    every += [("key_ranges", "plain", 16, 128), ("key_ranges", "encoder", 64, 64)]
    every += [(mask, "plain", 16, 128) for mask in PACKED_MASKS]
    every += [(mask, "window_sinks", 64, 64) for mask in PACKED_MASKS]
    every += [("blocks_128_16", "window_sinks", 16, 128)]
    every += [(mask, "plain", 16, 128) for mask in SHARED_MASKS]
    every += [(mask, "window_sinks", 64, 64) for mask in SHARED_MASKS]
    every += [(mask, "cap_alibi", 16, 128) for mask in ("shared_64", "shared_16")]
    every += [(mask, "plain", 16, 128) for mask in TOKEN_MASKS]
    every += [("tokens_64", "window_sinks", "packed", dim) for dim in (64, 128)]
    every += [
        (mask, "plain", "packed", 128) for mask in ("blocks_128", "blocks_64", "blocks_32", "shared_64")
    ]
    every += [(mask, "plain", "aligned", 128) for mask in ("tokens_64", "blocks_64", "blocks_128_16")]
    every += [("tokens_32", "plain", "packed", 128), ("blocks_64", "cap_alibi", "packed", 128)]
    return {
        f"{mask}-{spec}-{block_size}-{head_dim}": case(mask, block_size, head_dim, **SPECS[spec])
        for mask, spec, block_size, head_dim in every
    }
