"""Reads of keys and values from a cache of any layout."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from jattn.cache.types import PackedKV, PagedCache, has_token_axis, take_blocks
from pallas_kernels.checks import require, require_int32s, require_type


def blocks_of(cache: PagedCache, ids: Int[Array, " *n"] | np.ndarray) -> tuple[Array, Array]:
    """Return keys and values of blocks, each [*n, block_size, kv_heads, head_dim], for any layout.

    Args:
        cache: Paged cache.
        ids: Block ids, for example a block table. Ids out of range read the first or last block.

    Returns:
        Keys and values as stored, in the cache's dtypes; 8-bit values are not multiplied by their scales.

    Raises:
        ValueError: If cache is not a PagedCache, or ids are not int32s.
    """
    require_type("cache", cache, PagedCache, "PagedCache.create makes one")
    is_array = isinstance(ids, jax.Array | np.ndarray)
    require(is_array, "ids", "be an array of block numbers", type(ids).__name__)
    require(jnp.issubdtype(ids.dtype, jnp.integer), "ids", "be ints", ids.dtype)
    require_int32s("ids", ids)
    return take_blocks(cache, ids)


def gather_tokens(
    kv: PagedCache | PackedKV,
    block_table: Int32[Array, "reqs max_blocks"],
    positions: Int32[Array, "reqs n q_heads"],
    is_valid: Bool[Array, "reqs n q_heads"],
) -> tuple[Array, Array]:
    """Gather keys and values at per-head positions of each row: [reqs, n, q_heads, head_dim].

    Returns values as stored, without scales, and zeros where `is_valid` is False.
    """
    group = positions.shape[-1] // kv.num_kv_heads
    head = jnp.arange(positions.shape[-1], dtype=jnp.int32) // group

    def masked(x: Array) -> Array:
        return jnp.where(is_valid[..., None], x, jnp.zeros((), x.dtype))

    position = jnp.where(is_valid, positions, 0)
    if isinstance(kv, PackedKV):
        token = kv.kv_start_loc.astype(jnp.int32)[:, None, None] + position
        return masked(kv.k[token, head]), masked(kv.v[token, head])
    row, k, v = jnp.arange(positions.shape[0])[:, None, None], jnp.asarray(kv.k), jnp.asarray(kv.v)
    block, offset = block_table[row, position // kv.block_size], position % kv.block_size
    if kv.layout == "packed":
        keys = k[block, head, :, offset].reshape(*positions.shape, kv.head_dim)
        return masked(keys), masked(v[block, head, :, offset])
    index = (block, head, offset) if kv.layout == "HND" else (block, offset, head)
    return masked(k[index]), masked(v[index])


def row_keys(
    kv: PagedCache | PackedKV, block_table: Int32[Array, "reqs max_blocks"], row: Int[Array, ""]
) -> Float[Array, "kv_heads keys head_dim"]:
    """Return the keys of one row from position 0 on, in f32; keys past the row's end are undefined."""
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
