"""The prefill and decode halves of a batch, as vLLM's back ends computed them apart."""

from typing import NamedTuple

import numpy as np

from jattn.batch.namespace import AnyArray, IntVector, require_one_a_request, start_locs, with_namespace
from jattn.vllm.split import split_decodes_and_prefills
from pallas_kernels.checks import require, require_int


class Region(NamedTuple):
    """The prefill or the decode rows of a batch. None: vLLM leaves the field empty."""

    query_start_loc: AnyArray | None
    seq_lens: AnyArray
    slot_mapping: AnyArray
    max_query_len: int | None
    max_seq_len: int


class PrefillDecode(NamedTuple):
    """Both regions of a batch; None where a region has no rows."""

    prefill: Region | None
    decode: Region | None


def split_prefill_and_decode(
    query_lens: IntVector,
    seq_lens: IntVector,
    slot_mapping: IntVector,
    *,
    num_prefills: int | None = None,
    decode_threshold: int = 1,
) -> PrefillDecode:
    """The two halves that vLLM's back ends computed apart. Host only.

    Args:
        query_lens: New tokens of each request.
        seq_lens: All tokens of each request, the new ones included.
        slot_mapping: Slot of each token.
        num_prefills: Rows of a V0 batch that are prefills; they come first, and its decode half carries no
            query_start_loc. None: a V1 batch, whose decodes come first.
        decode_threshold: V1: longest query of a decode.

    Raises:
        ValueError: query_lens and seq_lens are of several lengths, there are fewer slots than tokens, or
            num_prefills is not from 0 to the number of requests.

    Source: vLLM V0 `BlocksparseFlashAttentionMetadata` and V1 `XFormersAttentionMetadata`:
    `prefill_metadata`, `decode_metadata`.
    """
    _, *arrays = with_namespace(query_lens=query_lens, seq_lens=seq_lens, slot_mapping=slot_mapping)
    lens, totals, slots = map(np.asarray, arrays)
    require_one_a_request(query_lens=lens, seq_lens=totals)
    is_v0 = num_prefills is not None
    boundary = (
        num_prefills
        if num_prefills is not None
        else int(split_decodes_and_prefills(lens, decode_threshold).num_decodes)
    )
    starts, num_reqs = start_locs(np, lens), len(lens)
    has_slots = len(slots) >= int(starts[-1])  # behind them may stand padding
    require(has_slots, "slot_mapping", f"have a slot for each of {starts[-1]} tokens", len(slots))
    require_int(num_prefills=boundary)
    require(0 <= boundary <= num_reqs, "num_prefills", f"lie in [0, {num_reqs}]", boundary)

    def region(first: int, stop: int, *, has_queries: bool) -> Region | None:
        if first == stop:
            return None
        return Region(
            query_start_loc=starts[first : stop + 1] - starts[first] if has_queries else None,
            seq_lens=totals[first:stop],
            slot_mapping=slots[starts[first] : starts[stop]],
            max_query_len=int(lens[first:stop].max()) if has_queries else None,
            max_seq_len=int(totals[first:stop].max()),
        )

    if is_v0:
        return PrefillDecode(
            region(0, boundary, has_queries=True), region(boundary, num_reqs, has_queries=False)
        )
    return PrefillDecode(region(boundary, num_reqs, has_queries=True), region(0, boundary, has_queries=True))
