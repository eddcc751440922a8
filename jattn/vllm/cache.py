"""The cache as vLLM's paged_attention ops take it: two arrays, keys packed by 16 bytes."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn.cache import PagedCache, write_kv


def reshape_and_cache(
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    key_cache: Shaped[Array, "blocks kv_heads packs block_size x"],
    value_cache: Shaped[Array, "blocks kv_heads head_dim block_size"],
    slot_mapping: Int[Array, " tokens"],
    k_scale: Float[Array, ""] | float | None = None,
    v_scale: Float[Array, ""] | float | None = None,
) -> tuple[Array, Array]:
    """write_kv over vLLM's packed arrays: returns them written; those given are donated.

    Source: vLLM `reshape_and_cache`; the cache's dtype says what kv_cache_dtype said there.
    """
    as_scale = lambda scale: None if scale is None else jnp.asarray(scale, jnp.float32)
    cache = PagedCache(
        k=key_cache, v=value_cache, k_scale=as_scale(k_scale), v_scale=as_scale(v_scale), layout="packed"
    )
    cache = write_kv(cache, key, value, slot_mapping)
    return jnp.asarray(cache.k), jnp.asarray(cache.v)
