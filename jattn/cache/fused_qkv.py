"""A layer's projected queries, keys and values: normalised, turned and written by one kernel where it can."""

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


class Turning(NamedTuple):
    """What is done to the heads of queries and keys, as `qkv_write` has it.

    Attributes:
        cos: [tokens, head_dim / 2], or None: nothing is turned.
        sin: As cos.
        q_norm: Weights [head_dim], or None: no norm.
        k_norm: As q_norm.
        eps: Static; of both norms.
        is_offset: Static; of both norms.
    """

    cos: Array | None
    sin: Array | None
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    is_offset: bool


def why_not_write_qkv(cache: PagedCache, dtype: np.dtype, rope: Any, norms: Sequence[Any]) -> str | None:
    """Why `write_qkv` does not serve a layer; None if it does.

    Args:
        cache: The layer's.
        dtype: Of what is projected.
        rope: The layer's, or None. Served are those that say that they turn halves (`turns_halves`) and give
            sines and cosines (`cos_sin`), as `jattn.models.rope.Rope`.
        norms: Of queries and of keys, each a norm or None. Served are RMS norms that say how they round
            (`rounds_once`), as `jattn.models.layers.RMSNorm`.
    """
    if rope is not None and not getattr(rope, "turns_halves", False):
        return "the rope does not turn the halves of whole heads"
    given = [norm for norm in norms if norm is not None]
    kinds = {(norm.eps, norm.is_offset) if is_kernel_rms_norm(norm) else None for norm in given}
    if None in kinds or len(kinds) > 1:
        return "the norms are no RMS norms of one kind that round as Llama's or Gemma's"
    return support.why_not_on(cache.k) or support.why_not_qkv_write(
        dtype=dtype,
        k_dtype=cache.k.dtype,
        v_dtype=cache.v.dtype,
        layout=cache.layout,
        head_dim=cache.head_dim,
    )


def is_kernel_rms_norm(norm: Any) -> bool:
    """Whether it is an RMS norm that rounds before the weight, as Llama's, or once, as Gemma's."""
    return hasattr(norm, "rounds_once") and norm.rounds_once == norm.is_offset


def turning(
    rope: Any, norms: Sequence[Any], positions: Int[Array, " tokens"], lengths: Array | None, dtype: np.dtype
) -> Turning:
    """Of a layer that `why_not_write_qkv` has nothing against; lengths: the requests', for ropes that ask."""
    cos, sin = (None, None) if rope is None else rope.cos_sin(positions, lengths, dtype)
    q_norm, k_norm = (None if norm is None else norm.weight[...] for norm in norms)
    kind = next((norm for norm in norms if norm is not None), None)
    eps, is_offset = (0.0, False) if kind is None else (kind.eps, kind.is_offset)
    return Turning(cos, sin, q_norm, k_norm, eps, is_offset)


def write_qkv(
    cache: PagedCache,
    qkv: Float[Array, "tokens kv_heads group_and_2 head_dim"],
    slot_mapping: Int[Array, " tokens"],
    how: Turning,
) -> tuple[Float[Array, "tokens q_heads head_dim"], PagedCache]:
    """Queries, normalised and turned, and the cache with the step's keys and values; donated as in write_kv.

    Source: vLLM `fused_qk_norm_rope`, then `reshape_and_cache_flash`.
    """
    static = {"layout": cache.layout, "eps": how.eps, "is_offset": how.is_offset}
    query, k, v = _write_qkv((cache.k, cache.v), qkv, slot_mapping, how[:4], **static)
    return query, replace(cache, k=k, v=v)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("layout", "eps", "is_offset"))
def _write_qkv(
    caches: tuple[Array, Array],
    qkv: Array,
    slots: Array,
    how: tuple[Array | None, ...],
    *,
    layout: str,
    eps: float,
    is_offset: bool,
) -> tuple[Array, Array, Array]:
    cos, sin, q_norm, k_norm = how
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
