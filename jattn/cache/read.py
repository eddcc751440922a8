"""Keys and values out of a cache, whatever its layout."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from jattn.cache.types import PackedKV, PagedCache, has_token_axis
from pallas_kernels.checks import require, require_int32s, require_type


def blocks_of(cache: PagedCache, ids: Int[Array, " *n"] | np.ndarray) -> tuple[Array, Array]:
    """Keys and values of some blocks, whatever the layout: each [*n, block_size, kv_heads, head_dim].

    Args:
        cache: The cache, of any layout.
        ids: Which blocks; a block table, for one. Ids outside of the cache read its first or last block.

    Returns:
        What is stored, in the cache's dtypes: 8-bit numbers are not multiplied with their scales.

    Raises:
        ValueError: cache is no PagedCache, or ids are no ints, or beyond int32.
    """
    require_type("cache", cache, PagedCache, "PagedCache.create makes one")
    is_array = isinstance(ids, jax.Array | np.ndarray)
    require(is_array, "ids", "be an array of block numbers", type(ids).__name__)
    require(jnp.issubdtype(ids.dtype, jnp.integer), "ids", "be ints", ids.dtype)
    require_int32s("ids", ids)
    k, v = (jnp.take(array, ids, axis=0, mode="clip") for array in (cache.k, cache.v))
    if cache.layout == "HND":
        return jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)
    if cache.layout == "packed":
        k = jnp.moveaxis(k, -2, -4)  # [..., block_size, kv_heads, head_dim / x, x]
        return k.reshape(*k.shape[:-2], cache.head_dim), jnp.moveaxis(v, -1, -3)
    return k, v


def gather_tokens(
    kv: PagedCache | PackedKV,
    block_table: Int32[Array, "reqs max_blocks"],
    positions: Int32[Array, "reqs n q_heads"],
    is_real: Bool[Array, "reqs n q_heads"],
) -> tuple[Array, Array]:
    """Keys and values of some positions of each row, each query head its own: [reqs, n, q_heads, head_dim].

    What is stored, without scales. Nothing is read where a position is not real: zeros stand there.
    """
    group = positions.shape[-1] // kv.num_kv_heads
    head = jnp.arange(positions.shape[-1], dtype=jnp.int32) // group
    where = lambda x: jnp.where(is_real[..., None], x, jnp.zeros((), x.dtype))
    position = jnp.where(is_real, positions, 0)
    if isinstance(kv, PackedKV):
        token = kv.kv_start_loc.astype(jnp.int32)[:, None, None] + position
        return where(kv.k[token, head]), where(kv.v[token, head])
    row, k, v = jnp.arange(positions.shape[0])[:, None, None], jnp.asarray(kv.k), jnp.asarray(kv.v)
    block, place = block_table[row, position // kv.block_size], position % kv.block_size
    if kv.layout == "packed":
        parts = k[block, head, :, place]
        return where(parts.reshape(*positions.shape, kv.head_dim)), where(v[block, head, :, place])
    at = (block, head, place) if kv.layout == "HND" else (block, place, head)
    return where(k[at]), where(v[at])


def row_keys(
    kv: PagedCache | PackedKV, block_table: Int32[Array, "reqs max_blocks"], row: Int[Array, ""]
) -> Float[Array, "kv_heads keys head_dim"]:
    """The keys of one row of a batch in f32, from position 0 on; what is past its end is garbage."""
    if isinstance(kv, PackedKV):
        index = kv.kv_start_loc[row] + jnp.arange(kv.k.shape[0], dtype=jnp.int32)
        return jnp.swapaxes(jnp.take(kv.k, index, axis=0, mode="clip"), 0, 1).astype(jnp.float32)
    ids, scale = block_table[row], kv.stored_k_scale
    keys = blocks_of(kv, ids)[0].astype(jnp.float32)  # [max_blocks, block_size, kv_heads, head_dim]
    if scale is not None:
        scale = jnp.asarray(scale, jnp.float32)
        by_token = has_token_axis(scale)
        scale = jnp.swapaxes(jnp.take(scale, ids, axis=0, mode="clip"), 1, 2) if by_token else scale
        keys = keys * (scale[..., None] if by_token else scale.reshape(1, 1, -1, 1))
    return jnp.swapaxes(keys.reshape(-1, kv.num_kv_heads, kv.head_dim), 0, 1)
