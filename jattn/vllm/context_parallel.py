"""Decode context parallelism (DCP): the keys of each request are interleaved over several devices.

Position p is stored on rank `(p // interleave) % dcp_size`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jattn.batch.context_parallel import require_rank, require_ranks
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
    """Attention output over the keys of all ranks, and its log-sum-exp."""

    out: Float[Array, "tokens q_heads head_dim"]
    lse: Float[Array, "tokens q_heads"]


def max_dcp_local_seq_len(
    max_seq_len: IntLike, dcp_size: int = 1, cp_kv_cache_interleave_size: int = 1
) -> IntLike:
    """Return an upper bound on the number of keys that a rank stores for a request of `max_seq_len` keys.

    Args:
        max_seq_len: Maximum number of keys of a request.
        dcp_size: Number of ranks.
        cp_kv_cache_interleave_size: Number of consecutive positions per rank.

    Raises:
        ValueError: If `max_seq_len` is not an int, or a size is not a positive int.

    Source: vLLM V1 FlashAttention builder, `max_dcp_context_kv_len`.
    """
    dcp_size, interleave = require_ranks(dcp_size, cp_kv_cache_interleave_size)
    if isinstance(max_seq_len, jax.Array | np.ndarray):
        _, length = with_namespace(max_seq_len=max_seq_len)
    else:
        require_int(max_seq_len=max_seq_len)
        length = int(max_seq_len)  # a NumPy int of few bits would wrap
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
    """Return the slot of each token on one rank; -1 for padding and for tokens stored on another rank.

    A block id covers `block_size * dcp_size` positions of a request, `block_size` of them on each rank.

    Args:
        block_table: Block ids of each request. Host or traced.
        rows: Index of each token's request.
        positions: Position of each token in its request; negative for padding.
        block_size: Number of tokens per block on one rank.
        dcp_size: Number of ranks.
        dcp_rank: Index of this rank; may be traced.
        cp_kv_cache_interleave_size: Number of consecutive positions per rank; divides `block_size`.

    Raises:
        ValueError: If a size is not a positive int, `block_size` is not a multiple of the interleave, `rows`
            and `positions` differ in length, `dcp_rank` is not in [0, dcp_size), or (on the host) a slot
            exceeds int32.

    Source: vLLM V1 `BlockTable.compute_slot_mapping`.
    """
    dcp_size, interleave = require_ranks(dcp_size, cp_kv_cache_interleave_size)
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
    require_shape("positions", position.shape, row.shape, "the shape of rows")
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
    """Combine attention over each rank's keys into attention over the keys of all ranks.

    A rank without keys has LSE -inf, +inf or NaN; its output is ignored, even if it is NaN. If no rank has
    keys, the output is 0 and the LSE -inf.

    Args:
        partial_out: Normalized attention output of each rank.
        partial_lse: Log-sum-exp of each rank's scores.
        is_lse_base_on_e: Whether the LSE (argument and result) is in base e. False = base 2.

    Raises:
        ValueError: If the shapes do not match, or an argument is not an array of floats.

    Source: vLLM `cp_lse_ag_out_rs`, `correct_attn_out`: all-gather of the LSE, rescaling, and the sum that
    the reduce-scatter computes.
    """
    for name, array in (("partial_out", partial_out), ("partial_lse", partial_lse)):
        require(isinstance(array, jax.Array | np.ndarray), name, "be an array", type(array).__name__)
    # An int output would be truncated.
    is_float = jnp.issubdtype(partial_out.dtype, jnp.floating)
    require(is_float, "partial_out", "hold floats", partial_out.dtype)
    require_shape("partial_lse", partial_lse.shape, partial_out.shape[:-1], "ranks, tokens, q_heads")
    require(partial_lse.shape[0] > 0, "partial_lse", "have at least one rank", partial_lse.shape)
    exp, log = (jnp.exp, jnp.log) if is_lse_base_on_e else (jnp.exp2, jnp.log2)
    lse = jnp.where(jnp.isnan(partial_lse) | jnp.isposinf(partial_lse), -jnp.inf, partial_lse)
    max_lse = jnp.max(lse, axis=0)
    finite_max = jnp.where(jnp.isneginf(max_lse), 0.0, max_lse)
    exp_lse = exp(lse - finite_max[None])
    exp_sum = jnp.sum(exp_lse, axis=0)
    safe_sum = jnp.where(exp_sum == 0, 1.0, exp_sum)
    weight = (exp_lse / safe_sum[None])[..., None]
    # Outputs of ranks without keys are zeroed before the product: its gradient would be 0 * NaN.
    outputs = jnp.where(weight > 0, partial_out.astype(weight.dtype), 0.0)
    # log(safe_sum) instead of log(exp_sum): the gradient of log(0) would be NaN.
    combined_lse = jnp.where(exp_sum == 0, -jnp.inf, finite_max + log(safe_sum))
    return CombinedAttention(jnp.sum(weight * outputs, axis=0).astype(partial_out.dtype), combined_lse)


def mask_empty_context_lse(
    lse: Float[AnyArray, "q_heads tokens"], query_start_loc: IntVector, context_start_loc: IntVector
) -> Float[AnyArray, "q_heads tokens"]:
    """Set the LSE to -inf for the tokens of requests without context.

    Args:
        lse: Log-sum-exp of attention over the context; arbitrary for requests without context.
        query_start_loc: Index of the first token of each request, and one past the last token.
        context_start_loc: Index of the first context token of each request, and one past the last.

    Source: vLLM `mask_empty_context_lse`.
    """
    xp, _, starts, context = with_namespace(
        lse, query_start_loc=query_start_loc, context_start_loc=context_start_loc
    )
    scores = xp.asarray(lse)  # with_namespace converts an empty array to ints
    require_shape("context_start_loc", context.shape, starts.shape, "the shape of query_start_loc")
    if starts.shape[0] < 2:  # there are no requests
        return scores
    tokens = xp.arange(scores.shape[1], dtype=np.int32)
    row = xp.clip(xp.searchsorted(starts[1:], tokens, side="right"), 0, starts.shape[0] - 2)
    is_empty = (xp.diff(context)[row] == 0) & (tokens < starts[-1])
    return xp.where(is_empty[None, :], -np.inf, scores).astype(scores.dtype)
