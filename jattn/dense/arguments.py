"""Validation and conversion of the arguments of `attention`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.cache.spec import require_query_dtype
from jattn.implementations.selection import ImplementationArg, as_static_arg, requested_implementations
from jattn.masks import BatchSizes, BlockMask, Document, Mask, check_mask
from jattn.masks.base import leaves, num_rows_by_field
from jattn.masks.documents import as_int32, has_contiguous_ids
from jattn.spec import OTHER_NAMES, AttentionSpec
from pallas_kernels import architectures, support
from pallas_kernels.checks import require, require_shape, unsupported

DROPOUT_ARGUMENTS = ("dropout_rng", "dropout_rate", "dropout_p", "broadcast_dropout")
NO_DROPOUT = "dropout on attention weights is not supported"
FLAX_ARGUMENT = "Use jattn.attention_fn, the function for Flax's attention_fn argument"
# Hints for argument names of jax.nn.dot_product_attention, of Flax's attention_fn and of other libraries.
ARGUMENT_HINTS = {
    **{name: f"Use {replacement}" for name, replacement in OTHER_NAMES.items()},
    **{"query": "Use q", "key": "Use k", "value": "Use v", "return_residual": "Use return_lse="},
    "bias": "Use jattn.attention_fn(q, k, v, bias)",
    "query_seq_lengths": "Use mask=jattn.masks.Prefix(length=)",
    "key_value_seq_lengths": "Use mask=jattn.masks.Prefix(length=) or a bool array",
    **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), "Use segment_ids="),
    **dict.fromkeys(DROPOUT_ARGUMENTS, NO_DROPOUT.capitalize()),
    **dict.fromkeys(("module", "dtype"), FLAX_ARGUMENT),
}


class MaskInputs(NamedTuple):
    """The arguments that decide which keys are visible: segment ids, document boundaries, and a mask."""

    segment_ids: Int[Array, "batch tokens"] | None
    cu_seqlens: Int[Array, " bounds"] | None
    mask: Mask | None


def infer_spec(q: Any, k: Any, v: Any, **numbers: Any) -> AttentionSpec:
    """Check that the arrays match, and return their attention spec."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        is_array = hasattr(array, "dtype") and hasattr(array, "ndim")
        require(is_array, name, "be an array", f"a {type(array).__name__}")
        require(
            array.ndim in (3, 4),
            name,
            "have shape [batch, tokens, heads, head_dim] or [tokens, heads, head_dim]",
            array.shape,
        )
        require_query_dtype(name, array.dtype)
    (*batch, _, q_heads, head_dim), (kv_tokens, kv_heads) = q.shape, k.shape[-3:-1]
    require_shape("k", k.shape, (*batch, kv_tokens, kv_heads, head_dim), "q's batch and head_dim")
    require_shape("v", v.shape, k.shape, "the shape of k")
    return AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, **numbers)


def check_mask_inputs(
    q: Array, k: Array, segment_ids: Any, cu_seqlens: Any, mask: Any, spec: AttentionSpec
) -> MaskInputs:
    """Check segment ids, document boundaries and mask."""
    _check_documents(q, k, segment_ids, cu_seqlens)
    if segment_ids is not None:
        segment_ids = jnp.atleast_2d(as_int32(segment_ids))
    return MaskInputs(segment_ids, cu_seqlens, _check_mask(mask, q, k, cu_seqlens, spec))


def _check_documents(q: Array, k: Array, segment_ids: Any, cu_seqlens: Any) -> None:
    """Check that segment ids or document boundaries match the tokens, with as many keys as queries."""
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("segment_ids and cu_seqlens cannot be combined. Pass one of them.")
    for name, array in (("segment_ids", segment_ids), ("cu_seqlens", cu_seqlens)):
        if array is None:
            continue
        is_ints = hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.integer)
        require(is_ints, name, "be an integer array", getattr(array, "dtype", f"a {type(array).__name__}"))
        if k.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{name} requires as many keys as queries, got {q.shape[-3]} queries and {k.shape[-3]} keys."
            )
    if segment_ids is not None:
        require_shape("segment_ids", segment_ids.shape, q.shape[:-2], "one id per token")
    if cu_seqlens is not None:
        require(q.ndim == 3, "q", "have shape [tokens, q_heads, head_dim] with cu_seqlens", q.shape)
        is_list = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] > 1
        require(
            is_list, "cu_seqlens", "have shape [documents + 1] with at least one document", cu_seqlens.shape
        )
        _check_bounds(cu_seqlens, q.shape[0])


def _check_bounds(cu_seqlens: Array, tokens: int) -> None:
    """Check the values of the document boundaries, if they are not traced."""
    if not architectures.is_concrete(cu_seqlens):
        return
    bounds = np.asarray(cu_seqlens).astype(np.int64)  # Differences of unsigned ints are never negative.
    is_valid = bounds[0] == 0 and (np.diff(bounds) >= 0).all() and bounds[-1] <= tokens
    rule = f"begin with 0, be non-decreasing, and end with at most the number of tokens ({tokens})"
    require(bool(is_valid), "cu_seqlens", rule, bounds)


