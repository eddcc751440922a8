"""Whether arrays belong together as `attention` takes them, and what is made of them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.implementations.choice import Asked, asked_for
from jattn.masks import BlockMask, Mask, Sizes, check_mask
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_shape, unsupported


class Rows(NamedTuple):
    """Which tokens belong together, and what they see of each other."""

    segment_ids: Int[Array, "batch tokens"] | None
    cu_seqlens: Int[Array, " bounds"] | None
    mask: Mask | None


def spec_of_arrays(q: Any, k: Any, v: Any, **numbers: Any) -> AttentionSpec:
    """The arrays' layer; they must belong together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        is_array = hasattr(array, "dtype") and hasattr(array, "ndim")
        require(is_array, name, "be an array", type(array).__name__)
        require(
            array.ndim in (3, 4),
            name,
            "have shape [batch, tokens, heads, head_dim], or no batch",
            array.shape,
        )
        is_real = jnp.issubdtype(array.dtype, jnp.floating) and jnp.dtype(array.dtype).itemsize > 1
        require(is_real, name, "be of a floating-point type of 16 bits or more", array.dtype)
    (*batch, _, q_heads, head_dim), (kv_tokens, kv_heads) = q.shape, k.shape[-3:-1]
    require_shape("k", k.shape, (*batch, kv_tokens, kv_heads, head_dim), "q's batch and head_dim")
    require_shape("v", v.shape, k.shape, "as k")
    return AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, **numbers)


def rows_of_arrays(
    q: Array, k: Array, segment_ids: Any, cu_seqlens: Any, mask: Any, spec: AttentionSpec
) -> Rows:
    """Documents and mask, checked."""
    _check_documents(q, k, segment_ids, cu_seqlens)
    if segment_ids is not None:
        segment_ids = jnp.atleast_2d(segment_ids)
    return Rows(segment_ids, cu_seqlens, _mask_of(mask, q, k, cu_seqlens, spec))


def _check_documents(q: Array, k: Array, segment_ids: Any, cu_seqlens: Any) -> None:
    """Ids and bounds of documents must be of these tokens, and of keys as many as of queries."""
    both = segment_ids is not None and cu_seqlens is not None
    require(not both, "segment_ids", "be None with cu_seqlens", "both")
    for name, array in (("segment_ids", segment_ids), ("cu_seqlens", cu_seqlens)):
        if array is None:
            continue
        is_ints = hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.integer)
        require(is_ints, name, "be an array of ints", getattr(array, "dtype", type(array).__name__))
        require_shape(f"k with {name}", k.shape[:-2], q.shape[:-2], "as many keys as queries")
    if segment_ids is not None:
        require_shape("segment_ids", segment_ids.shape, q.shape[:-2], "an id of each token")
    if cu_seqlens is not None:
        require(q.ndim == 3, "q", "have shape [tokens, q_heads, head_dim] with cu_seqlens", q.shape)
        is_list = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] > 1
        require(
            is_list, "cu_seqlens", "have shape [documents + 1], of one document or more", cu_seqlens.shape
        )
        _check_bounds(cu_seqlens, q.shape[0])


def _check_bounds(cu_seqlens: Array, tokens: int) -> None:
    """Where the numbers can be seen."""
    if not support.is_concrete(cu_seqlens):
        return
    bounds = np.asarray(cu_seqlens)
    is_right = bounds[0] == 0 and (np.diff(bounds) >= 0).all() and bounds[-1] <= tokens
    require(bool(is_right), "cu_seqlens", f"ascend from 0 to at most the {tokens} tokens", bounds)


def _mask_of(mask: Any, q: Array, k: Array, cu_seqlens: Array | None, spec: AttentionSpec) -> Mask | None:
    """The mask, made of an array where it is one; it must reach over the texts."""
    if mask is None:
        return None
    q_tokens, kv_tokens = q.shape[-3], k.shape[-3]
    batch = q.shape[0] if q.ndim == 4 else 1
    if hasattr(mask, "dtype"):
        require(cu_seqlens is None, "mask", "be a mask of jattn.masks with cu_seqlens", f"shape {mask.shape}")
        return mask_of_array(mask, (batch, spec.num_q_heads, q_tokens, kv_tokens))
    num_rows, is_square = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, q_tokens == kv_tokens
    reach = q_tokens if is_square and cu_seqlens is None else None
    sizes = Sizes(spec.num_q_heads, num_rows=num_rows, max_query_len=reach, max_seq_len=reach)
    check_mask(mask, sizes, causal=spec.causal)
    return mask


def mask_of_array(array: Any, shape: tuple[int, int, int, int]) -> Mask | None:
    """Each pair a block of its own, or None without pairs; axes of batch and heads may be 1, or missing."""
    require(array.dtype == jnp.bool_, "mask", "be of bool", array.dtype)
    given = (1,) * (4 - array.ndim) + tuple(array.shape)
    fits = array.ndim in (2, 3, 4) and all(a in (1, b) for a, b in zip(given, shape, strict=False))
    require(fits, "mask", f"broadcast to {shape} (batch, q_heads, q_tokens, kv_tokens)", array.shape)
    if 0 in shape:
        return None
    blocks = jnp.broadcast_to(jnp.asarray(array).reshape(given), (*given[:2], *shape[2:]))
    return BlockMask(blocks=blocks, block_q=1, block_kv=1)


def asked_for_segments(segment_ids: Array | None, implementation: Asked) -> Asked:
    """What may serve these ids: without the kernels where an id comes again behind another."""
    asked = asked_for(implementation)
    is_for_all = segment_ids is None or "mosaic_gpu" not in asked or support.why_not_on(segment_ids)
    if is_for_all or _come_in_runs(segment_ids):
        return implementation if isinstance(implementation, str | None) else asked
    rest = tuple(name for name in asked if name != "mosaic_gpu")
    if not rest:
        reason = "mosaic_gpu: an id comes again behind another one"
        raise unsupported("segment_ids", reason, "Leave implementation=None or ask for 'xla'")
    return rest


def _come_in_runs(segment_ids: Any) -> bool:
    """Whether equal ids stand together in each text, as far as can be seen."""
    if not support.is_concrete(segment_ids):
        return True
    ids = np.atleast_2d(np.asarray(segment_ids))
    num_runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(axis=1)
    return all(len(np.unique(row)) == runs for row, runs in zip(ids, num_runs, strict=True) if len(row))
