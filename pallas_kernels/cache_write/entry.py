"""cache_write: new keys and values into their slots, in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.cache_write.kernel import write_rows
from pallas_kernels.cache_write.tiles import Tiles, default_tiles
from pallas_kernels.checks import require_one_of, require_shape, unsupported
from pallas_kernels.support import why_not_write


def cache_write(
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads head_dim"],
    k_cache: Shaped[Array, "..."],
    v_cache: Shaped[Array, "..."],
    slot_mapping: Int[Array, " tokens"],
    *,
    layout: str = "NHD",
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Writes each token's key and value to its slot; the caches are changed in place where they are donated.

    Args:
        key: New keys, in the caches' dtype.
        value: New values.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
        v_cache: As k_cache.
        slot_mapping: `block * block_size + offset` of each token; tokens of slots < 0 are not written.
        layout: Static: "NHD" or "HND".
        tiles: Static. Chosen from the shapes when None.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        The caches, written.

    Raises:
        ValueError: Shapes or dtypes disagree.
        NotImplementedError: There is no kernel for this request; the message says why.

    Source: vLLM `reshape_and_cache_flash`.
    """
    require_one_of("layout", layout, ("NHD", "HND"))
    is_hnd = layout == "HND"
    tokens, kv_heads, head_dim = key.shape
    blocks, size = k_cache.shape[0], k_cache.shape[2 if is_hnd else 1]
    wanted = (blocks, kv_heads, size, head_dim) if is_hnd else (blocks, size, kv_heads, head_dim)
    require_shape("k_cache", k_cache.shape, wanted, f"of key {key.shape}, {layout}")
    require_shape("v_cache", v_cache.shape, wanted, "as k_cache")
    require_shape("value", value.shape, key.shape, "as key")
    require_shape("slot_mapping", slot_mapping.shape, (tokens,), "tokens of key")
    for name, array in (("key", key), ("value", value), ("v_cache", v_cache)):
        require_one_of(f"{name}.dtype", array.dtype, (k_cache.dtype,))
    reason = why_not_write(cache_dtype=k_cache.dtype, layout=layout, kv_heads=kv_heads, head_dim=head_dim)
    if reason is not None:
        raise unsupported("cache_write", reason, "Use another implementation")
    if tokens == 0:
        return k_cache, v_cache
    row_bytes = kv_heads * head_dim * key.dtype.itemsize
    as_rows = lambda x: x if is_hnd else x.reshape(-1, kv_heads * head_dim)
    k_ref, v_ref = (jax.new_ref(as_rows(cache)) for cache in (k_cache, v_cache))
    write_rows(
        as_rows(key),
        as_rows(value),
        slot_mapping.astype(jnp.int32),
        k_ref,
        v_ref,
        is_hnd=is_hnd,
        block_size=size,
        tiles=default_tiles(tokens, row_bytes) if tiles is None else tiles,
        interpret=interpret,
    )
    return jax.freeze(k_ref).reshape(wanted), jax.freeze(v_ref).reshape(wanted)
