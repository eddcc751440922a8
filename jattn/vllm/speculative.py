"""vLLM's helpers for speculative decoding and for prefill with KV sharing between layers."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Shaped, UInt16

from jattn.batch.int_arrays import (
    AnyArray,
    IntLike,
    IntVector,
    python_ints,
    require_one_per_request,
    start_locs,
    to_python_int,
    with_namespace,
)
from pallas_kernels.checks import require, require_positive


class FastPrefill(NamedTuple):
    """Batch that is reduced to the tokens whose logits are needed."""

    query_start_loc: Int32[AnyArray, " reqs+1"]
    num_actual_tokens: IntLike
    max_query_len: IntLike
    seq_lens: Int32[AnyArray, " reqs"]


def spec_decode_reorder_threshold(
    num_speculative_tokens: int | None = None,
    parallel_drafting: bool = False,
    dcp: int = 1,
    supports_dcp_varlen: bool = False,
    *,
    reorder_batch_threshold: int = 1,
) -> int:
    """Return the decode threshold of a back end that processes draft tokens as decodes.

    Args:
        num_speculative_tokens: Number of draft tokens per request; None = no speculative decoding.
        parallel_drafting: Whether a request verifies its draft tokens and drafts the next ones in one step.
        dcp: Number of decode context parallel ranks.
        supports_dcp_varlen: Whether the back end supports decodes of several tokens with dcp > 1. If not, the
            threshold is 1 for dcp > 1.
        reorder_batch_threshold: Threshold without speculative decoding.

    Source: vLLM `AttentionMetadataBuilder._init_reorder_batch_threshold`.
    """
    if dcp > 1 and not supports_dcp_varlen:
        return 1
    (drafted,) = python_ints(num_speculative_tokens=num_speculative_tokens or 0)
    return max(reorder_batch_threshold, 1 + drafted * (2 if parallel_drafting else 1))


def make_kv_sharing_fast_prefill_metadata(
    seq_lens: IntVector,
    query_lens: IntVector,
    logits_indices_padded: IntVector,
    num_logits_indices: IntLike,
) -> FastPrefill:
    """Return the batch for layers that share another layer's KV cache: only the tokens that need logits.

    A batch in which no request has more than one new token is returned unchanged.

    Args:
        seq_lens: Total number of tokens of each request, including the new ones. Host or traced.
        query_lens: Number of new tokens of each request.
        logits_indices_padded: Indices of the tokens whose logits are needed, ascending, then graph padding.
        num_logits_indices: Number of indices before the graph padding.

    Raises:
        ValueError: If `query_lens` and `seq_lens` differ in length.

    Source: vLLM `make_kv_sharing_fast_prefill_common_attn_metadata`.
    """
    xp, total_lens, lens, indices, num_indices = with_namespace(
        seq_lens=seq_lens,
        query_lens=query_lens,
        logits_indices_padded=logits_indices_padded,
        num_logits_indices=num_logits_indices,
    )
    require_one_per_request(query_lens=lens, seq_lens=total_lens)
    starts, num_reqs = start_locs(xp, lens), lens.shape[0]
    row = xp.searchsorted(starts[1:], indices, side="right")
    is_valid = xp.arange(indices.shape[0], dtype=np.int32) < num_indices
    belongs_to = xp.where(is_valid, row, num_reqs)[:, None] == xp.arange(num_reqs, dtype=np.int32)[None, :]
    is_decode_only = xp.max(lens, initial=0) <= 1
    new_lens = xp.where(is_decode_only, lens, xp.sum(belongs_to, axis=0)).astype(np.int32)
    new_starts = start_locs(xp, new_lens)
    return FastPrefill(
        new_starts, to_python_int(new_starts[-1]), to_python_int(xp.max(new_lens, initial=0)), total_lens
    )


def reshape_query_for_spec_decode(
    query: Shaped[AnyArray, "tokens q_heads head_dim"], batch_size: int
) -> Shaped[AnyArray, "reqs query_len q_heads head_dim"]:
    """Split the tokens axis into an axis of requests and an axis of each request's tokens.

    Args:
        query: Queries of a batch in which all requests have the same number of tokens.
        batch_size: Number of requests.

    Raises:
        ValueError: If the number of tokens is not a multiple of `batch_size`.

    Source: vLLM `reshape_query_for_spec_decode`.
    """
    (batch_size,) = python_ints(batch_size=batch_size)
    require_positive(batch_size=batch_size)
    tokens = query.shape[0]
    rule = f"be a multiple of batch_size ({batch_size})"
    require(tokens % batch_size == 0, "query's number of tokens", rule, tokens)
    return query.reshape(batch_size, tokens // batch_size, *query.shape[1:])


def reshape_attn_output_for_spec_decode(
    attn_output: Shaped[AnyArray, "..."],
) -> Shaped[AnyArray, "tokens q_heads head_dim"]:
    """Undo `reshape_query_for_spec_decode`; an output with a single tokens axis is returned unchanged.

    Raises:
        ValueError: If `attn_output` has neither 3 nor 4 axes.

    Source: vLLM `reshape_attn_output_for_spec_decode`.
    """
    require(attn_output.ndim in (3, 4), "attn_output", "have 3 or 4 axes", attn_output.shape)
    return attn_output.reshape(-1, *attn_output.shape[-2:])


def make_xqa_spec_decode_causal_mask(
    num_reqs: int, query_len: int
) -> UInt16[AnyArray, "reqs query_len lanes"]:
    """Return the causal mask among the new tokens of each request as a bit mask.

    Token j is bit `j % 16` of lane `j // 16`. The number of lanes is even because XQA reads 32-bit words.

    Args:
        num_reqs: Number of requests.
        query_len: Number of new tokens per request.

    Raises:
        ValueError: If an argument is not a positive int.

    Source: vLLM FlashInfer back end, mask of XQA decode.
    """
    num_reqs, query_len = python_ints(num_reqs=num_reqs, query_len=query_len)
    require_positive(num_reqs=num_reqs, query_len=query_len)
    num_lanes = 2 * -(-query_len // 32)
    visible = np.arange(16 * num_lanes)[None, :] <= np.arange(query_len)[:, None]
    bits = visible.reshape(query_len, num_lanes, 16) << np.arange(16)
    return np.broadcast_to(bits.sum(axis=-1).astype(np.uint16), (num_reqs, query_len, num_lanes))