def _check_mask(mask: Any, q: Array, k: Array, cu_seqlens: Array | None, spec: AttentionSpec) -> Mask | None:
    """Check the mask, converting a bool array to a BlockMask; it must cover all sequences."""
    if mask is None:
        return None
    q_tokens, kv_tokens = q.shape[-3], k.shape[-3]
    batch = q.shape[0] if q.ndim == 4 else 1
    if hasattr(mask, "dtype"):
        if cu_seqlens is not None:
            raise ValueError(
                f"mask is an array with shape {mask.shape}, which cannot be combined with cu_seqlens. Pass a "
                "mask of jattn.masks with one row per document."
            )
        return mask_from_array(mask, (batch, spec.num_q_heads, q_tokens, kv_tokens))
    num_rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_mask(mask, _batch_sizes(q_tokens, kv_tokens, num_rows, cu_seqlens, spec), causal=spec.causal)
    if cu_seqlens is not None:
        # A mask selected from the packed sequence would be applied at each document's own positions.
        for name, mask_rows in num_rows_by_field(mask):
            if mask_rows != num_rows:
                raise ValueError(
                    f"{name} has {mask_rows} rows, but cu_seqlens has {num_rows} documents. Select the mask "
                    "for each document separately, or pass an array without rows, which applies to all."
                )
    return mask


def _batch_sizes(
    q_tokens: int, kv_tokens: int, num_rows: int, cu_seqlens: Array | None, spec: AttentionSpec
) -> BatchSizes:
    """Return the sizes that a mask must cover: all queries and all possibly visible keys."""
    if cu_seqlens is None:
        lookahead = max_lookahead(spec)
        return BatchSizes(
            spec.num_q_heads,
            num_rows,
            max_query_len=q_tokens,
            max_seq_len=kv_tokens if lookahead is None else min(kv_tokens, q_tokens + lookahead),
            max_query_end=q_tokens,
            query_ends=lambda: np.full(num_rows, q_tokens),
        )
    if not architectures.is_concrete(cu_seqlens):
        return BatchSizes(spec.num_q_heads, num_rows)
    lens = np.diff(np.asarray(cu_seqlens))
    max_len = int(lens.max())
    return BatchSizes(spec.num_q_heads, num_rows, max_len, max_seq_len=max_len, query_ends=lambda: lens)


def max_lookahead(spec: AttentionSpec) -> int | None:
    """Return the maximum distance from a query to a later key that it attends to; None = unlimited."""
    return 0 if spec.causal else None if spec.window is None else spec.window[1]


def mask_from_array(array: Any, shape: tuple[int, int, int, int]) -> Mask | None:
    """Convert a bool array to a BlockMask with one block per query-key pair; None if an axis of `shape` is 0.

    Axes of the array may be 1 or missing. Query and key axes of size 1 are not expanded: a padding mask would
    otherwise grow from keys to queries x keys.
    """
    require(array.dtype == jnp.bool_, "mask", "have dtype bool", array.dtype)
    rule = f"broadcast to {shape} (batch, q_heads, q_tokens, kv_tokens)"
    require(array.ndim >= 2 and can_broadcast(array.shape, shape), "mask", rule, array.shape)
    if 0 in shape:
        return None
    padded_shape = (1,) * (4 - array.ndim) + array.shape
    blocks = jnp.asarray(array).reshape(padded_shape)
    if padded_shape[2] == 1:
        blocks = jnp.broadcast_to(blocks, (*padded_shape[:3], shape[3]))
        return BlockMask(blocks=blocks, block_q=None, block_kv=1)
    return BlockMask(blocks=blocks, block_q=1, block_kv=1 if padded_shape[3] > 1 else shape[3])


def can_broadcast(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether an array of this shape broadcasts to the shape `to`."""
    missing = len(to) - len(shape)
    return missing >= 0 and all(a in (1, b) for a, b in zip(shape, to[missing:], strict=True))


def implementations_for_documents(
    segment_ids: Array | None, mask: Mask | None, implementation: ImplementationArg
) -> ImplementationArg:
    """Return the implementations that support the document ids.

    The kernels do not support an id that occurs again after a different id.
    """
    requested = requested_implementations(implementation)
    ids_by_name: list[tuple[str, Any]] = [] if segment_ids is None else [("segment_ids", segment_ids)]
    if mask is not None:
        ids_by_name += [("mask", leaf.ids) for leaf in leaves(mask) if isinstance(leaf, Document)]
    if "mosaic_gpu" not in requested:
        return as_static_arg(implementation)
    for name, ids in ids_by_name:
        if support.why_not_kernel_on("varlen_prefill", ids) or has_contiguous_ids(ids):
            continue
        remaining = tuple(x for x in requested if x != "mosaic_gpu")
        if not remaining:
            reason = (
                "an id occurs again after a different id, but the Mosaic GPU kernels require the tokens of a "
                "document to be contiguous"
            )
            raise unsupported(name, reason, "Sort the tokens by id, or pass implementation=None or 'xla'")
        return remaining
    return as_static_arg(implementation)
