"""Which order a batch's rows must take so that its regions are contiguous."""

from typing import NamedTuple

import numpy as np

from jattn.batch.namespace import IntVector, with_namespace
from pallas_kernels.checks import require, require_one_of

ORDERS = ("two_regions", "three_regions", "four_regions")


class Reordering(NamedTuple):
    """`rows[order]` are the rows in their new order; `modified` tells whether any moves."""

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
    """Moves as few rows as possible so that decodes come first. Host only; nothing is changed in place.

    Args:
        num_scheduled_tokens: New tokens of each request.
        num_computed_tokens: Tokens of each request that are in the cache. "two_regions" ignores it.
        num_prompt_tokens: Tokens of each prompt. Only "four_regions" reads it.
        decode_threshold: Most new tokens of a decode.
        order: Which of vLLM's versions. "two_regions" (V1's first): short, long; swaps pairs from the ends.
            "three_regions": decode (short, has context), extend (long, has context), prefill (no context).
            "four_regions" (newest): decode, short extend (short, has context, prompt not finished), long
            extend, prefill.

    Returns:
        The order as int32 row indices, and whether it differs from the present one.

    Raises:
        ValueError: `order` is unknown, or an input it needs is missing or of another length.

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
    require(values is not None, name, f"be given for {order}", None)
    column = np.asarray(with_namespace(**{name: values})[1]).reshape(-1)
    require(len(column) == num_reqs, name, f"have one entry per request ({num_reqs})", len(column))
    return column


def _pairwise_swaps(is_long: np.ndarray) -> np.ndarray:
    """Swaps the first long row with the last short one, and so on until the short rows are in front."""
    order = np.arange(len(is_long), dtype=np.int32)
    long_rows, short_rows = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    for front, back in zip(long_rows, short_rows[::-1], strict=False):
        if back < len(short_rows):
            break
        order[[front, back]] = order[[back, front]]
    return order


def _minimal_moves(region: np.ndarray) -> np.ndarray:
    """Sorts by region; a row that is already inside its region's place stays where it is."""
    order = np.arange(len(region), dtype=np.int32)
    misplaced = np.flatnonzero(region != np.sort(region))
    order[misplaced] = misplaced[np.argsort(region[misplaced], kind="stable")]
    return order
