"""Writes of new keys and values to their slots, with quantization for 8-bit caches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn.cache.quantization import quantize_static, quantize_token_head
from jattn.cache.types import PagedCache, block_arrays, has_token_axis, require_distinct_arrays
from jattn.pytree import replace
from pallas_kernels import architectures, support
from pallas_kernels.cache_write import cache_write
from pallas_kernels.checks import require, require_int32s, require_shape

EIGHT_BIT = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def write_kv(
    cache: PagedCache,
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> PagedCache:
    """Write new keys and values to their slots. The cache is donated: use the returned one.

    The cache is written in place when called outside jit, and inside a jit that donates the cache
    (`jax.jit(step, donate_argnames="cache")`) or carries it through a loop. A jit that does not donate the
    cache copies it entirely in every call.

    For an 8-bit cache keys and values are quantized with the cache's static scales, or with new scales per
    token and head, which are written, too.

    Args:
        cache: Cache to write to.
        key: Keys of the step's tokens; may have more tokens than slot_mapping (padding).
        value: Values of the step's tokens, in the shape of key.
        slot_mapping: Slot `block * block_size + offset` of each token; negative slots are not written.
        implementation: "mosaic_gpu" or "xla"; None uses the best one that device and cache support.

    Raises:
        ValueError: If shapes or dtypes do not match.
        NotImplementedError: If the requested implementation does not support this write; the message has the
            reason.

    Source: vLLM `reshape_and_cache`, `reshape_and_cache_flash`.
    """
    require(isinstance(cache, PagedCache), "cache", "be a PagedCache", type(cache).__name__)
    _check_new(key, value, slot_mapping)
    tokens = slot_mapping.shape[0]
    require(key.shape[0] >= tokens, "key", f"have a token for each slot ({tokens})", f"shape {key.shape}")
    heads = (cache.num_kv_heads, cache.head_dim)
    require_shape("key", key.shape[1:], heads, "the cache's kv_heads, head_dim")
    require_shape("value", value.shape, key.shape, "the shape of key")
    for name, array, scale in (("k", cache.k, cache.stored_k_scale), ("v", cache.v, cache.stored_v_scale)):
        is_writable = array.dtype in EIGHT_BIT or not has_token_axis(scale)
        if not is_writable:
            raise ValueError(
                f"cache.{name} has dtype {array.dtype}, but {name}_scale has one scale per token, which only "
                f"8-bit caches support. Use an 8-bit cache, or a {name}_scale without an axis of tokens."
            )
    require_distinct_arrays(cache)
    reason = support.why_not_kernel_on("cache_write", cache.k) or _why_not_write(cache, key.dtype)
    use_kernel = support.should_use_kernel("write_kv", implementation, reason)
    arrays = _write_kv(
        block_arrays(cache), _static_scales(cache), key, value, slot_mapping, cache.layout, use_kernel
    )
    return replace(cache, **arrays)


def _check_new(key: Any, value: Any, slot_mapping: Any) -> None:
    """Check the types of new keys, values and slots."""
    kind = type(slot_mapping).__name__
    is_array = isinstance(slot_mapping, jax.Array | np.ndarray)
    require(is_array, "slot_mapping", "be an array [tokens], as metadata.slot_mapping is", kind)
    is_int_vector = slot_mapping.ndim == 1 and jnp.issubdtype(slot_mapping.dtype, jnp.integer)
    got = f"{slot_mapping.dtype} of shape {slot_mapping.shape}"
    require(is_int_vector, "slot_mapping", "be ints [tokens]", got)
    require_int32s("slot_mapping", slot_mapping)
    for name, rows in (("key", key), ("value", value)):
        require(isinstance(rows, jax.Array | np.ndarray), name, "be an array", type(rows).__name__)
        require(jnp.issubdtype(rows.dtype, jnp.floating), name, "hold floats", rows.dtype)
        rule = "have 3 axes, tokens, kv_heads and head_dim (reshape [batch, time, ...] to tokens)"
        require(rows.ndim == 3, name, rule, f"shape {rows.shape}")


def _why_not_write(cache: PagedCache, dtype: np.dtype) -> str | None:
    """Return why the cache_write kernel does not support a write; None if it does."""
    is_quantized = cache.k.dtype in EIGHT_BIT or cache.v.dtype in EIGHT_BIT
    k_scale_ndim, v_scale_ndim = (
        None if scale is None or not is_quantized else jnp.ndim(scale)
        for scale in (cache.stored_k_scale, cache.stored_v_scale)
    )
    return support.why_not_write(
        dtype=dtype if is_quantized else cache.k.dtype,
        k_dtype=cache.k.dtype,
        v_dtype=cache.v.dtype,
        k_scale_ndim=k_scale_ndim,
        v_scale_ndim=v_scale_ndim,
        layout=cache.layout,
        kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        gpu=architectures.kernel_architecture(cache.k),
    )


def _static_scales(cache: PagedCache) -> tuple[Any, Any]:
    """Return the static scales, which are not donated, since both may be the same array."""
    k_scale, v_scale = (
        None if has_token_axis(s) else s for s in (cache.stored_k_scale, cache.stored_v_scale)
    )
    return k_scale, v_scale


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(5, 6))
def _write_kv(
    arrays: dict[str, Array],
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slots: Array,
    layout: str,
    use_kernel: bool,
) -> dict[str, Array]:
    """Write the arrays of `block_arrays`."""
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    slots = slots.astype(jnp.int32)  # smaller ints would overflow
    is_quantized = any(arrays[name].dtype in EIGHT_BIT for name in ("k", "v"))
    if use_kernel and is_quantized:
        return _write_quantized(arrays, static_scales, key, value, slots, layout)
    new, scales = {}, {}
    for name, rows, scale in zip(("k", "v"), (key, value), static_scales, strict=True):
        if f"stored_{name}_scale" in arrays:
            new[name], scales[f"stored_{name}_scale"] = quantize_token_head(rows, arrays[name].dtype)
        else:
            new[name] = quantize_static(rows, scale, arrays[name].dtype)
    if use_kernel:
        k, v, *_ = cache_write(new["k"], new["v"], arrays["k"], arrays["v"], slots, layout=layout)
        return {"k": k, "v": v}
    num_blocks, block_size = (
        arrays["v"].shape[0],
        arrays["v"].shape[{"NHD": 1, "HND": 2, "packed": 3}[layout]],
    )
    # A negative slot becomes the block past the end, which `mode="drop"` skips; a negative index would wrap.
    block, offset = jnp.where(slots < 0, num_blocks, slots // block_size), slots % block_size
    index: tuple[Any, ...] = {
        "NHD": (block, offset),
        "HND": (block, slice(None), offset),
        "packed": (block, slice(None), slice(None), offset),
    }[layout]
    if layout == "packed":
        new["k"] = new["k"].reshape(*key.shape[:2], *arrays["k"].shape[2::2])  # head_dim / x, x
    updated = {name: arrays[name].at[index].set(rows, mode="drop") for name, rows in new.items()}
    scale_index = (block, slice(None), offset)
    for name, rows in scales.items():
        updated[name] = arrays[name].at[scale_index].set(rows, mode="drop")
    return updated


def _write_quantized(
    arrays: dict[str, Array],
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slots: Array,
    layout: str,
) -> dict[str, Array]:
    """Write to an 8-bit cache with the kernel that quantizes."""
    names = ("k", "v", "stored_k_scale", "stored_v_scale")
    scales = [
        arrays[name] if name in arrays else None if static is None else jnp.asarray(static, jnp.float32)
        for name, static in zip(names[2:], static_scales, strict=True)
    ]
    updated = cache_write(
        key,
        value,
        arrays["k"],
        arrays["v"],
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        layout=layout,
    )
    return {name: _as_jax(array) for name, array in zip(names, updated, strict=True) if name in arrays}


def _as_jax(array: Any) -> Array:
    """Narrow the type for the type checker: inside jit no array is numpy's."""
    return array
