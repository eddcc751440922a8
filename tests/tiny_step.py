"""A minimal model: two attention layers between an embedding and its transpose."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from jattn.batch.bucket import pack_tokens

VOCAB, HIDDEN, BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 13, 16, 4, 24, 2
SPEC = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
CACHE_SPEC = jattn.CacheSpec(
    num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype=jnp.float32
)
CACHE_BYTES = NUM_LAYERS * CACHE_SPEC.num_bytes
CACHE_SHAPE = f"f32[{NUM_BLOCKS},{BLOCK_SIZE},1,8]"


class TinyModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List([jattn.PagedAttention(HIDDEN, SPEC, rngs=rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, tokens, caches, metadata):
        positions = metadata.positions
        x = self.embed(tokens) + jnp.sin(positions.astype(jnp.float32))[:, None]
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            out, cache = layer(x, cache, metadata, positions)
            x = x + out
            written.append(cache)
        return self.embed.attend(x[metadata.last_token_indices]), written


GRAPHDEF, PARAMS = nnx.split(TinyModel(nnx.Rngs(0)))


def step(params, caches, metadata, tokens):
    """Return the logits of each row's last token [reqs, vocab], and the caches."""
    return nnx.merge(GRAPHDEF, params)(tokens, caches, metadata)


def new_caches():
    return [jattn.PagedCache.create(CACHE_SPEC) for _ in range(NUM_LAYERS)]


def batch(new_tokens, seq_lens, tables, bucket):
    """Return the metadata and tokens of a step, padded to the bucket."""
    lens = [len(ids) for ids in new_tokens]
    metadata = jattn.build_batch_metadata(lens, seq_lens, tables, block_size=BLOCK_SIZE, bucket=bucket)
    return metadata, pack_tokens(new_tokens, bucket)


def shape_of(bucket):
    return (jax.ShapeDtypeStruct((bucket.max_tokens,), np.int32),)


def copies_of_the_cache(hlo):
    """Return the lines of compiled HLO that copy an array of the cache's shape."""
    return [
        line for line in hlo.splitlines() if CACHE_SHAPE in line.split("=", 1)[-1][:60] and " copy(" in line
    ]
