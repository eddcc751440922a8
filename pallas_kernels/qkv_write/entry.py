"""qkv_write: normalize and rotate the projected queries and keys, and write keys and values to the cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require_arrays,
    require_axes,
    require_one_of,
    require_shape,
    unsupported,
)
from pallas_kernels.qkv_write.kernel import QkvWriteDims, QkvWriteRefs, write_tokens
from pallas_kernels.shared.paged_kv import cache_dims
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_qkv_write

FIX = "Use jax.numpy and write_kv, as jattn's layers do with implementation='xla'"


def qkv_write(
    qkv: Float[Array, "tokens kv_heads group_and_2 head_dim"],
    k_cache: Shaped[Array, "..."],
    v_cache: Shaped[Array, "..."],
    slot_mapping: Int[Array, " tokens"],
    *,
    cos: Float[Array, "tokens half"] | None = None,
    sin: Float[Array, "tokens half"] | None = None,
    q_norm: Float[Array, " head_dim"] | None = None,
    k_norm: Float[Array, " head_dim"] | None = None,
    eps: float = 1e-6,
    is_offset: bool = False,
    layout: str = "NHD",
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Apply QK norm and RoPE, and write keys and values to their slots of the cache in place.

    Args:
        qkv: Query heads, key and value of each KV head, in this order.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim],
            of the dtype of qkv; updated in place if it is donated.
        v_cache: Cache of the values, of the shape and dtype of k_cache.
        slot_mapping: Slot `block * block_size + offset` of each token; tokens with negative slots are not
            written.
        cos: Cosines of the rotary angles of each token; elements i and i + head_dim / 2 are rotated as a
            pair. None = no RoPE.
        sin: Sines of the same angles.
        q_norm: Weight of an RMS norm over each query head, applied before RoPE; None = no norm.
        k_norm: Weight of the same norm over each key head.
        eps: Static: number added to the mean square.
        is_offset: Static: norms multiply by 1 + weight and round once (Gemma). Otherwise they also round
            before they multiply by the weight (Llama).
        layout: Static: "NHD" or "HND".
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        The queries and both caches.

    Raises:
        ValueError: If shapes disagree, or only one of cos and sin is given.
        NotImplementedError: If the kernel does not support the request, or is differentiated.

    Source: vLLM `fused_qk_norm_rope`, then `reshape_and_cache_flash`.
    """
    _check(qkv, k_cache, v_cache, slot_mapping, cos, sin, q_norm, k_norm, layout)
    tokens, kv_heads, width, head_dim = qkv.shape
    if 0 in (tokens, *k_cache.shape):
        return jax.lax.collapse(qkv[:, :, :-2], 1, 3), k_cache, v_cache
    dims = QkvWriteDims(
        kv_heads=kv_heads, group=width - 2, head_dim=head_dim, is_hnd=layout == "HND",
        block_size=k_cache.shape[2 if layout == "HND" else 1], eps=eps, is_offset=is_offset,
    )  # fmt: skip
    arrays = qkv, k_cache, v_cache, cos, sin, q_norm, k_norm
    qkv, k_cache, v_cache, cos, sin, q_norm, k_norm = forbid_kernel_derivative(arrays, "qkv_write", FIX)
    slots = (k_cache, v_cache)
    if not dims.is_hnd:
        slots = (k_cache.reshape(-1, kv_heads, head_dim), v_cache.reshape(-1, kv_heads, head_dim))
    k_ref, v_ref = jax.new_ref(slots[0]), jax.new_ref(slots[1])
    refs = QkvWriteRefs(qkv, slot_mapping.astype(jnp.int32), k_ref, v_ref, cos, sin, q_norm, k_norm)
    query = write_tokens(refs, dims=dims, interpret=interpret)
    k, v = (jax.freeze(cache).reshape(k_cache.shape) for cache in (k_ref, v_ref))
    return jax.lax.collapse(query, 1, 3), k, v


def _check(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    cos: Array | None,
    sin: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    layout: str,
) -> None:
    """Raise the errors that `qkv_write` documents."""
    require_one_of("layout", layout, ("NHD", "HND"))
    require_axes(4, qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    require_axes(1, slot_mapping=slot_mapping)
    require_arrays(cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    tokens, kv_heads, width, head_dim = qkv.shape
    if width < 3:
        raise ValueError(
            f"qkv has {width} heads per KV head, but at least 3 are required: a query head, the key and the "
            "value. Check the shape of the projection."
        )
    blocks, size, _, _ = cache_dims(k_cache, is_hnd=layout == "HND")
    expected = (blocks, kv_heads, size, head_dim) if layout == "HND" else (blocks, size, kv_heads, head_dim)
    require_shape("k_cache", k_cache.shape, expected, f"for qkv {qkv.shape}, {layout}")
    require_shape("v_cache", v_cache.shape, expected, "the shape of k_cache")
    require_shape("slot_mapping", slot_mapping.shape, (tokens,), "one slot per token of qkv")
    if (cos is None) != (sin is None):
        missing = "cos" if cos is None else "sin"
        raise ValueError(f"RoPE requires both cos and sin, but {missing} is None. Pass both or neither.")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles is not None:
            require_shape(name, angles.shape, (tokens, head_dim // 2), "tokens, head_dim / 2")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            require_shape(name, norm.shape, (head_dim,), "head_dim")
    reason = why_not_qkv_write(
        dtype=qkv.dtype, k_dtype=k_cache.dtype, v_dtype=v_cache.dtype, layout=layout, head_dim=head_dim
    )
    if reason is not None:
        raise unsupported("qkv_write", reason, FIX)
