"""Validation of masks: their constructor arguments, and whether a mask fits a batch."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.batch.metadata import BatchMetadata
from jattn.masks.base import And, Mask, Not, Or, check_is_mask
from jattn.masks.pairs import BatchSizes
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_int

MAX_INT = 2**31 - 1  # Positions are int32.
DTYPE_CLASSES = {"bool": jnp.bool_, "integer": jnp.integer}


def check_batch_mask(
    mask: Mask, metadata: BatchMetadata, *, num_q_heads: int, causal: bool, has_cache: bool
) -> None:
    """Check that a mask fits a layer and a batch.

    A mask must cover the longest request. If the lengths are traced, it must cover the shortest request that
    fills the block table; a request longer than the mask then attends to nothing beyond it.

    Args:
        mask: The mask to check.
        metadata: Metadata of the batch.
        num_q_heads: Number of query heads of the layer.
        causal: Whether the layer is causal.
        has_cache: Whether keys are in a paged cache, so that the block table bounds the requests' lengths.

    Raises:
        ValueError: If the mask does not fit; see `check_mask`.
    """
    bucket = metadata.bucket
    num_blocks = metadata.block_table.shape[1]
    max_seq_len = (num_blocks - 1) * metadata.block_size + 1 if has_cache and num_blocks else None
    query_ends: Callable[[], np.ndarray] | None = None
    if architectures.is_concrete(metadata):
        seq_lens = np.asarray(metadata.seq_lens)
        max_seq_len = int(np.max(seq_lens, initial=0))

        def ends_of_rows() -> np.ndarray:
            return np.where(np.asarray(metadata.query_lens) > 0, seq_lens, 0)

        query_ends = ends_of_rows

    decode_query_len = bucket.decode_query_len if bucket.max_decodes else 0
    num_queries = max(decode_query_len, bucket.max_prefill_tokens)
    max_query_len: int | None = num_queries if max_seq_len is None else min(num_queries, max_seq_len)
    if max_seq_len is None and bucket.max_prefills > 1:
        max_query_len = None  # The rows share the region's tokens: one of them may have any number.
    sizes = BatchSizes(
        num_q_heads=num_q_heads,
        num_rows=bucket.max_reqs,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        query_ends=query_ends,
    )
    check_mask(mask, sizes, causal=causal)


def check_mask(mask: Mask, sizes: BatchSizes, *, causal: bool) -> None:
    """Check a mask from `attend(mask=)`, `plan(mask=)` or a spec.

    Args:
        mask: The mask to check.
        sizes: Sizes of the batch.
        causal: Whether the layer is causal, so that the mask is combined with causality.

    Raises:
        ValueError: If it is not a mask; if its rows or heads differ from the batch's; if it is smaller
            than the batch's lengths; or if it lets queries attend to later keys in a causal layer.
    """
    check_causal_mask("mask", mask, causal=causal)
    mask.check(sizes)


def check_causal_mask(name: str, mask: Mask, *, causal: bool) -> None:
    """Raise ValueError if `mask` is not a mask, or lets queries attend to later keys in a causal layer.

    `Causal() | Prefix(length=n)` in a causal layer, for example, would be plain causality.
    """
    check_is_mask(name, mask)
    if causal and mask.allows_future_keys:
        raise ValueError(
            f"{name} lets queries attend to later keys, but the layer is causal: {_format(mask)}. "
            "Pass causal=False, and combine the mask with Causal() where needed."
        )


def _format(mask: Mask) -> str:
    """Return a mask's expression, with class names in the place of its parts."""
    if isinstance(mask, And | Or):
        sign = " & " if isinstance(mask, And) else " | "
        return "(" + sign.join(map(_format, mask.masks)) + ")"
    return f"~{_format(mask.masks[0])}" if isinstance(mask, Not) else type(mask).__name__


def require_ints(minimum: int, **values: Any) -> None:
    """Raise ValueError unless every value is an int (not a bool) from `minimum` to the int32 maximum."""
    for name, value in values.items():
        require_int(**{name: value})
        require(value >= minimum, name, "be positive" if minimum == 1 else f"be at least {minimum}", value)
        require(value <= MAX_INT, name, f"be at most {MAX_INT}", value)


def normalize_ints(mask: Any, minimum: int, *names: str) -> None:
    """Check fields of a mask with require_ints, and convert numpy ints, which overflow, to Python ints."""
    require_ints(minimum, **{name: getattr(mask, name) for name in names})
    for name in names:
        object.__setattr__(mask, name, int(getattr(mask, name)))


def require_heads(num_q_heads: int, num_kv_heads: int | None) -> None:
    """Raise ValueError unless the numbers of heads are positive and the kv heads divide the query heads."""
    require_ints(1, num_q_heads=num_q_heads)
    if num_kv_heads is not None:
        require_ints(1, num_kv_heads=num_kv_heads)
        is_divisor = num_q_heads % num_kv_heads == 0
        require(is_divisor, "num_kv_heads", f"divide num_q_heads ({num_q_heads})", num_kv_heads)


def require_array(name: str, value: Any, dtype_class: str, axes: dict[int, str]) -> None:
    """Raise ValueError unless `value` is an array with an allowed dtype and number of axes.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        dtype_class: "bool" or "integer".
        axes: Description of the axes for each allowed number of axes.
    """
    require(_is_array(value), name, f"be an array with {dtype_class} elements", f"a {type(value).__name__}")
    has_dtype = jnp.issubdtype(value.dtype, DTYPE_CLASSES[dtype_class])
    require(has_dtype, name, f"be an array with {dtype_class} elements", value.dtype)
    require(value.ndim in axes, name, f"have shape {' or '.join(axes.values())}", value.shape)


def require_floats(**values: Any) -> None:
    """Raise ValueError unless every value is an array of floating-point numbers."""
    for name, value in values.items():
        require(_is_array(value), name, "be an array", f"a {type(value).__name__}")
        require(jnp.issubdtype(value.dtype, jnp.floating), name, "have a floating-point dtype", value.dtype)


def _is_array(value: Any) -> bool:
    return all(hasattr(value, attribute) for attribute in ("shape", "dtype", "ndim"))
