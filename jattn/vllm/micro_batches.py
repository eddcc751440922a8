"""Micro-batches: a batch cut at rows and tokens."""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jattn.batch.namespace import (
    AnyArray,
    IntLike,
    IntVector,
    host_int,
    require_one_a_request,
    start_locs,
    with_namespace,
)
from pallas_kernels.checks import require

Span = slice | Sequence[int]


class MicroBatch(NamedTuple):
    """Some rows and some tokens of a batch, as a batch of its own."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: IntLike
    query_start_loc: Int32[AnyArray, " reqs+1"]
    seq_lens: Int32[AnyArray, " reqs"]


def slice_query_start_locs(query_start_loc: IntVector, request_slice: Span) -> AnyArray:
    """The query_start_loc of some rows, counted from the first of them.

    Args:
        query_start_loc: First token of each row, and one past the last. Host or traced.
        request_slice: First row and one past the last, as a slice or a pair. Static.

    Source: vLLM `slice_query_start_locs`.
    """
    _, starts = with_namespace(query_start_loc=query_start_loc)
    first, stop = _bounds("request_slice", request_slice, starts.shape[0] - 1)
    return starts[first : stop + 1] - starts[first]


def make_metadata_with_slice(
    seq_lens: IntVector, query_lens: IntVector, req_slice: Span, token_slice: Span
) -> MicroBatch:
    """Cuts rows and tokens out of a batch. A request cut in two ends, in the earlier part, at the cut.

    Args:
        seq_lens: All tokens of each request, the new ones included. Host or traced.
        query_lens: New tokens of each request.
        req_slice: First row and one past the last, as a slice or a pair. Static.
        token_slice: First token and one past the last. Static; may reach past the last row (graph padding).

    Raises:
        ValueError: A slice is empty or outside the batch, (on the host) a token is outside the rows, or
            query_lens and seq_lens are of several lengths.

    Source: vLLM `_make_metadata_with_slice`.
    """
    xp, totals, lens = with_namespace(seq_lens=seq_lens, query_lens=query_lens)
    require_one_a_request(query_lens=lens, seq_lens=totals)
    starts = start_locs(xp, lens)
    first, stop = _bounds("req_slice", req_slice, lens.shape[0])
    first_token, stop_token = _bounds("token_slice", token_slice, None)
    if xp is np:
        behind = max(starts[first + 1], starts[first] + 1)  # the first row may have no token
        inside = starts[first] <= first_token < behind
        require(
            bool(inside),
            "token_slice",
            f"start in row {first} ({starts[first]}..{starts[first + 1] - 1})",
            first_token,
        )
    query_start_loc = xp.clip(starts[first : stop + 1], first_token, stop_token) - first_token
    cut_off = xp.clip(starts[1:] - stop_token, 0, lens)[first:stop]  # of a row behind the cut all of its own
    return MicroBatch(
        num_reqs=stop - first,
        num_actual_tokens=stop_token - first_token,
        max_query_len=host_int(xp.max(xp.diff(query_start_loc))),
        query_start_loc=query_start_loc,
        seq_lens=totals[first:stop] - cut_off,
    )


def split_at_token(
    seq_lens: IntVector, query_lens: IntVector, split_point: int
) -> tuple[MicroBatch, MicroBatch]:
    """Cuts a host batch into the tokens before `split_point` and the rest.

    Raises:
        ValueError: One of the parts would be empty, or query_lens and seq_lens are of several lengths.

    Source: vLLM `create_ubatch_slices`, `split_attn_metadata`.
    """
    starts = start_locs(np, np.asarray(with_namespace(query_lens=query_lens)[1]))
    num_tokens = int(starts[-1])
    require(0 < split_point < num_tokens, "split_point", f"lie inside the {num_tokens} tokens", split_point)
    ends_before = int(np.searchsorted(starts, split_point, side="left"))
    begins_after = int(np.searchsorted(starts, split_point, side="right")) - 1
    before = make_metadata_with_slice(seq_lens, query_lens, (0, ends_before), (0, split_point))
    rest = make_metadata_with_slice(
        seq_lens, query_lens, (begins_after, len(starts) - 1), (split_point, num_tokens)
    )
    return before, rest


def _bounds(name: str, span: Span, limit: int | None) -> tuple[int, int]:
    first, stop = (span.start, span.stop) if isinstance(span, slice) else span
    bounds: tuple[Any, Any] = (0 if first is None else first, limit if stop is None else stop)
    are_ints = all(isinstance(bound, numbers.Integral) for bound in bounds)
    require(are_ints, name, "be a first and one past the last", repr(span))
    first, stop = map(int, bounds)
    require(0 <= first < stop, name, "hold at least one", (first, stop))
    require(limit is None or stop <= limit, name, f"end at or before {limit}", stop)
    return first, stop
