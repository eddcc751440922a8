"""Speculative decoding and KV sharing: decode rows with several query tokens, prefill rows with few."""

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
    """A batch reduced to the tokens whose logits are wanted."""

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
    """The longest query that counts as a decode when a back end computes speculated tokens as decodes.

    Args:
        num_speculative_tokens: Tokens drafted for each request; None = no speculation.
        parallel_drafting: A request verifies its draft and drafts the next in one step.
        dcp: Decode context parallel devices.
        supports_dcp_varlen: The back end takes decodes of several tokens with dcp > 1; else the result is 1.
        reorder_batch_threshold: The result without speculation.

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
    """The batch that the layers which share another layer's KV cache compute: only tokens that need logits.

    A batch in which no request has more than one new token stays as it is.

    Args:
        seq_lens: All tokens of each request, the new ones included. Host or traced.
        query_lens: New tokens of each request.
        logits_indices_padded: Tokens whose logits are wanted, ascending.
        num_logits_indices: How many of them count; the rest is graph padding.

    Raises:
        ValueError: query_lens and seq_lens are of several lengths.

    Source: vLLM `make_kv_sharing_fast_prefill_common_attn_metadata`.
    """
    xp, totals, lens, indices, num_indices = with_namespace(
        seq_lens=seq_lens,
        query_lens=query_lens,
        logits_indices_padded=logits_indices_padded,
        num_logits_indices=num_logits_indices,
    )
    require_one_per_request(query_lens=lens, seq_lens=totals)
    starts, num_reqs = start_locs(xp, lens), lens.shape[0]
    row = xp.searchsorted(starts[1:], indices, side="right")
    is_live = xp.arange(indices.shape[0], dtype=np.int32) < num_indices
    wanted = xp.where(is_live, row, num_reqs)[:, None] == xp.arange(num_reqs, dtype=np.int32)[None, :]
    is_decode_only = xp.max(lens, initial=0) <= 1
    new_lens = xp.where(is_decode_only, lens, xp.sum(wanted, axis=0)).astype(np.int32)
    new_starts = start_locs(xp, new_lens)
    return FastPrefill(
        new_starts, to_python_int(new_starts[-1]), to_python_int(xp.max(new_lens, initial=0)), totals
    )


def reshape_query_for_spec_decode(
    query: Shaped[AnyArray, "tokens q_heads head_dim"], batch_size: int
) -> Shaped[AnyArray, "reqs query_len q_heads head_dim"]:
    """Gives each of `batch_size` requests its own axis; all have equally many tokens.

    Raises:
        ValueError: The tokens cannot be shared out evenly.

    Source: vLLM `reshape_query_for_spec_decode`.
    """
    (batch_size,) = python_ints(batch_size=batch_size)
    require_positive(batch_size=batch_size)
    tokens, *rest = query.shape
    require(
        tokens % batch_size == 0,
        "query's number of tokens",
        f"be a multiple of batch_size ({batch_size})",
        tokens,
    )
    return query.reshape(batch_size, tokens // batch_size, *rest)


def reshape_attn_output_for_spec_decode(
    attn_output: Shaped[AnyArray, "..."],
) -> Shaped[AnyArray, "tokens q_heads head_dim"]:
    """Undoes `reshape_query_for_spec_decode`; leaves packed tokens as they are.

    Raises:
        ValueError: attn_output has neither 3 nor 4 axes.

    Source: vLLM `reshape_attn_output_for_spec_decode`.
    """
    require(attn_output.ndim in (3, 4), "attn_output", "have 3 or 4 axes", attn_output.shape)
    return attn_output.reshape(-1, *attn_output.shape[-2:])


def make_xqa_spec_decode_causal_mask(
    num_reqs: int, query_len: int
) -> UInt16[AnyArray, "reqs query_len lanes"]:
    """Which of its request's new tokens each one sees, as bits: token j is bit `j % 16` of lane `j // 16`.

    The lanes come in pairs: the masks are made of 32-bit words.

    Source: vLLM FlashInfer back end, mask of XQA decode.
    """
    num_reqs, query_len = python_ints(num_reqs=num_reqs, query_len=query_len)
    require_positive(num_reqs=num_reqs, query_len=query_len)
    num_lanes = 2 * -(-query_len // 32)
    visible = np.arange(16 * num_lanes)[None, :] <= np.arange(query_len)[:, None]
    bits = visible.reshape(query_len, num_lanes, 16) << np.arange(16)
    return np.broadcast_to(bits.sum(axis=-1).astype(np.uint16), (num_reqs, query_len, num_lanes))
