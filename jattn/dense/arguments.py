"""Whether arrays belong together as `attention` takes them, and what is made of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.implementations.selection import ImplementationArg, as_static_arg, requested_implementations
from jattn.masks import BatchSizes, BlockMask, Document, Mask, check_mask
from jattn.masks.base import leaves, num_rows_by_field
from jattn.masks.documents import as_int32, has_contiguous_ids
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_shape, unsupported

OF_FLAX = "an argument of jattn.attention_fn, which is what Flax takes as attention_fn"
NAMES_OF_JAX = {  # of arguments of jax.nn.dot_product_attention, and of what Flax hands an attention_fn
    **{"query": "q", "key": "k", "value": "v", "is_causal": "causal=", "local_window_size": "window="},
    **{"return_residual": "return_lse=", "bias": "jattn.attention_fn(q, k, v, bias)"},
    "query_seq_lengths": "mask=jattn.masks.Prefix(length=)",
    "key_value_seq_lengths": "mask=jattn.masks.Prefix(length=), or an array of bool",
    **dict.fromkeys(("dropout_rng", "dropout_rate", "broadcast_dropout", "module", "dtype"), OF_FLAX),
}


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
        segment_ids = jnp.atleast_2d(as_int32(segment_ids))
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
    bounds = np.asarray(cu_seqlens).astype(np.int64)  # unsigned ones would never descend
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
    num_rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_mask(mask, _sizes_of(q_tokens, kv_tokens, num_rows, cu_seqlens, spec), causal=spec.causal)
    if cu_seqlens is not None:
        # What was chosen of all tokens as one text each document would read at its own positions.
        way_out = "what chooses is to choose for each; arrays without an axis of rows hold for all"
        for name, got in num_rows_by_field(mask):
            require(got == num_rows, name, f"have a row for each of {num_rows} documents ({way_out})", got)
    return mask


def _sizes_of(
    q_tokens: int, kv_tokens: int, num_rows: int, cu_seqlens: Array | None, spec: AttentionSpec
) -> BatchSizes:
    """How far a mask must reach: over all queries, and the keys that anyone may see; None where traced."""
    if cu_seqlens is None:
        ahead = last_ahead(spec)
        seen = kv_tokens if ahead is None else min(kv_tokens, q_tokens + ahead)
        ends = lambda: np.full(num_rows, q_tokens)
        return BatchSizes(spec.num_q_heads, num_rows, q_tokens, seen, max_query_end=q_tokens, query_ends=ends)
    if not support.is_concrete(cu_seqlens):
        return BatchSizes(spec.num_q_heads, num_rows)
    lens = np.diff(np.asarray(cu_seqlens))
    longest = int(lens.max())
    return BatchSizes(spec.num_q_heads, num_rows, longest, max_seq_len=longest, query_ends=lambda: lens)


def knows_names_of_jax[F: Callable[..., Any]](attention: F) -> F:
    """A function that says of arguments under their names of jax.nn or Flax what is there in their place.

    Args:
        attention: What it calls, whose signature it has.
    """

    @functools.wraps(attention)
    def told(*args: Any, **options: Any) -> Any:
        for name in options:
            if name in NAMES_OF_JAX:
                unknown = f"attention() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{unknown}: here it is {NAMES_OF_JAX[name]}.")
        return attention(*args, **options)

    return cast(F, told)


def last_ahead(spec: AttentionSpec) -> int | None:
    """How far ahead of a query's own place the spec lets it see a key; None = any distance."""
    return 0 if spec.causal else None if spec.window is None else spec.window[1]


def mask_of_array(array: Any, shape: tuple[int, int, int, int]) -> Mask | None:
    """Each pair a block of its own, or None without pairs; axes may be 1, or missing.

    What says the same of all queries, or of all keys, is not written down for each of them: of padding that
    would be queries x keys, where the array itself is keys alone.
    """
    require(array.dtype == jnp.bool_, "mask", "be of bool", array.dtype)
    given = (1,) * (4 - array.ndim) + tuple(array.shape)
    fits = array.ndim in (2, 3, 4) and all(a in (1, b) for a, b in zip(given, shape, strict=False))
    require(fits, "mask", f"broadcast to {shape} (batch, q_heads, q_tokens, kv_tokens)", array.shape)
    if 0 in shape:
        return None
    blocks = jnp.asarray(array).reshape(given)
    if given[2] == 1:
        blocks = jnp.broadcast_to(blocks, (*given[:3], shape[3]))
        return BlockMask(blocks=blocks, block_q=None, block_kv=1)
    return BlockMask(blocks=blocks, block_q=1, block_kv=1 if given[3] > 1 else shape[3])


def asked_for_documents(
    segment_ids: Array | None, mask: Mask | None, implementation: ImplementationArg
) -> ImplementationArg:
    """What may serve these ids, and a mask's: without the kernels where an id comes again behind another."""
    asked = requested_implementations(implementation)
    given: list[tuple[str, Any]] = [] if segment_ids is None else [("segment_ids", segment_ids)]
    if mask is not None:
        given += [("mask", leaf.ids) for leaf in leaves(mask) if isinstance(leaf, Document)]
    if "mosaic_gpu" not in asked:
        return as_static_arg(implementation)
    for name, ids in given:
        if support.why_not_on(ids) or has_contiguous_ids(ids):
            continue
        rest = tuple(other for other in asked if other != "mosaic_gpu")
        if not rest:
            reason = "mosaic_gpu: an id comes again behind another one"
            raise unsupported(name, reason, "Leave implementation=None or ask for 'xla'")
        return rest
    return as_static_arg(implementation)
