"""Whether a mask and a step belong together: their sizes are compared, and lengths where they can be seen."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.batch.metadata import BatchMetadata
from jattn.masks.base import And, Mask, Not, Or, check_is_mask
from jattn.masks.pairs import BatchSizes
from pallas_kernels import support
from pallas_kernels.checks import require, require_int


def check_batch_mask(
    mask: Mask, metadata: BatchMetadata, *, num_q_heads: int, causal: bool, has_cache: bool
) -> None:
    """What a mask must be to hold in a layer of a step, on top of what the spec says: as check_mask.

    How far a mask must reach the requests' lengths say, where they are not traced; where they are, the
    shortest one that fills the block table: a longer one than the mask reaches over then sees nothing there.

    Args:
        mask: The mask.
        metadata: The step's.
        num_q_heads: The layer's.
        causal: Whether the layer is.
        has_cache: Whether keys are in a paged cache, so that the block table bounds the requests' lengths.

    Raises:
        ValueError: As check_mask.
    """
    bucket = metadata.bucket
    num_blocks = metadata.block_table.shape[1]
    max_seq_len = (num_blocks - 1) * metadata.block_size + 1 if has_cache and num_blocks else None
    query_ends = None
    if support.is_concrete(metadata):
        seq_lens = np.asarray(metadata.seq_lens)
        max_seq_len = int(np.max(seq_lens, initial=0))
        query_ends = lambda: np.where(np.asarray(metadata.query_lens) > 0, seq_lens, 0)
    of_decodes = bucket.decode_query_len if bucket.max_decodes else 0
    num_queries = max(of_decodes, bucket.max_prefill_tokens)
    max_query_len: int | None = num_queries if max_seq_len is None else min(num_queries, max_seq_len)
    if max_seq_len is None and bucket.max_prefills > 1:
        max_query_len = None  # the region's tokens are those of all rows: one may have any number of them
    sizes = BatchSizes(
        num_q_heads=num_q_heads,
        num_rows=bucket.max_reqs,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        query_ends=query_ends,
    )
    check_mask(mask, sizes, causal=causal)


def check_mask(mask: Mask, sizes: BatchSizes, *, causal: bool) -> None:
    """What a mask must be to hold in a step: `attend(mask=)`'s, `plan(mask=)`'s, or a spec's.

    Args:
        mask: The mask.
        sizes: The step's.
        causal: Whether the layer is causal, so that this mask comes on top of causality.

    Raises:
        ValueError: It is no mask; its rows are not the step's; it has other heads; it is smaller than the
            step's lengths; or it lets queries see later keys, and causality does not.
    """
    check_causal_mask("mask", mask, causal=causal)
    mask.check(sizes)


def check_causal_mask(name: str, mask: Mask, *, causal: bool) -> None:
    """Raises ValueError where `mask` is none, or causal attention would take from it what it is there for.

    `Causal() | Prefix(length=n)` on top of causality would be causality alone.
    """
    check_is_mask(name, mask)
    rule = "let no query of a causal layer see later keys (AttentionSpec(causal=False) leaves that to it)"
    require(not (causal and mask.allows_future_keys), name, rule, _written(mask))


def _written(mask: Mask) -> str:
    """A mask as it was composed, by the names of its parts."""
    if isinstance(mask, And | Or):
        sign = " & " if isinstance(mask, And) else " | "
        return "(" + sign.join(map(_written, mask.masks)) + ")"
    return f"~{_written(mask.masks[0])}" if isinstance(mask, Not) else type(mask).__name__


MAX_INT = 2**31 - 1  # positions are int32
KINDS = {"bool": jnp.bool_, "integer": jnp.integer}


def require_ints(at_least: int, **values: Any) -> None:
    """Every named value must be an int, not a bool, at least so large, and fit 32 bits."""
    for name, value in values.items():
        require_int(**{name: value})
        require(value >= at_least, name, "be positive" if at_least == 1 else f"be at least {at_least}", value)
        require(value <= MAX_INT, name, f"be at most {MAX_INT}", value)


def normalize_ints(mask: Any, at_least: int, *names: str) -> None:
    """Checks fields of a mask by require_ints, and makes numpy's ints Python's: those wrap in few bits."""
    require_ints(at_least, **{name: getattr(mask, name) for name in names})
    for name in names:
        object.__setattr__(mask, name, int(getattr(mask, name)))


def require_heads(num_q_heads: int, num_kv_heads: int | None) -> None:
    """Numbers of heads must be positive, and kv heads, where they are known, divide query heads."""
    require_ints(1, num_q_heads=num_q_heads)
    if num_kv_heads is not None:
        require_ints(1, num_kv_heads=num_kv_heads)
        divides = num_q_heads % num_kv_heads == 0
        require(divides, "num_kv_heads", f"divide num_q_heads ({num_q_heads})", num_kv_heads)


def require_array(name: str, value: Any, kind: str, axes: dict[int, str]) -> None:
    """`value` must be an array of this kind, "bool" or "integer", with axes as one of those named.

    Args:
        name: Of the argument.
        value: What was given.
        kind: What its elements must be.
        axes: Number of axes -> what they are.
    """
    require(_is_array(value), name, f"be an array of {kind} elements", f"a {type(value).__name__}")
    is_kind = jnp.issubdtype(value.dtype, KINDS[kind])
    require(is_kind, name, f"be an array of {kind} elements", value.dtype)
    require(value.ndim in axes, name, f"have axes {' or '.join(axes.values())}", value.shape)


def require_floats(**values: Any) -> None:
    """Every named value must be an array of floats: of ints means are cut off, and outputs are."""
    for name, value in values.items():
        require(_is_array(value), name, "be an array", type(value).__name__)
        require(jnp.issubdtype(value.dtype, jnp.floating), name, "hold floats", value.dtype)


def _is_array(value: Any) -> bool:
    return all(hasattr(value, part) for part in ("shape", "dtype", "ndim"))
