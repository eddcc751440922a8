"""The cache as vLLM's paged_attention ops take it: two arrays, keys packed by 16 bytes."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn.cache import PagedCache, write_kv
from pallas_kernels.checks import require


def reshape_and_cache(
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    key_cache: Shaped[Array, "blocks kv_heads packs block_size x"],
    value_cache: Shaped[Array, "blocks kv_heads head_dim block_size"],
    slot_mapping: Int[Array, " tokens"],
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
) -> tuple[Array, Array]:
    """write_kv over vLLM's packed arrays: returns them written; those given are donated.

    A scale is a number, an array of one as vLLM's layers have it, or one for each kv head.

    Source: vLLM `reshape_and_cache`; the cache's dtype says what kv_cache_dtype said there.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        rule = "be a number or None (there is no kv_cache_dtype: the caches' own dtypes say it)"
        require(not isinstance(scale, str), name, rule, repr(scale))
    scales = (None if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale))
    k, v = (scale.reshape(()) if scale is not None and scale.size == 1 else scale for scale in scales)
    cache = PagedCache(k=key_cache, v=value_cache, k_scale=k, v_scale=v, layout="packed")
    cache = write_kv(cache, key, value, slot_mapping)
    return jnp.asarray(cache.k), jnp.asarray(cache.v)
