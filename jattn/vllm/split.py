"""Where the decode rows of a batch end and its prefill rows begin."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.batch.host_arrays import plain_ints
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

BoolVector = Sequence[bool] | AnyArray


class DecodePrefillSplit(NamedTuple):
    """Rows and tokens of the decode region, which comes first, and of the prefill region."""

    num_decodes: IntLike
    num_prefills: IntLike
    num_decode_tokens: IntLike
    num_prefill_tokens: IntLike


class DecodeExtendPrefillSplit(NamedTuple):
    """Rows and tokens of the decode, extend and prefill regions, in this order."""

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
    """Finds the boundary between decode and prefill rows of a reordered batch.

    From the first prefill row on, every row counts as prefill, shorter ones too.

    Args:
        query_lens: New tokens of each request; 0 marks a padding row. Host or traced.
        decode_threshold: Longest query of a decode.
        require_uniform: Decodes are the leading rows with as many tokens as row 0, if those are few enough. A
            batch of such rows and padding rows alone is all decodes.
        treat_short_extends_as_decodes: False: a row that `is_prefilling` is a prefill however short. As in
            vLLM this does not reach a batch that `require_uniform` finds to be uniform.
        is_prefilling: Which rows are still reading their prompt.
        padded_num_actual_tokens: Tokens of the batch with graph padding; None = the sum of query_lens.

    Returns:
        Python ints for host inputs, int32 arrays for traced ones.

    Raises:
        ValueError: query_lens has several axes; is_prefilling is missing or has another length.

    Source: vLLM `split_decodes_and_prefills`, newest version.
    """
    xp, prefilling, lens = with_namespace(is_prefilling, query_lens=query_lens)
    require_one_a_request(query_lens=lens)
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
        require(
            is_prefilling is not None, "is_prefilling", "be given to tell short extends from decodes", None
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
    return DecodePrefillSplit(*map(host_int, counts))


def split_decodes_prefills_and_extends(
    query_lens: IntVector, seq_lens: IntVector, decode_threshold: int = 1
) -> DecodeExtendPrefillSplit:
    """Finds the boundaries between decodes, extends (long, with context) and prefills (long, without).

    Args:
        query_lens: New tokens of each request. Host or traced.
        seq_lens: All tokens of each request, the new ones included.
        decode_threshold: Longest query of a decode.

    Returns:
        Python ints for host inputs, int32 arrays for traced ones.

    Raises:
        ValueError: query_lens and seq_lens are of several lengths.

    Source: vLLM `split_decodes_prefills_and_extends`.
    """
    xp, lens, totals = with_namespace(query_lens=query_lens, seq_lens=seq_lens)
    require_one_a_request(query_lens=lens, seq_lens=totals)
    num_reqs, starts = lens.shape[0], start_locs(xp, lens)
    is_long = lens > decode_threshold
    first_long = _first_true(xp, is_long)
    first_prefill = _first_true(xp, is_long & (lens == totals))
    rows = (first_long, first_prefill - first_long, num_reqs - first_prefill)
    tokens = (
        starts[first_long],
        starts[first_prefill] - starts[first_long],
        starts[-1] - starts[first_prefill],
    )
    return DecodeExtendPrefillSplit(*map(host_int, (*rows, *tokens)))


def split_prefill_chunks(
    seq_lens_cpu: IntVector, workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Packs requests greedily, in order, into chunks of at most `workspace_size` tokens.

    Args:
        seq_lens_cpu: Tokens of each request. Host.
        workspace_size: Most tokens of a chunk.
        request_offset: Added to every row index.

    Returns:
        First row, and one past the last, of each chunk.

    Raises:
        ValueError: A request is longer than the workspace.

    Source: vLLM `split_prefill_chunks`.
    """
    workspace_size, request_offset = plain_ints(workspace_size=workspace_size, request_offset=request_offset)
    bounds: list[tuple[int, int]] = []
    start = used = 0
    lens = np.asarray(with_namespace(seq_lens_cpu=seq_lens_cpu)[1]).tolist()
    for row, length in enumerate(lens):
        require(
            length <= workspace_size, f"seq_lens_cpu[{row}]", f"fit workspace_size ({workspace_size})", length
        )
        if used + length > workspace_size:
            bounds.append((start + request_offset, row + request_offset))
            start, used = row, 0
        used += length
    if lens:
        bounds.append((start + request_offset, len(lens) + request_offset))
    return bounds


def _first_true(xp: Any, flags: Any) -> Any:
    """Index of the first true flag; their number when none is."""
    if flags.shape[0] == 0:
        return xp.asarray(0, np.int32)
    return xp.where(xp.any(flags), xp.argmax(flags), flags.shape[0]).astype(np.int32)
