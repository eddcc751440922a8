"""Materialized masks, and the density of a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jattn.masks.base import Mask, check_is_mask, num_rows_by_field
from jattn.masks.checks import require_heads
from jattn.masks.pairs import BatchSizes, Pairs
from pallas_kernels.checks import require

GOLDEN_RATIO = 0.6180339887


def dense(
    mask: Mask,
    query_len: int,
    seq_len: int,
    *,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    row: int = 0,
    is_prefill: bool = True,
) -> Bool[Array, "q_heads queries keys"]:
    """Return the materialized mask of a request whose queries are its last `query_len` of `seq_len` tokens.

    Intended for tests and inspection.

    Args:
        mask: Mask to materialize. Positions outside its arrays are usually not visible.
        query_len: Number of queries.
        seq_len: Number of keys.
        num_q_heads: Number of query heads; None = the number that the mask distinguishes.
        num_kv_heads: Number of kv heads; None if the mask does not depend on them.
        row: Batch row of the request.
        is_prefill: Whether the queries are in the prefill region.

    Raises:
        ValueError: If there are more queries than keys; if the mask has no such row or other heads; or if it
            depends on the number of heads and none is given.
    """
    heads = _check(mask, num_q_heads, num_kv_heads, row)
    is_valid = 0 <= query_len <= seq_len
    require(is_valid, "query_len", f"be at least 0 and at most seq_len ({seq_len})", query_len)
    queries = jnp.arange(seq_len - query_len, seq_len, dtype=jnp.int32)
    return _visible_keys(mask, queries, seq_len, heads, row=row, is_prefill=is_prefill)


def density(
    mask: Mask,
    query_len: int,
    seq_len: int,
    *,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    row: int = 0,
    is_prefill: bool = True,
    max_queries: int = 1024,
) -> float:
    """Return the fraction of the causal pairs of a request that is visible, over all heads.

    Args:
        mask: Mask to measure.
        query_len: Number of queries, the last tokens of the request.
        seq_len: Number of keys.
        num_q_heads: Number of query heads; None = the number that the mask distinguishes.
        num_kv_heads: Number of kv heads; None if the mask does not depend on them.
        row: Batch row of the request.
        is_prefill: Whether the queries are in the prefill region.
        max_queries: Maximum number of queries to evaluate; more queries are sampled evenly.

    Raises:
        ValueError: If there are no queries or more queries than keys; if `max_queries` is less than 1; or if
            the mask has no such row or other heads.
    """
    heads = _check(mask, num_q_heads, num_kv_heads, row)
    is_valid = 1 <= query_len <= seq_len
    require(is_valid, "query_len", f"be at least 1 and at most seq_len ({seq_len})", query_len)
    require(max_queries >= 1, "max_queries", "be at least 1", max_queries)
    indices = np.arange(min(query_len, max_queries))
    if query_len > max_queries:
        # Samples are jittered within their interval, or they would always hit the same row of each block.
        indices = ((indices + indices * GOLDEN_RATIO % 1) * (query_len / max_queries)).astype(int)
    queries = jnp.asarray(seq_len - query_len + indices, jnp.int32)
    num_visible = _num_visible(
        mask, queries, jnp.int32(row), seq_len=seq_len, num_heads=heads, is_prefill=is_prefill
    )
    num_causal = np.asarray(queries + 1, np.float64).sum()
    return float(np.asarray(num_visible, np.float64).sum() / num_causal / heads[0])


def resolve_num_heads(mask: Mask, num_q_heads: int | None, num_kv_heads: int | None) -> tuple[int, int]:
    """Return the numbers of query and kv heads: the given ones, or those that the mask distinguishes.

    Raises:
        ValueError: If the mask depends on a number of heads that is not given; if a number is not positive;
            or if the kv heads do not divide the query heads.
    """
    check_is_mask("mask", mask)
    mask_q_heads, mask_kv_heads = mask.num_heads
    q_heads = mask_q_heads if num_q_heads is None else num_q_heads
    if q_heads is None:
        raise ValueError("The mask depends on the number of query heads. Pass num_q_heads.")
    if num_kv_heads is None and mask_kv_heads is None:
        raise ValueError("The mask depends on the number of kv heads. Pass num_kv_heads.")
    require_heads(q_heads, num_kv_heads)
    return q_heads, num_kv_heads or q_heads


def _check(mask: Mask, num_q_heads: int | None, num_kv_heads: int | None, row: int) -> tuple[int, int]:
    """Return the resolved numbers of heads; raise ValueError if the mask has other heads or no such row."""
    heads = resolve_num_heads(mask, num_q_heads, num_kv_heads)
    mask.check(BatchSizes(num_q_heads=heads[0]))
    for name, num_rows in num_rows_by_field(mask):
        require(num_rows == 1 or 0 <= row < num_rows, "row", f"be one of the {num_rows} rows of {name}", row)
    return heads


@functools.partial(jax.jit, static_argnames=("seq_len", "num_heads", "is_prefill"))
def _num_visible(
    mask: Mask,
    queries: Int32[Array, " queries"],
    row: Int32[Array, ""],
    *,
    seq_len: int,
    num_heads: tuple[int, int],
    is_prefill: bool,
) -> Int32[Array, " queries"]:
    """Return the number of visible causal keys of each query, summed over the heads."""

    def count_keys(query: Array) -> Array:
        visible = _visible_keys(mask, query[None], seq_len, num_heads, row=row, is_prefill=is_prefill)
        return (visible & (jnp.arange(seq_len, dtype=jnp.int32)[None, None] <= query)).sum(dtype=jnp.int32)

    return jax.lax.map(count_keys, queries)


def _visible_keys(
    mask: Mask,
    queries: Int32[Array, " queries"],
    seq_len: int,
    num_heads: tuple[int, int],
    *,
    row: int | Int32[Array, ""],
    is_prefill: bool,
) -> Bool[Array, "q_heads queries keys"]:
    """Return which keys of a request are visible to the queries at these positions."""
    pairs = Pairs(
        head=jnp.arange(num_heads[0], dtype=jnp.int32)[:, None, None],
        row=jnp.full((1, 1, 1), row, jnp.int32),
        query=queries[None, :, None],
        key=jnp.arange(seq_len, dtype=jnp.int32)[None, None, :],
        num_heads=num_heads,
        is_prefill=is_prefill,
    )
    return jnp.broadcast_to(mask.visible(pairs), (num_heads[0], queries.shape[0], seq_len))
