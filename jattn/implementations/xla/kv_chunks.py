"""Chunks of a request's keys and values, from a paged cache or packed."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, blocks_of, has_token_axis

CHUNK = 128  # minimum number of keys per chunk


class Chunk(NamedTuple):
    """Chunk of one request's keys and values, with the scales to multiply them by."""

    k: Shaped[Array, "keys kv_heads head_dim"]
    v: Shaped[Array, "keys kv_heads head_dim"]
    k_scale: Float[Array, "kv_heads keys"] | None
    v_scale: Float[Array, "kv_heads keys"] | None


def has_no_keys(kv: PagedCache | PackedKV, metadata: BatchMetadata) -> bool:
    """Return whether the shapes allow no key at all, so that no chunk can be read."""
    return 0 in kv.k.shape or (isinstance(kv, PagedCache) and metadata.block_table.shape[1] == 0)


def chunk_size(kv: PagedCache | PackedKV) -> int:
    """Return the number of keys per chunk: full blocks that hold at least CHUNK keys."""
    return CHUNK if isinstance(kv, PackedKV) else -(-CHUNK // kv.block_size) * kv.block_size


def load_chunk(
    kv: PagedCache | PackedKV, block_table: Int32[Array, "reqs max_blocks"], row: Array, c: Array
) -> Chunk:
    """Load keys and values of a row's chunk c; undefined past the row's end."""
    if isinstance(kv, PackedKV):
        index = kv.kv_start_loc[row] + c * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        k, v = (jnp.take(array, index, axis=0, mode="clip") for array in (kv.k, kv.v))
        return Chunk(k, v, None, None)
    blocks = chunk_size(kv) // kv.block_size
    columns = jnp.minimum(c * blocks + jnp.arange(blocks, dtype=jnp.int32), block_table.shape[1] - 1)
    ids = block_table[row, columns]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in blocks_of(kv, ids))
    scales = (
        jnp.swapaxes(jnp.take(scale, ids, axis=0, mode="clip"), 0, 1).reshape(kv.num_kv_heads, -1)
        if scale is not None and has_token_axis(scale)
        else None
        for scale in (kv.stored_k_scale, kv.stored_v_scale)
    )
    return Chunk(k, v, *scales)


def static_scales(
    kv: PagedCache | PackedKV, dtype: np.dtype
) -> tuple[Float[Array, "k_heads 1 1 1"], Float[Array, "v_heads 1 1 channels"]]:
    """Return static k_scale and v_scale, broadcastable against [kv_heads, group, tile_q, x]; 1 if none."""
    scales = (None, None) if isinstance(kv, PackedKV) else (kv.stored_k_scale, kv.stored_v_scale)
    k_scale, v_scale = (
        jnp.ones((1, 1, 1, 1), dtype)
        if scale is None or has_token_axis(scale)
        else jnp.asarray(scale, dtype).reshape(*(jnp.shape(scale)[:1] or (1,)), 1, 1, -1)
        for scale in scales
    )
    return k_scale, v_scale
