"""New keys and values into their slots, rounded on the way where the cache is of 8 bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn.cache.quantization import quantize_static, quantize_token_head
from jattn.cache.types import PagedCache, block_arrays, has_token_axis, require_distinct_arrays
from jattn.pytree import replace
from pallas_kernels import support
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
    """Writes new keys and values into their slots. The given cache is donated: use the one returned.

    It is written in place where its memory may be reused: called outside jit, always; inside a jit where that
    jit donates the cache (`jax.jit(step, donate_argnames="cache")`) or made it, as a loop carries it. A jit
    that does not donate copies the whole cache first, in every call.

    An 8-bit cache is quantised on the way: with its static scales, or, where it has scales per token and
    head, with new ones that are written too.

    Args:
        cache: What to write into.
        key: Keys of the step's tokens; may be padded longer than slot_mapping.
        value: Values, as key.
        slot_mapping: `block * block_size + offset` of each token; slots < 0 are not written.
        implementation: "mosaic_gpu" or "xla"; None = the best that this machine and this cache allow.

    Raises:
        ValueError: Shapes disagree, or something is not what its name says.
        NotImplementedError: The implementation asked for cannot write here; the message says why.

    Source: vLLM `reshape_and_cache`, `reshape_and_cache_flash`.
    """
    require(isinstance(cache, PagedCache), "cache", "be a PagedCache", type(cache).__name__)
    _check_new(key, value, slot_mapping)
    tokens = slot_mapping.shape[0]
    require(key.shape[0] >= tokens, "key", f"have a token for each slot ({tokens})", f"shape {key.shape}")
    heads = (cache.num_kv_heads, cache.head_dim)
    require_shape("key", key.shape[1:], heads, "the cache's kv_heads, head_dim")
    require_shape("value", value.shape, key.shape, "as key")
    for name, array, scale in (("k", cache.k, cache.stored_k_scale), ("v", cache.v, cache.stored_v_scale)):
        is_writable = array.dtype in EIGHT_BIT or not has_token_axis(scale)
        require(is_writable, f"{name}_scale", f"have no axis of tokens to write {array.dtype}", "one")
    require_distinct_arrays(cache)
    reason = support.why_not_on(cache.k) or _why_not_write(cache, key.dtype)
    use_kernel = support.should_use_kernel("write_kv", implementation, reason)
    written = _write_kv(
        block_arrays(cache), _static_scales(cache), key, value, slot_mapping, cache.layout, use_kernel
    )
    return replace(cache, **written)


def _check_new(key: Any, value: Any, slot_mapping: Any) -> None:
    """New keys and values must be floats, and slots one axis of ints."""
    kind = type(slot_mapping).__name__
    is_array = isinstance(slot_mapping, jax.Array | np.ndarray)
    require(is_array, "slot_mapping", "be an array [tokens], as metadata.slot_mapping is", kind)
    is_right = slot_mapping.ndim == 1 and jnp.issubdtype(slot_mapping.dtype, jnp.integer)
    got = f"{slot_mapping.dtype} of shape {slot_mapping.shape}"
    require(is_right, "slot_mapping", "be ints [tokens]", got)
    require_int32s("slot_mapping", slot_mapping)
    for name, rows in (("key", key), ("value", value)):
        require(isinstance(rows, jax.Array | np.ndarray), name, "be an array", type(rows).__name__)
        require(jnp.issubdtype(rows.dtype, jnp.floating), name, "hold floats", rows.dtype)
        rule = "have 3 axes, tokens, kv_heads and head_dim (reshape [batch, time, ...] to tokens)"
        require(rows.ndim == 3, name, rule, f"shape {rows.shape}")


def _why_not_write(cache: PagedCache, dtype: np.dtype) -> str | None:
    """Why cache_write does not serve; what is no 8-bit cache gets its rows in its own dtype."""
    is_rounded = cache.k.dtype in EIGHT_BIT or cache.v.dtype in EIGHT_BIT
    ndim = lambda scale: None if scale is None or not is_rounded else jnp.ndim(scale)
    return support.why_not_write(
        dtype=dtype if is_rounded else cache.k.dtype,
        k_dtype=cache.k.dtype,
        v_dtype=cache.v.dtype,
        k_scale_ndim=ndim(cache.stored_k_scale),
        v_scale_ndim=ndim(cache.stored_v_scale),
        layout=cache.layout,
        kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _static_scales(cache: PagedCache) -> tuple[Any, Any]:
    """Scales that writing reads and does not change; not donated, since both may be one array."""
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
    """The arrays of block_arrays, written."""
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    slots = slots.astype(jnp.int32)  # in 8 or 16 bits the cache's sizes wrap
    is_rounded = any(arrays[name].dtype in EIGHT_BIT for name in ("k", "v"))
    if use_kernel and is_rounded:
        return _write_rounded(arrays, static_scales, key, value, slots, layout)
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
    put = lambda array, index, rows: array.at[index].set(rows, mode="drop")
    written = {name: put(arrays[name], index, rows) for name, rows in new.items()}
    by_head = (block, slice(None), offset)
    return written | {name: put(arrays[name], by_head, rows) for name, rows in scales.items()}


def _write_rounded(
    arrays: dict[str, Array],
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slots: Array,
    layout: str,
) -> dict[str, Array]:
    """By the kernel that rounds on the way."""
    names = ("k", "v", "stored_k_scale", "stored_v_scale")
    scales = [
        arrays[name] if name in arrays else None if static is None else jnp.asarray(static, jnp.float32)
        for name, static in zip(names[2:], static_scales, strict=True)
    ]
    written = cache_write(
        key,
        value,
        arrays["k"],
        arrays["v"],
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        layout=layout,
    )
    return {name: _as_jax(array) for name, array in zip(names, written, strict=True) if name in arrays}


def _as_jax(array: Any) -> Array:
    """For the type checker: inside jit no array is numpy's."""
    return array
