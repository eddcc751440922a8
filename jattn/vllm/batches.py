"""Splitting, ordering and slicing of batches: decode and prefill regions, prefill chunks, micro-batches."""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

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
from pallas_kernels.checks import require, require_int, require_one_of

BoolVector = Sequence[bool] | AnyArray


class DecodePrefillSplit(NamedTuple):
    """Numbers of rows and tokens in the decode region, which comes first, and in the prefill region."""

    num_decodes: IntLike
    num_prefills: IntLike
    num_decode_tokens: IntLike
    num_prefill_tokens: IntLike


class DecodeExtendPrefillSplit(NamedTuple):
    """Numbers of rows and tokens in the decode, extend and prefill regions, in this order."""

    num_decodes: IntLike
    num_extends: IntLike
    num_prefills: IntLike
    num_decode_tokens: IntLike
    num_extend_tokens: IntLike
    num_prefill_tokens: IntLike


def split_decodes_and_prefills(
    query_lens: IntVector,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    *,
    is_prefilling: BoolVector | None = None,
    padded_num_actual_tokens: int | None = None,
) -> DecodePrefillSplit:
    """Find the boundary between the decode and prefill rows of a reordered batch.

    All rows from the first prefill row on count as prefill, even shorter ones.

    Args:
        query_lens: Number of new tokens of each request; 0 marks a padding row. Host or traced.
        decode_threshold: Maximum number of new tokens of a decode row.
        require_uniform: Decode rows are the leading rows with as many tokens as row 0, if that number is at
            most `decode_threshold`. A batch that has only such rows and padding rows is all decodes.
        treat_short_extends_as_decodes: False = a row for which `is_prefilling` is true is a prefill row,
            however short it is. As in vLLM, this does not apply to a batch that `require_uniform` finds to be
            uniform.
        is_prefilling: Whether each request still has prompt tokens to process.
        padded_num_actual_tokens: Number of tokens with graph padding. None = the sum of `query_lens`.

    Returns:
        Python ints for host inputs, int32 arrays for traced inputs.

    Raises:
        ValueError: If `query_lens` has more than one axis, or `is_prefilling` is required and missing or has
            a different length.

    Source: vLLM `split_decodes_and_prefills`, newest version.
    """
    xp, prefilling, lens = with_namespace(is_prefilling, query_lens=query_lens)
    require_one_per_request(query_lens=lens)
    num_reqs = lens.shape[0]
    num_tokens = xp.sum(lens) if padded_num_actual_tokens is None else padded_num_actual_tokens
    is_prefill = lens != lens[:1] if require_uniform else lens > decode_threshold
    all_decodes: Any = num_reqs == 0
    if treat_short_extends_as_decodes and (not require_uniform or decode_threshold <= 1):
        all_decodes = all_decodes | xp.all(lens <= decode_threshold)
    if require_uniform:
        is_short = xp.all(lens[:1] <= decode_threshold)
        all_decodes = all_decodes | (is_short & xp.all((lens == lens[:1]) | (lens == 0)))
        is_prefill = is_prefill | ~is_short
    if not treat_short_extends_as_decodes:
        if is_prefilling is None:
            raise ValueError(
                "treat_short_extends_as_decodes=False requires is_prefilling. Pass is_prefilling."
            )
        require(
            prefilling.shape == (num_reqs,),
            "is_prefilling",
            f"have one entry per request ({num_reqs})",
            prefilling.shape,
        )
        is_prefill = is_prefill | prefilling.astype(bool)
    first = xp.where(all_decodes, num_reqs, _first_true(xp, is_prefill))
    decode_tokens = xp.where(first == num_reqs, num_tokens, start_locs(xp, lens)[first])
    counts = (first, num_reqs - first, decode_tokens, num_tokens - decode_tokens)
    return DecodePrefillSplit(*map(to_python_int, counts))


