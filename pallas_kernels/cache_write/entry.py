"""cache_write: new keys and values into their slots, in place, rounded to 8 bits where the cache is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.cache_write.kernel import Refs, Shape, Side, write_rows
from pallas_kernels.cache_write.sizes import CacheWriteSizes, default_sizes
from pallas_kernels.checks import (
    require_arrays,
    require_axes,
    require_one_of,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.paged_kv import cache_dims
from pallas_kernels.shared.types import Interpret, Ref
from pallas_kernels.support import why_not_write

WAY_OUT = "Ask write_kv for implementation='xla'"


def cache_write(
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads head_dim"],
    k_cache: Shaped[Array, "..."],
    v_cache: Shaped[Array, "..."],
    slot_mapping: Int[Array, " tokens"],
    *,
    k_scale: Float32[Array, "..."] | None = None,
    v_scale: Float32[Array, "..."] | None = None,
    layout: str = "NHD",
    sizes: CacheWriteSizes | None = None,
    interpret: Interpret = None,
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."], Array | None, Array | None]:
    """Writes each token's key and value to its slot; the caches are changed in place where they are donated.

    Args:
        key: New keys, in the cache's dtype, or in 16 bits for a cache of int8 or fp8.
        value: New values, of key's dtype.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
        v_cache: As k_cache; may be of another dtype.
        slot_mapping: `block * block_size + offset` of each token; tokens of slots < 0 are not written.
        k_scale: Of an 8-bit k_cache: per token and head [blocks, kv_heads, block_size], made here and written
            in place; or a scalar that keys are divided by; None = 1.
        v_scale: As k_scale.
        layout: Static: "NHD" or "HND".
        sizes: Static. Chosen from the shapes when None.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        The caches, written, and the scales, written where they are per token and head.

    Raises:
        ValueError: Shapes or dtypes disagree.
        NotImplementedError: There is no kernel for this request, or it is differentiated.

    Source: vLLM `reshape_and_cache_flash`; rounding as in `int8_per_token_head` and `fp8_per_token_head`.
    """
    is_hnd = layout == "HND"
    _check(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, layout=layout)
    tokens, kv_heads, head_dim = key.shape
    if 0 in (tokens, *k_cache.shape):
        return k_cache, v_cache, k_scale, v_scale
    given = key, value, k_cache, v_cache, k_scale, v_scale
    key, value, k_cache, v_cache, k_scale, v_scale = forbid_kernel_derivative(given, "cache_write", WAY_OUT)
    is_rounded = k_cache.dtype != key.dtype or v_cache.dtype != key.dtype
    flat = (kv_heads, head_dim) if is_hnd or is_rounded else (kv_heads * head_dim,)
    as_rows = lambda x: x if is_hnd else x.reshape(-1, *flat)
    if sizes is None:
        row_bytes = kv_heads * head_dim * key.dtype.itemsize
        sizes = default_sizes(tokens, row_bytes, heads=kv_heads if is_rounded else None)
    caches = jax.new_ref(as_rows(k_cache)), jax.new_ref(as_rows(v_cache))
    scales = _scale_ref(k_scale), _scale_ref(v_scale)
    new = key.reshape(tokens, *flat), value.reshape(tokens, *flat)
    refs = Refs(new, slot_mapping.astype(jnp.int32), caches, scales)
    sides = _side(key, k_cache, k_scale), _side(value, v_cache, v_scale)
    shape = Shape(sides=sides, is_hnd=is_hnd, block_size=k_cache.shape[2 if is_hnd else 1], rows=sizes.rows)
    write_rows(refs, shape=shape, interpret=interpret)
    written = lambda scale, ref: jax.freeze(ref) if scale is not None and scale.ndim else scale
    k, v = (jax.freeze(ref).reshape(k_cache.shape) for ref in caches)
    return k, v, written(k_scale, scales[0]), written(v_scale, scales[1])


def _check(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    *,
    layout: str,
) -> None:
    """See cache_write's Raises."""
    require_one_of("layout", layout, ("NHD", "HND"))
    is_hnd = layout == "HND"
    require_axes(3, key=key, value=value)
    require_axes(4, k_cache=k_cache, v_cache=v_cache)
    require_axes(1, slot_mapping=slot_mapping)
    require_arrays(k_scale=k_scale, v_scale=v_scale)
    tokens, kv_heads, head_dim = key.shape
    require_positive(kv_heads=kv_heads)
    blocks, size, _, _ = cache_dims(k_cache, is_hnd=is_hnd)
    wanted = (blocks, kv_heads, size, head_dim) if is_hnd else (blocks, size, kv_heads, head_dim)
    require_shape("k_cache", k_cache.shape, wanted, f"of key {key.shape}, {layout}")
    require_shape("v_cache", v_cache.shape, wanted, "as k_cache")
    require_shape("value", value.shape, key.shape, "as key")
    require_shape("slot_mapping", slot_mapping.shape, (tokens,), "tokens of key")
    require_one_of("value.dtype", value.dtype, (key.dtype,))
    reason = why_not_write(
        dtype=key.dtype,
        k_dtype=k_cache.dtype,
        v_dtype=v_cache.dtype,
        k_scale_ndim=None if k_scale is None else k_scale.ndim,
        v_scale_ndim=None if v_scale is None else v_scale.ndim,
        layout=layout,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    if reason is not None:
        raise unsupported("cache_write", reason, "Use another implementation")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.ndim:
            require_shape(name, scale.shape, (blocks, kv_heads, size), "blocks, kv_heads, block_size")


def _side(new: Array, cache: Array, scale: Array | None) -> Side:
    return Side(
        heads=new.shape[1],
        dtype=None if cache.dtype == new.dtype else cache.dtype,
        has_token_scales=scale is not None and scale.ndim == 3,
    )


def _scale_ref(scale: Array | None) -> Ref:
    """Scales per token and head to write in place, or one number to read."""
    if scale is None:
        return None
    return jax.new_ref(scale) if scale.ndim else scale.reshape(1)
