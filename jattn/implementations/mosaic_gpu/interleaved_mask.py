"""InterleavedMask in the form that the prefill kernel evaluates: the range of keys visible to a query.

Windows, causality and chunks make one range of positions visible to a query, hence one range of the rank's
keys.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jattn.masks import And, Causal, Chunked, InterleavedMask, Mask, Window
from jattn.masks.pairs import quotient
from pallas_kernels.shared import normalize_window_side
from pallas_kernels.varlen_prefill import KernelMask, PairTile, Words


def why_not_interleaved(mask: InterleavedMask) -> str | None:
    """Return why a kernel cannot evaluate a mask over one rank's keys; None if it can."""
    for factor in _factors(mask.mask):
        if not isinstance(factor, Causal | Chunked | Window):
            return f"there is no kernel for a {type(factor).__name__} over keys on several devices"
    return None


def interleaved_mask(mask: InterleavedMask) -> KernelMask:
    """Convert the mask to a KernelMask; why_not_interleaved must be None. Works inside jit."""
    shift = jnp.asarray(mask.shift).astype(jnp.int32)
    arrays = (shift, jnp.asarray(mask.rank).astype(jnp.int32).reshape(1))

    def load(_: PairTile, row: Any, refs: tuple[Any, ...]) -> tuple[Any, Any]:
        return refs[0][jnp.minimum(row, shift.shape[0] - 1)], refs[1][0]

    def visible(tile: PairTile, loaded: tuple[Any, Any]) -> Words:
        ahead, rank = loaded
        low, high = _visible_range(mask.mask, jnp.maximum(tile.query_positions + ahead, 0))
        all_columns = tile.fill_rows(jnp.int32(tile.shape[1]))
        return tile.words_in_range(
            None if low is None else _num_keys(mask, rank, low) - tile.first_key,
            all_columns if high is None else _num_keys(mask, rank, high) - tile.first_key,
        )

    return KernelMask(arrays, load, visible, is_words=True)


def _factors(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)


def _visible_range(mask: Mask, query: Any) -> tuple[Any | None, Any | None]:
    """Return the first position visible to a query, and one past the last; None without a bound."""
    low: Any | None = None
    high: Any | None = None
    for factor in _factors(mask):
        begin, end = None, None
        if isinstance(factor, Chunked):
            begin = quotient(query, factor.size) * factor.size
            end = begin + factor.size
        elif isinstance(factor, Window):
            right = normalize_window_side(factor.right)
            begin = None if factor.left is None else jnp.maximum(query - factor.left, 0)
            end = None if right is None else query + (right + 1)
        else:
            end = query + 1
        low = _tighter_bound(jnp.maximum, low, begin)
        high = _tighter_bound(jnp.minimum, high, end)
    return low, high


def _tighter_bound(join: Callable[[Any, Any], Any], a: Any | None, b: Any | None) -> Any | None:
    """Return `join(a, b)`; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return join(a, b)


def _num_keys(mask: InterleavedMask, rank: Any, num_positions: Any) -> Any:
    """Return how many of the first `num_positions` positions the rank stores."""
    interleave, size = mask.interleave, mask.interleave * mask.num_ranks
    rounds = quotient(num_positions, size)
    remaining = num_positions - rounds * size - rank * interleave
    return rounds * interleave + jnp.clip(remaining, 0, interleave)