def split_decodes_prefills_and_extends(
    query_lens: IntVector, seq_lens: IntVector, decode_threshold: int = 1
) -> DecodeExtendPrefillSplit:
    """Find the boundaries between decodes, extends (long, with context) and prefills (long, without context).

    Args:
        query_lens: Number of new tokens of each request. Host or traced.
        seq_lens: Total number of tokens of each request, including the new ones.
        decode_threshold: Maximum number of new tokens of a decode row.

    Returns:
        Python ints for host inputs, int32 arrays for traced inputs.

    Raises:
        ValueError: If `query_lens` and `seq_lens` differ in length.

    Source: vLLM `split_decodes_prefills_and_extends`.
    """
    xp, lens, total_lens = with_namespace(query_lens=query_lens, seq_lens=seq_lens)
    require_one_per_request(query_lens=lens, seq_lens=total_lens)
    num_reqs, starts = lens.shape[0], start_locs(xp, lens)
    is_long = lens > decode_threshold
    first_long = _first_true(xp, is_long)
    first_prefill = _first_true(xp, is_long & (lens == total_lens))
    rows = (first_long, first_prefill - first_long, num_reqs - first_prefill)
    tokens = (
        starts[first_long],
        starts[first_prefill] - starts[first_long],
        starts[-1] - starts[first_prefill],
    )
    return DecodeExtendPrefillSplit(*map(to_python_int, (*rows, *tokens)))


