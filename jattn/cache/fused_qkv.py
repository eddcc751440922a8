"""Fused QK norm, RoPE and KV-cache write: one kernel from the projection to the cache."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jattn.cache import PagedCache
from jattn.pytree import replace
from pallas_kernels import support
from pallas_kernels.qkv_write import qkv_write


class QKNormRope(NamedTuple):
    """QK norm and RoPE parameters of a step; see `pallas_kernels.qkv_write`.

    Attributes:
        cos: Cosines of RoPE, [tokens, head_dim / 2]; None applies no RoPE.
        sin: Sines of RoPE, [tokens, head_dim / 2]; None with cos.
        q_norm: Weights of the query norm, [head_dim]; None applies no norm.
        k_norm: Weights of the key norm, [head_dim]; None applies no norm.
        eps: Epsilon of both norms (static).
        is_offset: Whether both norms multiply by 1 + weight, as Gemma's do (static).
    """

    cos: Array | None
    sin: Array | None
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    is_offset: bool


def why_not_write_qkv(cache: PagedCache, dtype: np.dtype, rope: Any, norms: Sequence[Any]) -> str | None:
    """Return why `write_qkv` does not support a layer; None if it does.

    Args:
        cache: Cache of the layer.
        dtype: Dtype of the projected queries, keys and values.
        rope: RoPE module of the layer, or None. It must rotate the halves of entire heads and provide cosines
            and sines (`cos_sin`), as `jattn.models.rope.Rope` does.
        norms: Norms of queries and of keys, each a module or None. They must be RMS norms that declare their
            rounding (`rounds_once`), as `jattn.models.layers.RMSNorm` does.
    """
    if rope is not None and not getattr(rope, "pairs_halves", False):
        return "the RoPE does not rotate the halves of entire heads"
    parameters = {
        (norm.eps, norm.is_offset) if is_kernel_rms_norm(norm) else None for norm in norms if norm is not None
    }
    if None in parameters or len(parameters) > 1:
        return "the query and key norms are not equal RMS norms that round as Llama's or Gemma's"
    return support.why_not_kernel_on("qkv_write", cache.k) or support.why_not_qkv_write(
        dtype=dtype,
        k_dtype=cache.k.dtype,
        v_dtype=cache.v.dtype,
        layout=cache.layout,
        head_dim=cache.head_dim,
    )


def is_kernel_rms_norm(norm: Any) -> bool:
    """Return whether a norm is an RMS norm that rounds as Llama's (before the weight) or Gemma's (once)."""
    return hasattr(norm, "rounds_once") and norm.rounds_once == norm.is_offset


def qk_norm_rope(
    rope: Any, norms: Sequence[Any], positions: Int[Array, " tokens"], lengths: Array | None, dtype: np.dtype
) -> QKNormRope:
    """Return the QK norm and RoPE parameters of a layer that `write_qkv` supports.

    Args:
        rope: RoPE module of the layer, or None.
        norms: Norms of queries and of keys, each a module or None.
        positions: Position of each token, int [tokens].
        lengths: Length of each token's request, for RoPE variants that depend on it.
        dtype: Dtype of the projected queries, keys and values.
    """
    cos, sin = (None, None) if rope is None else rope.cos_sin(positions, lengths, dtype)
    q_norm, k_norm = (None if norm is None else norm.weight[...] for norm in norms)
    norm = next((norm for norm in norms if norm is not None), None)
    eps, is_offset = (0.0, False) if norm is None else (norm.eps, norm.is_offset)
    return QKNormRope(cos, sin, q_norm, k_norm, eps, is_offset)


def write_qkv(
    cache: PagedCache,
    qkv: Float[Array, "tokens kv_heads group_and_2 head_dim"],
    slot_mapping: Int[Array, " tokens"],
    norm_rope: QKNormRope,
) -> tuple[Float[Array, "tokens q_heads head_dim"], PagedCache]:
    """Apply QK norm and RoPE and write keys and values to the cache.

    The cache is donated, as in `write_kv`.

    Returns:
        Normalized and rotated queries, and the written cache.

    Source: vLLM `fused_qk_norm_rope`, then `reshape_and_cache_flash`.
    """
    query, k, v = _write_qkv(
        (cache.k, cache.v),
        qkv,
        slot_mapping,
        norm_rope[:4],
        layout=cache.layout,
        eps=norm_rope.eps,
        is_offset=norm_rope.is_offset,
    )
    return query, replace(cache, k=k, v=v)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("layout", "eps", "is_offset"))
def _write_qkv(
    caches: tuple[Array, Array],
    qkv: Array,
    slots: Array,
    norm_rope: tuple[Array | None, ...],
    *,
    layout: str,
    eps: float,
    is_offset: bool,
) -> tuple[Array, Array, Array]:
    cos, sin, q_norm, k_norm = norm_rope
    return qkv_write(
        qkv,
        *caches,
        slots,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        is_offset=is_offset,
        layout=layout,
    )
