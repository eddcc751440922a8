"""Reference of cache_write, one token after the other."""

import jax.numpy as jnp


def cache_write(key, value, k_cache, v_cache, slot_mapping, *, layout):  # type: ignore[no-untyped-def]
    """Return copies of the caches with new keys and values in their slots; not jitted."""
    block_size = k_cache.shape[{"NHD": 1, "HND": 2}[layout]]
    k_cache, v_cache = jnp.array(k_cache), jnp.array(v_cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            index = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            k_cache = k_cache.at[index].set(key[token])
            v_cache = v_cache.at[index].set(value[token])
    return k_cache, v_cache


def scale_write(new, scales, slot_mapping):  # type: ignore[no-untyped-def]
    """Return scales [blocks, kv_heads, block_size] with new ones [tokens, kv_heads] in their slots."""
    scales = jnp.array(scales)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, scales.shape[2])
            scales = scales.at[block, :, offset].set(new[token])
    return scales
