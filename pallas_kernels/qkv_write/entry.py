"""qkv_write: from the projection of a layer's input to what attention reads, in one kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.checks import (
    require,
    require_arrays,
    require_axes,
    require_one_of,
    require_shape,
    unsupported,
)
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.qkv_write.kernel import Refs, Shape, write_tokens
from pallas_kernels.shared.paged_kv import cache_dims
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_qkv_write

WAY_OUT = "Use jax.numpy and write_kv, as jattn's layers do with implementation='xla'"


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
    """Normalises and turns queries and keys, and writes keys and values to their slots, in place.

    Args:
        qkv: Of each kv head its query heads, its key, its value.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim],
            of qkv's dtype; changed in place where it is donated.
        v_cache: As k_cache.
        slot_mapping: `block * block_size + offset` of each token; tokens of slots < 0 are not written.
        cos: Of each token's angles; pairs (i, i + head_dim / 2) are turned. None = nothing is turned.
        sin: As cos.
        q_norm: Weights of an RMS norm over each query head, before it is turned; None = no norm.
        k_norm: The same of keys.
        eps: Static: added to the mean square.
        is_offset: Static: norms multiply by 1 + weight, then round (Gemma); else they round before, too.
        layout: Static: "NHD" or "HND".
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Queries, and the caches.

    Raises:
        ValueError: Shapes disagree, or one of cos and sin is missing.
        NotImplementedError: There is no kernel for this request, or it is differentiated.

    Source: vLLM `fused_qk_norm_rope`, then `reshape_and_cache_flash`.
    """
    _check(qkv, k_cache, v_cache, slot_mapping, cos, sin, q_norm, k_norm, layout)
    tokens, kv_heads, width, head_dim = qkv.shape
    if 0 in (tokens, *k_cache.shape):
        return jax.lax.collapse(qkv[:, :, :-2], 1, 3), k_cache, v_cache
    shape = Shape(
        kv_heads=kv_heads, group=width - 2, head_dim=head_dim, is_hnd=layout == "HND",
        block_size=k_cache.shape[2 if layout == "HND" else 1], eps=eps, is_offset=is_offset,
    )  # fmt: skip
    given = qkv, k_cache, v_cache, cos, sin, q_norm, k_norm
    qkv, k_cache, v_cache, cos, sin, q_norm, k_norm = forbid_kernel_derivative(given, "qkv_write", WAY_OUT)
    as_slots = lambda x: x if shape.is_hnd else x.reshape(-1, kv_heads, head_dim)
    k_ref, v_ref = (jax.new_ref(as_slots(cache)) for cache in (k_cache, v_cache))
    refs = Refs(qkv, slot_mapping.astype(jnp.int32), k_ref, v_ref, cos, sin, q_norm, k_norm)
    query = write_tokens(refs, shape=shape, interpret=interpret)
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
    """See qkv_write's Raises."""
    require_one_of("layout", layout, ("NHD", "HND"))
    require_axes(4, qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    require_axes(1, slot_mapping=slot_mapping)
    require_arrays(cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    tokens, kv_heads, width, head_dim = qkv.shape
    require(width > 2, "qkv", "have a query head beside key and value", qkv.shape)
    blocks, size, _, _ = cache_dims(k_cache, is_hnd=layout == "HND")
    wanted = (blocks, kv_heads, size, head_dim) if layout == "HND" else (blocks, size, kv_heads, head_dim)
    require_shape("k_cache", k_cache.shape, wanted, f"of qkv {qkv.shape}, {layout}")
    require_shape("v_cache", v_cache.shape, wanted, "as k_cache")
    require_shape("slot_mapping", slot_mapping.shape, (tokens,), "tokens of qkv")
    require((cos is None) == (sin is None), "sin", "be given where cos is, and only there", sin)
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
        raise unsupported("qkv_write", reason, "Use another implementation")
