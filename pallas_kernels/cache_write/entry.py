"""cache_write: write new keys and values to their slots in place, quantized if the cache has 8 bits."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.cache_write.kernel import CacheWriteDims, CacheWriteRefs, SideOptions, write_rows
from pallas_kernels.cache_write.sizes import CacheWriteSizes, default_sizes
from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require_arrays,
    require_axes,
    require_one_of,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.shared.paged_kv import cache_dims
from pallas_kernels.shared.types import Interpret, Ref
from pallas_kernels.support import why_not_write

FIX = "Pass implementation='xla' to write_kv"


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
    """Write each token's key and value to its slot; donated caches are updated in place.

    Args:
        key: New keys, in the cache's dtype, or in 16 bits for a cache of int8 or fp8.
        value: New values, of the shape and dtype of key.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
        v_cache: Cache of the values, of the shape of k_cache; may have another dtype.
        slot_mapping: Slot `block * block_size + offset` of each token; tokens with negative slots are not
            written.
        k_scale: Scale of an 8-bit k_cache: per token and head [blocks, kv_heads, block_size], computed here
            and written in place; or a scalar that keys are divided by; None = 1.
        v_scale: Scale of an 8-bit v_cache, like k_scale.
        layout: Static: "NHD" or "HND".
        sizes: Static sizes of the kernel; None = chosen from the shapes.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Both caches and both scales; scales per token and head are updated, others are returned as they are.

    Raises:
        ValueError: If shapes or dtypes disagree.
        NotImplementedError: If the kernel does not support the request, or is differentiated.

    Source: vLLM `reshape_and_cache_flash`; rounding as in `int8_per_token_head` and `fp8_per_token_head`.
    """
    is_hnd = layout == "HND"
    gpu = kernel_architecture(k_cache)
    _check(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, layout=layout, gpu=gpu)
    tokens, kv_heads, head_dim = key.shape
    if 0 in (tokens, *k_cache.shape):
        return k_cache, v_cache, k_scale, v_scale
    arrays = key, value, k_cache, v_cache, k_scale, v_scale
    key, value, k_cache, v_cache, k_scale, v_scale = forbid_kernel_derivative(arrays, "cache_write", FIX)
    is_quantized = k_cache.dtype != key.dtype or v_cache.dtype != key.dtype
    if sizes is None:
        row_bytes = kv_heads * head_dim * key.dtype.itemsize
        sizes = default_sizes(tokens, row_bytes, kv_heads, is_quantized=is_quantized, gpu=gpu)
    copies_rows = not is_hnd and not is_quantized and sizes.uses_tma
    row_shape = (kv_heads * head_dim,) if copies_rows else (kv_heads, head_dim)
    k_rows, v_rows = k_cache, v_cache
    if not is_hnd:
        k_rows, v_rows = k_cache.reshape(-1, *row_shape), v_cache.reshape(-1, *row_shape)
    caches = jax.new_ref(k_rows), jax.new_ref(v_rows)
    scales = _scale_ref(k_scale), _scale_ref(v_scale)
    new = key.reshape(tokens, *row_shape), value.reshape(tokens, *row_shape)
    refs = CacheWriteRefs(new, slot_mapping.astype(jnp.int32), caches, scales)
    make_options = functools.partial(_side_options, uses_tma=sizes.uses_tma)
    sides = make_options(key, k_cache, k_scale), make_options(value, v_cache, v_scale)
    block_size = k_cache.shape[2 if is_hnd else 1]
    dims = CacheWriteDims(sides=sides, is_hnd=is_hnd, block_size=block_size, rows=sizes.rows)
    write_rows(refs, dims=dims, interpret=interpret)
    k, v = (jax.freeze(ref).reshape(k_cache.shape) for ref in caches)
    k_scale, v_scale = (
        jax.freeze(ref) if scale is not None and scale.ndim else scale
        for scale, ref in zip((k_scale, v_scale), scales, strict=True)
    )
    return k, v, k_scale, v_scale


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
    gpu: str,
) -> None:
    """Raise the errors that `cache_write` documents."""
    require_one_of("layout", layout, ("NHD", "HND"))
    is_hnd = layout == "HND"
    require_axes(3, key=key, value=value)
    require_axes(4, k_cache=k_cache, v_cache=v_cache)
    require_axes(1, slot_mapping=slot_mapping)
    require_arrays(k_scale=k_scale, v_scale=v_scale)
    tokens, kv_heads, head_dim = key.shape
    require_positive(kv_heads=kv_heads)
    blocks, size, _, _ = cache_dims(k_cache, is_hnd=is_hnd)
    expected = (blocks, kv_heads, size, head_dim) if is_hnd else (blocks, size, kv_heads, head_dim)
    require_shape("k_cache", k_cache.shape, expected, f"for key {key.shape}, {layout}")
    require_shape("v_cache", v_cache.shape, expected, "the shape of k_cache")
    require_shape("value", value.shape, key.shape, "the shape of key")
    require_shape("slot_mapping", slot_mapping.shape, (tokens,), "one slot per token of key")
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
        gpu=gpu,
    )
    if reason is not None:
        raise unsupported("cache_write", reason, FIX)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.ndim:
            require_shape(name, scale.shape, (blocks, kv_heads, size), "blocks, kv_heads, block_size")


def _side_options(new: Array, cache: Array, scale: Array | None, *, uses_tma: bool) -> SideOptions:
    is_quantized = cache.dtype != new.dtype
    return SideOptions(
        heads=new.shape[1],
        is_copied=uses_tma and not is_quantized,
        dtype=cache.dtype if is_quantized else None,
        has_token_scales=scale is not None and scale.ndim == 3,
    )


def _scale_ref(scale: Array | None) -> Ref:
    """Return a ref to scales per token and head, which are written in place, or a scalar as an array [1]."""
    if scale is None:
        return None
    return jax.new_ref(scale) if scale.ndim else scale.reshape(1)
