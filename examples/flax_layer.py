"""A Flax layer over a paged cache: a prompt, then one more token, gives what the whole text gives at once."""

import jax
import jax.numpy as jnp
from flax import nnx

import jattn

HIDDEN, BLOCK_SIZE = 64, 4
SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, window=(7, 0))
CACHE_SPEC = jattn.CacheSpec(
    num_blocks=8, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=16, dtype=jnp.float32
)


def main() -> None:
    module = jattn.PagedAttention(HIDDEN, SPEC, rngs=nnx.Rngs(0))
    layer = nnx.jit(lambda *step: module(*step), donate_argnums=1)  # the cache is written in place
    text = jax.random.normal(jax.random.key(1), (12, HIDDEN))
    blocks = [[4, 1, 6]]  # where positions 0-3, 4-7 and 8-11 are cached

    # 1. The prompt: 11 new tokens, nothing cached yet.
    cache: jattn.PagedCache | None = jattn.PagedCache.create(CACHE_SPEC)
    prompt = jattn.build_batch_metadata([11], [11], blocks, block_size=BLOCK_SIZE)
    _, cache = layer(text[:11], cache, prompt, prompt.positions)

    # 2. One more token: the layer reads the other eleven from the cache, which it also writes.
    decode = jattn.build_batch_metadata([1], [12], blocks, block_size=BLOCK_SIZE)
    stepped, cache = layer(text[11:], cache, decode, decode.positions)

    # 3. The same text in one go and without a cache, as in training.
    whole = jattn.build_batch_metadata([12], [12], None)
    at_once, _ = layer(text, None, whole, whole.positions)
    difference = float(jnp.abs(stepped[0] - at_once[-1]).max())
    print(f"last token, step by step against at once: differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
