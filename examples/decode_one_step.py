"""Compute one attention step by hand: two requests decode one token each, a third has a prompt of five."""

import jax
import jax.numpy as jnp

import jattn

SPEC = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
CACHE_SPEC = jattn.CacheSpec(num_blocks=16, block_size=4, num_kv_heads=2, head_dim=64, dtype=jnp.float32)


@jax.jit(donate_argnames="cache")  # without donation, every step would copy the cache
def step(
    cache: jattn.PagedCache, metadata: jattn.BatchMetadata, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jattn.PagedCache]:
    cache = jattn.write_kv(cache, key, value, metadata.slot_mapping)
    return jattn.attend(query, cache, metadata, SPEC), cache


def main() -> None:
    # The tokens of each request, and the blocks that store its keys. Block 0 is reserved for padding.
    metadata = jattn.build_batch_metadata(
        query_lens=[1, 1, 5],  # new tokens
        seq_lens=[7, 3, 5],  # all tokens, including the new ones
        block_table=[[5, 9], [2], [7, 3]],  # request 0 has positions 0-3 in block 5 and 4-7 in block 9
        block_size=4,
    )
    print("slot of each new token:", metadata.slot_mapping)
    print("position of each token:", metadata.positions)
    query, key, value = (jax.random.normal(jax.random.key(h), (7, h, 64)) for h in (8, 2, 2))
    out, _ = step(jattn.PagedCache.create(CACHE_SPEC), metadata, query, key, value)
    print("output [tokens, q_heads, head_dim]:", out.shape)
    # The first prompt token attends only to itself, so each query head returns the value of its kv head.
    print("first prompt token == its value:", bool(jnp.allclose(out[2], jnp.repeat(value[2], 4, axis=0))))


if __name__ == "__main__":
    main()
