"""A mask over one rank's keys as the prefill kernel takes it: a query's first key, and one past its last.

What windows, causality and chunks let a query see is one stretch of positions, and so one of the rank's keys.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jattn.masks import And, Causal, Chunked, InterleavedMask, Mask, Window
from jattn.masks.pairs import quotient
from pallas_kernels.shared import normalize_window_side
from pallas_kernels.varlen_prefill import KernelMask, PairTile, Words


def why_not_interleaved(mask: InterleavedMask) -> str | None:
    """Why a kernel cannot compute a mask over one rank's keys; None if it can."""
    others = [
        type(one).__name__ for one in _factors(mask.mask) if not isinstance(one, Causal | Chunked | Window)
    ]
    if others:
        return f"there is no kernel for a {others[0]} over keys that lie on several devices"
    return None


def interleaved_mask(mask: InterleavedMask) -> KernelMask:
    """The mask for the kernel; why_not_interleaved is None. Traced."""
    shift = jnp.asarray(mask.shift).astype(jnp.int32)
    arrays = (shift, jnp.asarray(mask.rank).astype(jnp.int32).reshape(1))

    def load(_: PairTile, row: Any, refs: tuple[Any, ...]) -> tuple[Any, Any]:
        return refs[0][jnp.minimum(row, shift.shape[0] - 1)], refs[1][0]

    def visible(tile: PairTile, loaded: tuple[Any, Any]) -> Words:
        ahead, rank = loaded
        low, high = _stretch(mask.mask, jnp.maximum(tile.query_positions + ahead, 0))
        column = lambda position: _num_keys(mask, rank, position) - tile.first_key
        every = tile.fill_rows(jnp.int32(tile.shape[1]))
        return tile.words_in_range(
            None if low is None else column(low), every if high is None else column(high)
        )

    return KernelMask(arrays, load, visible, is_words=True)


def _factors(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)


def _stretch(mask: Mask, query: Any) -> tuple[Any | None, Any | None]:
    """The first position that a query sees, and one past the last; None = from the first, to the last."""
    low: Any | None = None
    high: Any | None = None
    for one in _factors(mask):
        begin, end = None, None
        if isinstance(one, Chunked):
            begin = quotient(query, one.size) * one.size
            end = begin + one.size
        elif isinstance(one, Window):
            right = normalize_window_side(one.right)
            begin = None if one.left is None else jnp.maximum(query - one.left, 0)
            end = None if right is None else query + (right + 1)
        else:
            end = query + 1
        low = _joined(jnp.maximum, low, begin)
        high = _joined(jnp.minimum, high, end)
    return low, high


def _joined(join: Callable[[Any, Any], Any], one: Any | None, other: Any | None) -> Any | None:
    """Of two bounds the narrower; None = no bound."""
    known = [bound for bound in (one, other) if bound is not None]
    return join(*known) if len(known) == 2 else next(iter(known), None)


def _num_keys(mask: InterleavedMask, rank: Any, num_positions: Any) -> Any:
    """How many of the first positions the rank stores."""
    interleave, size = mask.interleave, mask.interleave * mask.num_ranks
    rounds = quotient(num_positions, size)
    rest = num_positions - rounds * size - rank * interleave
    return rounds * interleave + jnp.clip(rest, 0, interleave)
