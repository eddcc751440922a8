"""Decode context parallelism: a request's keys lie interleaved on several devices.

Position p is stored on rank `(p // interleave) % dcp_size`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jattn.batch.context_parallel import checked_ranks, require_rank
from jattn.batch.int_arrays import (
    AnyArray,
    IntLike,
    IntTable,
    IntVector,
    as_block_table,
    python_ints,
    with_namespace,
)
from jattn.batch.slots import block_slots, gather_blocks
from pallas_kernels.checks import require, require_int, require_positive, require_shape


class CombinedAttention(NamedTuple):
    """Attention over the keys of all ranks, and its log-sum-exp."""

    out: Float[Array, "tokens q_heads head_dim"]
    lse: Float[Array, "tokens q_heads"]


def max_dcp_local_seq_len(
    max_seq_len: IntLike, dcp_size: int = 1, cp_kv_cache_interleave_size: int = 1
) -> IntLike:
    """A bound on what any rank stores of a request with up to `max_seq_len` keys.

    Raises:
        ValueError: max_seq_len is no int, or a size no positive one.

    Source: vLLM V1 FlashAttention builder, `max_dcp_context_kv_len`.
    """
    dcp_size, interleave = checked_ranks(dcp_size, cp_kv_cache_interleave_size)
    if isinstance(max_seq_len, jax.Array | np.ndarray):
        _, length = with_namespace(max_seq_len=max_seq_len)
    else:
        require_int(max_seq_len=max_seq_len)
        length = int(max_seq_len)  # numpy's in few bits wraps
    return -(-length // (dcp_size * interleave)) * interleave


def compute_dcp_slot_mapping(
    block_table: IntTable,
    rows: IntVector,
    positions: IntVector,
    block_size: int,
    *,
    dcp_size: int,
    dcp_rank: IntLike,
    cp_kv_cache_interleave_size: int = 1,
) -> Int32[AnyArray, " tokens"]:
    """The slot of each token on one rank; -1 for tokens that live on another, and for padding.

    A block id stands for `block_size * dcp_size` positions, `block_size` of them on each rank.

    Args:
        block_table: Blocks of each request. Host or traced.
        rows: Request of each token.
        positions: Its position; < 0: padding.
        block_size: Tokens of a block on one rank.
        dcp_size: Number of ranks.
        dcp_rank: This rank; may be traced.
        cp_kv_cache_interleave_size: Neighbouring positions that stay together; divides block_size.

    Raises:
        ValueError: A size is no positive int, block_size is no multiple of the interleave, rows and positions
            are of several lengths, dcp_rank is none of the ranks, or, on the host, a slot is beyond int32.

    Source: vLLM V1 `BlockTable.compute_slot_mapping`.
    """
    dcp_size, interleave = checked_ranks(dcp_size, cp_kv_cache_interleave_size)
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    require(
        block_size % interleave == 0,
        "block_size",
        f"be a multiple of cp_kv_cache_interleave_size ({interleave})",
        block_size,
    )
    require(dcp_rank is not None, "dcp_rank", f"lie in [0, {dcp_size})", dcp_rank)
    xp, table, row, position, rank = with_namespace(
        block_table=as_block_table("block_table", block_table),
        rows=rows,
        positions=positions,
        dcp_rank=dcp_rank,
    )
    require_rank(dcp_rank, dcp_size)
    require_shape("positions", position.shape, row.shape, "one for each of rows")
    offset = position % (block_size * dcp_size)
    blocks, is_valid = gather_blocks(xp, table, row, position, block_size * dcp_size)
    is_local = offset // interleave % dcp_size == rank
    local_offset = offset // (dcp_size * interleave) * interleave + offset % interleave
    return block_slots(xp, blocks, is_valid & is_local, local_offset, block_size)


def cp_lse_combine(
    partial_out: Float[Array, "ranks tokens q_heads head_dim"],
    partial_lse: Float[Array, "ranks tokens q_heads"],
    *,
    is_lse_base_on_e: bool = True,
) -> CombinedAttention:
    """Combines attention over each rank's keys into attention over all of them.

    A rank without keys has LSE -inf, +inf or NaN; its output is ignored, whatever it holds. Where no rank has
    keys the output is 0 and the LSE -inf.

    Args:
        partial_out: Each rank's normalised output.
        partial_lse: Its log-sum-exp.
        is_lse_base_on_e: False: the LSE, given and returned, is in base 2.

    Raises:
        ValueError: Shapes disagree, or outputs are no floats.

    Source: vLLM `cp_lse_ag_out_rs`, `correct_attn_out`: all-gather of the LSE, rescaling, and the sum that
    the reduce-scatter computes.
    """
    for name, array in (("partial_out", partial_out), ("partial_lse", partial_lse)):
        require(isinstance(array, jax.Array | np.ndarray), name, "be an array", type(array).__name__)
    # Cut off to ints the result would have lost its fractions.
    is_float = jnp.issubdtype(partial_out.dtype, jnp.floating)
    require(is_float, "partial_out", "hold floats", partial_out.dtype)
    require_shape("partial_lse", partial_lse.shape, partial_out.shape[:-1], "ranks, tokens, q_heads")
    require(partial_lse.shape[0] > 0, "partial_lse", "have at least one rank", partial_lse.shape)
    exp, log = (jnp.exp, jnp.log) if is_lse_base_on_e else (jnp.exp2, jnp.log2)
    lse = jnp.where(jnp.isnan(partial_lse) | jnp.isposinf(partial_lse), -jnp.inf, partial_lse)
    top = jnp.max(lse, axis=0)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = exp(lse - finite_top[None])
    total = jnp.sum(weight, axis=0)
    safe_total = jnp.where(total == 0, 1.0, total)
    share = (weight / safe_total[None])[..., None]
    # Cleared before the product, whose gradient would get 0 * NaN of what a rank without keys holds.
    parts = jnp.where(share > 0, partial_out.astype(share.dtype), 0.0)
    # The logarithm of 0 has no gradient: one of 0 became NaN.
    joined = jnp.where(total == 0, -jnp.inf, finite_top + log(safe_total))
    return CombinedAttention(jnp.sum(share * parts, axis=0).astype(partial_out.dtype), joined)


def mask_empty_context_lse(
    lse: Float[AnyArray, "q_heads tokens"], query_start_loc: IntVector, context_start_loc: IntVector
) -> Float[AnyArray, "q_heads tokens"]:
    """Sets the LSE to -inf for the tokens of requests without context.

    Args:
        lse: Of attention over the context; arbitrary where there is none.
        query_start_loc: First token of each request, and one past the last.
        context_start_loc: The same for context tokens.

    Source: vLLM `mask_empty_context_lse`.
    """
    xp, _, starts, context = with_namespace(
        lse, query_start_loc=query_start_loc, context_start_loc=context_start_loc
    )
    scores = xp.asarray(lse)  # of no tokens it came out as ints
    require_shape("context_start_loc", context.shape, starts.shape, "as query_start_loc")
    if starts.shape[0] < 2:  # no request, so no token of one
        return scores
    tokens = xp.arange(scores.shape[1], dtype=np.int32)
    row = xp.clip(xp.searchsorted(starts[1:], tokens, side="right"), 0, starts.shape[0] - 2)
    is_empty = (xp.diff(context)[row] == 0) & (tokens < starts[-1])
    return xp.where(is_empty[None, :], -np.inf, scores).astype(scores.dtype)