def split_prefill_chunks(
    seq_lens_cpu: IntVector, workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Pack requests greedily, in order, into chunks of at most `workspace_size` tokens.

    Args:
        seq_lens_cpu: Number of tokens of each request. Host.
        workspace_size: Maximum number of tokens per chunk.
        request_offset: Offset added to every row index.

    Returns:
        The first row of each chunk, and one past its last row.

    Raises:
        ValueError: If a request has more than `workspace_size` tokens.

    Source: vLLM `split_prefill_chunks`.
    """
    workspace_size, request_offset = python_ints(workspace_size=workspace_size, request_offset=request_offset)
    bounds: list[tuple[int, int]] = []
    start = used = 0
    lens = np.asarray(with_namespace(seq_lens_cpu=seq_lens_cpu)[1]).tolist()
    for row, length in enumerate(lens):
        rule = f"be at most workspace_size ({workspace_size})"
        require(length <= workspace_size, f"seq_lens_cpu[{row}]", rule, length)
        if used + length > workspace_size:
            bounds.append((start + request_offset, row + request_offset))
            start, used = row, 0
        used += length
    if lens:
        bounds.append((start + request_offset, len(lens) + request_offset))
    return bounds


def _first_true(xp: Any, flags: Any) -> Any:
    """Return the index of the first true flag, or the number of flags if all are false."""
    if flags.shape[0] == 0:
        return xp.asarray(0, np.int32)
    return xp.where(xp.any(flags), xp.argmax(flags), flags.shape[0]).astype(np.int32)


class Region(NamedTuple):
    """Metadata of the prefill rows or the decode rows of a batch; None where vLLM leaves a field empty."""

    query_start_loc: AnyArray | None
    seq_lens: AnyArray
    slot_mapping: AnyArray
    max_query_len: int | None
    max_seq_len: int


class PrefillDecode(NamedTuple):
    """Prefill and decode regions of a batch; None for a region without rows."""

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
    """Split a batch into the prefill and decode regions that vLLM's back ends compute separately. Host only.

    Args:
        query_lens: Number of new tokens of each request.
        seq_lens: Total number of tokens of each request, including the new ones.
        slot_mapping: Cache slot of each token.
        num_prefills: Number of prefill rows of a V0 batch, where they come first and the decode region has no
            query_start_loc. None = a V1 batch, where decode rows come first.
        decode_threshold: Maximum number of new tokens of a decode row in a V1 batch.

    Raises:
        ValueError: If `query_lens` and `seq_lens` differ in length, there are fewer slots than tokens, or
            `num_prefills` is not in [0, number of requests].

    Source: vLLM V0 `BlocksparseFlashAttentionMetadata` and V1 `XFormersAttentionMetadata`:
    `prefill_metadata`, `decode_metadata`.
    """
    _, *arrays = with_namespace(query_lens=query_lens, seq_lens=seq_lens, slot_mapping=slot_mapping)
    lens, total_lens, slots = map(np.asarray, arrays)
    require_one_per_request(query_lens=lens, seq_lens=total_lens)
    is_v0 = num_prefills is not None
    boundary = (
        num_prefills
        if num_prefills is not None
        else int(split_decodes_and_prefills(lens, decode_threshold).num_decodes)
    )
    starts, num_reqs = start_locs(np, lens), len(lens)
    has_slots = len(slots) >= int(starts[-1])  # padding may follow the last token
    require(has_slots, "slot_mapping", f"have a slot for each of the {starts[-1]} tokens", len(slots))
    require_int(num_prefills=boundary)
    require(0 <= boundary <= num_reqs, "num_prefills", f"lie in [0, {num_reqs}]", boundary)

    def region(first: int, stop: int, *, has_queries: bool) -> Region | None:
        if first == stop:
            return None
        return Region(
            query_start_loc=starts[first : stop + 1] - starts[first] if has_queries else None,
            seq_lens=total_lens[first:stop],
            slot_mapping=slots[starts[first] : starts[stop]],
            max_query_len=int(lens[first:stop].max()) if has_queries else None,
            max_seq_len=int(total_lens[first:stop].max()),
        )

    if is_v0:
        return PrefillDecode(
            region(0, boundary, has_queries=True), region(boundary, num_reqs, has_queries=False)
        )
    return PrefillDecode(region(boundary, num_reqs, has_queries=True), region(0, boundary, has_queries=True))


ORDERS = ("two_regions", "three_regions", "four_regions")


class Reordering(NamedTuple):
    """New order of a batch's rows.

    Attributes:
        order: Row indices, int32; `rows[order]` are the rows in their new order.
        modified: Whether the new order differs from the old one.
    """

    order: np.ndarray
    modified: bool


def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: IntVector,
    num_computed_tokens: IntVector | None = None,
    num_prompt_tokens: IntVector | None = None,
    decode_threshold: int = 1,
    *,
    order: str = "three_regions",
) -> Reordering:
    """Compute an order in which decode rows come first, moving as few rows as possible. Host only.

    Args:
        num_scheduled_tokens: Number of new tokens of each request.
        num_computed_tokens: Number of cached tokens of each request. Not read for "two_regions".
        num_prompt_tokens: Number of prompt tokens of each request. Only read for "four_regions".
        decode_threshold: Maximum number of new tokens of a decode row.
        order: Version of vLLM's ordering. "two_regions" (V1's first): short, long; swaps pairs from the ends.
            "three_regions": decode (short, has context), extend (long, has context), prefill (no context).
            "four_regions" (newest): decode, short extend (short, has context, prompt not finished), long
            extend, prefill.

    Raises:
        ValueError: If `order` is unknown, or an array that it requires is missing or has a different length.

    Source: vLLM `reorder_batch_to_split_decodes_and_prefills`.
    """
    require_one_of("order", order, ORDERS)
    scheduled = np.asarray(with_namespace(num_scheduled_tokens=num_scheduled_tokens)[1]).reshape(-1)
    is_long = scheduled > decode_threshold
    if order == "two_regions":
        permutation = _pairwise_swaps(is_long)
    else:
        computed = _column("num_computed_tokens", num_computed_tokens, len(scheduled), order)
        region = np.where(is_long, 2, 0)
        if order == "four_regions":
            prompt = _column("num_prompt_tokens", num_prompt_tokens, len(scheduled), order)
            region = np.where(~is_long & (computed < prompt), 1, region)
        permutation = _minimal_moves(np.where(computed == 0, 3, region))
    return Reordering(permutation, bool((permutation != np.arange(len(scheduled))).any()))


def _column(name: str, values: IntVector | None, num_reqs: int, order: str) -> np.ndarray:
    if values is None:
        raise ValueError(f"{name} is required for order={order!r}. Pass one number per request.")
    column = np.asarray(with_namespace(**{name: values})[1]).reshape(-1)
    require(len(column) == num_reqs, name, f"have one entry per request ({num_reqs})", len(column))
    return column


def _pairwise_swaps(is_long: np.ndarray) -> np.ndarray:
    """Swap the first long row with the last short one, and so on until all short rows come first."""
    order = np.arange(len(is_long), dtype=np.int32)
    long_rows, short_rows = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    for front, back in zip(long_rows, short_rows[::-1], strict=False):
        if back < len(short_rows):
            break
        order[[front, back]] = order[[back, front]]
    return order


def _minimal_moves(region: np.ndarray) -> np.ndarray:
    """Sort rows by region without moving those that are already inside their region."""
    order = np.arange(len(region), dtype=np.int32)
    misplaced = np.flatnonzero(region != np.sort(region))
    order[misplaced] = misplaced[np.argsort(region[misplaced], kind="stable")]
    return order


Span = slice | Sequence[int]


class MicroBatch(NamedTuple):
    """Batch that consists of a slice of the rows and tokens of a larger batch."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: IntLike
    query_start_loc: Int32[AnyArray, " reqs+1"]
    seq_lens: Int32[AnyArray, " reqs"]


