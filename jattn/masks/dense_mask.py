"""A mask drawn out: which pairs it lets see each other, and how many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jattn.masks.base import Mask, check_is_mask, row_counts
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
    """The whole mask of a request whose last `query_len` of `seq_len` tokens are queries. For tests.

    Args:
        mask: The mask; what lies outside its arrays is drawn as they say, most often as not seen.
        query_len: Queries of the request, its last tokens.
        seq_len: Its keys.
        num_q_heads: Query heads; None = as many as the mask tells apart.
        num_kv_heads: Kv heads; None where the mask does not look at them.
        row: The request's row of the batch.
        is_prefill: Whether its queries stand in the prefill region.

    Raises:
        ValueError: There are more queries than keys, the mask has no such row or other heads, or it tells
            heads apart and does not say how many there are.
    """
    heads = _check(mask, num_q_heads, num_kv_heads, row)
    is_part = 0 <= query_len <= seq_len
    require(is_part, "query_len", f"be at least 0 and at most seq_len ({seq_len})", query_len)
    queries = jnp.arange(seq_len - query_len, seq_len, dtype=jnp.int32)
    return _seen(mask, queries, seq_len, heads, row=row, is_prefill=is_prefill)


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
    """The share that the mask has of the pairs that causality allows, of a request as dense's.

    Args:
        mask: As dense's.
        query_len: As dense's.
        seq_len: As dense's.
        num_q_heads: As dense's; all heads count.
        num_kv_heads: As dense's.
        row: As dense's.
        is_prefill: As dense's.
        max_queries: Of more queries so many are looked at, one in each of so many equal parts of them.

    Raises:
        ValueError: As dense, or there are no queries, or max_queries is less than 1.
    """
    heads = _check(mask, num_q_heads, num_kv_heads, row)
    is_some = 1 <= query_len <= seq_len
    require(is_some, "query_len", f"be at least 1 and at most seq_len ({seq_len})", query_len)
    require(max_queries >= 1, "max_queries", "be at least 1", max_queries)
    places = np.arange(min(query_len, max_queries))
    if query_len > max_queries:
        # Each at another place in its part, or blocks would be looked at always in the same of their rows.
        places = ((places + places * GOLDEN_RATIO % 1) * (query_len / max_queries)).astype(int)
    queries = jnp.asarray(seq_len - query_len + places, jnp.int32)
    seen = _num_seen(mask, queries, jnp.int32(row), seq_len=seq_len, num_heads=heads, is_prefill=is_prefill)
    return float(np.asarray(seen, np.float64).sum() / np.asarray(queries + 1, np.float64).sum() / heads[0])


def resolve_num_heads(mask: Mask, num_q_heads: int | None, num_kv_heads: int | None) -> tuple[int, int]:
    """Query heads and kv heads of a mask: as given, or as many as it tells apart.

    Raises:
        ValueError: It tells heads apart by their numbers and does not say how many there are; a number is 0,
            or kv heads do not divide query heads.
    """
    check_is_mask("mask", mask)
    query, kv = mask.num_heads
    q_heads = query if num_q_heads is None else num_q_heads
    rule = "be given for a mask that tells heads apart by their numbers"
    require(q_heads is not None, "num_q_heads", rule, num_q_heads)
    require(num_kv_heads is not None or kv is not None, "num_kv_heads", rule, num_kv_heads)
    assert q_heads is not None
    require_heads(q_heads, num_kv_heads)
    return q_heads, num_kv_heads or q_heads


def _check(mask: Mask, num_q_heads: int | None, num_kv_heads: int | None, row: int) -> tuple[int, int]:
    """The heads of a mask that is drawn for a row; ValueError where it has other heads or no such row."""
    heads = resolve_num_heads(mask, num_q_heads, num_kv_heads)
    mask.check(BatchSizes(num_q_heads=heads[0]))
    for name, num_rows in row_counts(mask):
        require(num_rows == 1 or 0 <= row < num_rows, "row", f"lie in {name}'s {num_rows} rows", row)
    return heads


@functools.partial(jax.jit, static_argnames=("seq_len", "num_heads", "is_prefill"))
def _num_seen(
    mask: Mask,
    queries: Int32[Array, " queries"],
    row: Int32[Array, ""],
    *,
    seq_len: int,
    num_heads: tuple[int, int],
    is_prefill: bool,
) -> Int32[Array, " queries"]:
    """How many keys up to its own place each of the queries sees, all heads together."""

    def of_one(query: Array) -> Array:
        seen = _seen(mask, query[None], seq_len, num_heads, row=row, is_prefill=is_prefill)
        return (seen & (jnp.arange(seq_len, dtype=jnp.int32)[None, None] <= query)).sum(dtype=jnp.int32)

    return jax.lax.map(of_one, queries)


def _seen(
    mask: Mask,
    queries: Int32[Array, " queries"],
    seq_len: int,
    num_heads: tuple[int, int],
    *,
    row: int | Int32[Array, ""],
    is_prefill: bool,
) -> Bool[Array, "q_heads queries keys"]:
    """Which of a request's keys the queries at these positions see."""
    pairs = Pairs(
        head=jnp.arange(num_heads[0], dtype=jnp.int32)[:, None, None],
        row=jnp.full((1, 1, 1), row, jnp.int32),
        query=queries[None, :, None],
        key=jnp.arange(seq_len, dtype=jnp.int32)[None, None, :],
        num_heads=num_heads,
        is_prefill=is_prefill,
    )
    return jnp.broadcast_to(mask.visible(pairs), (num_heads[0], queries.shape[0], seq_len))
