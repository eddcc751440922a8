"""Steps whose arrays are slices that start 128 bytes after a multiple of 256, to compile ahead of time."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp

import jattn
from tests.pallas_kernels.varlen_prefill.sparse_aot_cases import abstract_metadata


def case():
    """Return a mixed step whose prompts come after 128 bytes of queries and of the block table."""
    sizes = {"num_kv_heads": 1, "head_dim": 64}
    spec = jattn.AttentionSpec(num_q_heads=1, **sizes)
    bucket = jattn.Bucket(max_decodes=1, max_prefills=2, max_prefill_tokens=400, max_blocks=32)
    cache_spec = jattn.CacheSpec(num_blocks=64, block_size=16, **sizes)
    cache = jax.eval_shape(lambda: jattn.PagedCache.create(cache_spec))
    query = jax.ShapeDtypeStruct((bucket.max_tokens, 1, 64), jnp.bfloat16)

    def run(query, cache, metadata):
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):  # there is no GPU here
            return jattn.attend(query, cache, metadata, spec, implementation="mosaic_gpu")

    return run, (query, cache, abstract_metadata(bucket, 16))


def training_case():
    """Return a training step over all tokens but the first, with rows of an odd multiple of 128 bytes."""

    def loss(q, k, v):
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):
            out = jattn.attention(q[1:], k[1:], v[1:], causal=True, implementation="mosaic_gpu")
        return (out.astype(jnp.float32) ** 2).sum()

    shape = lambda heads: jax.ShapeDtypeStruct((257, heads, 64), jnp.bfloat16)
    return jax.grad(loss, argnums=(0, 1, 2)), (shape(3), shape(1), shape(1))


@functools.cache
def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    return {
        "a mixed step": case(),
        "training": training_case(),
    }