def slice_query_start_locs(query_start_loc: IntVector, request_slice: Span) -> AnyArray:
    """Return the query_start_loc of a slice of the rows, relative to the first of them.

    Args:
        query_start_loc: Index of the first token of each row, and one past the last token. Host or traced.
        request_slice: First row and one past the last, as a slice or a pair. Static.

    Raises:
        ValueError: If the slice is empty or outside the batch.

    Source: vLLM `slice_query_start_locs`.
    """
    _, starts = with_namespace(query_start_loc=query_start_loc)
    first, stop = _bounds("request_slice", request_slice, starts.shape[0] - 1)
    return starts[first : stop + 1] - starts[first]


def make_metadata_with_slice(
    seq_lens: IntVector, query_lens: IntVector, req_slice: Span, token_slice: Span
) -> MicroBatch:
    """Return the batch of a slice of rows and tokens. A request that the slice cuts ends at the cut.

    Args:
        seq_lens: Total number of tokens of each request, including the new ones. Host or traced.
        query_lens: Number of new tokens of each request.
        req_slice: First row and one past the last, as a slice or a pair. Static.
        token_slice: First token and one past the last. Static. It may end after the last row's tokens (graph
            padding).

    Raises:
        ValueError: If a slice is empty or outside the batch, the token slice does not start in the first row
            (checked on the host only), or `query_lens` and `seq_lens` differ in length.

    Source: vLLM `_make_metadata_with_slice`.
    """
    xp, total_lens, lens = with_namespace(seq_lens=seq_lens, query_lens=query_lens)
    require_one_per_request(query_lens=lens, seq_lens=total_lens)
    starts = start_locs(xp, lens)
    first, stop = _bounds("req_slice", req_slice, lens.shape[0])
    first_token, stop_token = _bounds("token_slice", token_slice, None)
    if xp is np:
        row_stop = max(starts[first + 1], starts[first] + 1)  # the first row may have no tokens
        is_inside = bool(starts[first] <= first_token < row_stop)
        row_tokens = f"{starts[first]}..{starts[first + 1] - 1}"
        require(is_inside, "token_slice", f"start in row {first} (tokens {row_tokens})", first_token)
    query_start_loc = xp.clip(starts[first : stop + 1], first_token, stop_token) - first_token
    # Number of new tokens of each row after the cut: all of them for a row that begins after it.
    cut_off = xp.clip(starts[1:] - stop_token, 0, lens)[first:stop]
    return MicroBatch(
        num_reqs=stop - first,
        num_actual_tokens=stop_token - first_token,
        max_query_len=to_python_int(xp.max(xp.diff(query_start_loc))),
        query_start_loc=query_start_loc,
        seq_lens=total_lens[first:stop] - cut_off,
    )


def split_at_token(
    seq_lens: IntVector, query_lens: IntVector, split_point: int
) -> tuple[MicroBatch, MicroBatch]:
    """Split a host batch into the tokens before `split_point` and the remaining tokens.

    Args:
        seq_lens: Total number of tokens of each request, including the new ones.
        query_lens: Number of new tokens of each request.
        split_point: Index of the first token of the second batch.

    Raises:
        ValueError: If one of the batches would be empty, or `query_lens` and `seq_lens` differ in length.

    Source: vLLM `create_ubatch_slices`, `split_attn_metadata`.
    """
    starts = start_locs(np, np.asarray(with_namespace(query_lens=query_lens)[1]))
    num_tokens = int(starts[-1])
    require(0 < split_point < num_tokens, "split_point", f"lie in [1, {num_tokens - 1}]", split_point)
    stop_before = int(np.searchsorted(starts, split_point, side="left"))
    first_after = int(np.searchsorted(starts, split_point, side="right")) - 1
    before = make_metadata_with_slice(seq_lens, query_lens, (0, stop_before), (0, split_point))
    after = make_metadata_with_slice(
        seq_lens, query_lens, (first_after, len(starts) - 1), (split_point, num_tokens)
    )
    return before, after


def _bounds(name: str, span: Span, limit: int | None) -> tuple[int, int]:
    first, stop = (span.start, span.stop) if isinstance(span, slice) else span
    bounds: tuple[Any, Any] = (0 if first is None else first, limit if stop is None else stop)
    are_ints = all(isinstance(bound, numbers.Integral) for bound in bounds)
    require(are_ints, name, "be a slice or a pair (first, one past the last)", repr(span))
    first, stop = map(int, bounds)
    require(0 <= first < stop, name, "select at least one element", (first, stop))
    require(limit is None or stop <= limit, name, f"end at or before {limit}", stop)

    return first, stop
