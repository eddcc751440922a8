"""One attention step by hand: two requests decode a token each, a third brings a prompt of five."""

import jax
import jax.numpy as jnp

import jattn


def main() -> None:
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
    cache_spec = jattn.CacheSpec(num_blocks=16, block_size=4, num_kv_heads=2, head_dim=64, dtype=jnp.float32)

    # Which tokens belong to whom, and in which blocks each request's keys are. Block 0 is for padding.
    metadata = jattn.build_batch_metadata(
        query_lens=[1, 1, 5],  # new tokens
        seq_lens=[7, 3, 5],  # all tokens, the new ones included
        block_table=[[5, 9], [2], [7, 3]],  # request 0 has positions 0-3 in block 5 and 4-7 in block 9
        block_size=4,
    )
    print("slot of each new token:", metadata.slot_mapping)
    print("position of each:      ", metadata.positions)

    @jax.jit
    def step(
        cache: jattn.PagedCache, metadata: jattn.BatchMetadata, *qkv: jax.Array
    ) -> tuple[jax.Array, jattn.PagedCache]:
        query, key, value = qkv
        cache = jattn.write_kv(cache, key, value, metadata.slot_mapping)
        return jattn.attend(query, cache, metadata, spec), cache

    normal = lambda heads, seed: jax.random.normal(jax.random.key(seed), (7, heads, 64))
    qkv = (normal(8, 0), normal(2, 1), normal(2, 2))
    out, _ = step(jattn.PagedCache.create(cache_spec), metadata, *qkv)
    print("output [tokens, q_heads, head_dim]:", out.shape)
    # The prompt's first token sees only itself, so each head returns the value of its kv head.
    print("first prompt token == its value:", bool(jnp.allclose(out[2], jnp.repeat(qkv[2][2], 4, axis=0))))


if __name__ == "__main__":
    main()
