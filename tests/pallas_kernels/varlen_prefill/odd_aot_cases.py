"""Prompts through `jattn.attend` whose tokens are no multiple of 8, to compile ahead of time."""

import functools

import jax
import jax.numpy as jnp

import jattn
from jattn.batch.bucket import Bucket
from jattn.batch.metadata import abstract_metadata
from pallas_kernels import support

TOKENS, KEYS, REQS = 2043, 2101, 5


def attend(query, kv, metadata, spec):
    support.why_not_on = lambda *_: None  # this process's own device is not a GPU
    return jattn.attend(query, kv, metadata, spec, implementation="mosaic_gpu", return_lse=True)


def aot_cases():
    """Return a case with a paged cache and one with packed keys, of two head dimensions."""
    bucket = Bucket(max_prefills=REQS, max_prefill_tokens=TOKENS, max_blocks=64)
    metadata = abstract_metadata(bucket, 16)
    starts = jax.ShapeDtypeStruct((REQS,), jnp.int32)
    cases = {}
    for head_dim in (128, 96):
        spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=head_dim)
        run = functools.partial(attend, spec=spec)
        query, keys, pages = (
            jax.ShapeDtypeStruct((*shape, head_dim), jnp.bfloat16)
            for shape in ((TOKENS, 8), (KEYS, 2), (300, 16, 2))
        )
        packed = jax.eval_shape(lambda k, starts: jattn.PackedKV(k=k, v=k, kv_start_loc=starts), keys, starts)
        paged = jax.eval_shape(lambda k: jattn.PagedCache(k=k, v=k), pages)
        name, kv = ("packed", packed) if head_dim == 96 else ("paged", paged)
        cases[f"{name} {head_dim}"] = run, (query, kv, metadata)
    return cases
