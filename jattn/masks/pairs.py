"""The arguments of masks: pairs of a query and a key, tiles of such pairs, and the sizes of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared import floor_div as floor_div


class Pairs(NamedTuple):
    """Pairs of a query and a key: int32 arrays that broadcast against each other, or scalars.

    Attributes:
        head: Query head on this device.
        row: Row of the batch, which identifies the request. Masks of positions only do not read it.
        query: Position of the query in its request. Negative for the first queries of a request with more
            queries than keys; they belong to block -1 of a pattern and those before it.
        key: Position of the key in its request.
        num_heads: Static: number of query heads and kv heads on this device.
        is_prefill: Static: whether the queries are in the prefill region.
    """

    head: Any
    row: Any
    query: Any
    key: Any
    num_heads: tuple[int, int]
    is_prefill: bool = True

    def at_query(self, array: Any, *, per_head: bool = False) -> Any:
        """Return the entry of an array for the query of each pair, inside kernels as well.

        Args:
            array: Array field of the mask: [positions] for all requests or [reqs, positions]. Positions
                beyond the array have the nearest entry.
            per_head: Static: whether the array has an axis of query heads before the positions.
        """
        return self.look_up(array, "query", per_head=per_head)

    def at_key(self, array: Any, *, per_head: bool = False) -> Any:
        """Return the entry of an array for the key of each pair; see `at_query`."""
        return self.look_up(array, "key", per_head=per_head)

    def at_row(self, array: Any, *, per_head: bool = False) -> Any:
        """Return the entry of an array without positions, [] or [reqs]; see `at_query`."""
        return self.look_up(array, "row", per_head=per_head)

    def look_up(self, array: Any, axis: str, *, per_head: bool = False) -> Any:
        """Return the entry of an array at the position named by `axis`: "query", "key" or "row"."""
        position = None if axis == "row" else self.query if axis == "query" else self.key
        return entry(array, self.row, self.head if per_head else None, position)


class Tiles(NamedTuple):
    """Tiles of pairs: each pairs the queries first_query..last_query with the keys first_key..last_key.

    Both ends are inclusive, so a tile has at least one pair.

    Attributes:
        head: Query head on this device.
        row: Row of the batch, which identifies the request.
        first_query: Position of the first query.
        last_query: Position of the last query.
        first_key: Position of the first key.
        last_key: Position of the last key.
        num_heads: Static: number of query heads and kv heads on this device.
        size: Static: number of queries and keys of the largest tile.
        is_prefill: Static: whether the queries are in the prefill region.
    """

    head: Any
    row: Any
    first_query: Any
    last_query: Any
    first_key: Any
    last_key: Any
    num_heads: tuple[int, int]
    size: tuple[int, int]
    is_prefill: bool = True

    def at_queries(self, array: Any, *, per_head: bool = False) -> tuple[Any, Any]:
        """Return bounds of an array's entries for the queries of each tile: a minimum and a maximum.

        The bounds are exact for entries that ascend or descend; others may get wider bounds. See
        `Pairs.at_query` for the arguments.
        """
        return self._bounds(array, self.first_query, self.last_query, per_head)

    def at_keys(self, array: Any, *, per_head: bool = False) -> tuple[Any, Any]:
        """Return bounds of an array's entries for the keys of each tile; see `at_queries`."""
        return self._bounds(array, self.first_key, self.last_key, per_head)

    def at_row(self, array: Any, *, per_head: bool = False) -> Any:
        """Return the entry of an array for the request of each tile; see `Pairs.at_row`."""
        return entry(array, self.row, self.head if per_head else None, None)

    def _bounds(self, array: Any, first: Any, last: Any, per_head: bool) -> tuple[Any, Any]:
        """Return bounds of the entries from `first` to `last`.

        Rows are cut into pieces of the tile's size, and the running minimum and maximum from the start and
        from the end of each piece are computed. If a range spans two pieces, combining both sides is exact.
        If it lies in one piece, both sides are bounds and the tighter one is returned.
        """
        array, size = jnp.asarray(array), max(self.size)
        array = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
        num_positions = array.shape[-1]
        pad_widths = [(0, 0)] * (array.ndim - 1) + [(0, -num_positions % size)]
        pieces = jnp.pad(array, pad_widths, mode="edge").reshape(*array.shape[:-1], -1, size)
        first, last = (jnp.clip(position, 0, num_positions - 1) for position in (first, last))
        is_one_piece = quotient(first, size) == quotient(last, size)

        def bound(running: Any, wider: Any, tighter: Any) -> Any:
            before, after = (
                entry(
                    running(pieces, pieces.ndim - 1, reverse=reverse).reshape(*array.shape[:-1], -1),
                    self.row,
                    self.head if per_head else None,
                    position,
                )
                for reverse, position in ((False, last), (True, first))
            )
            return jnp.where(is_one_piece, tighter(before, after), wider(before, after))

        low = bound(jax.lax.cummin, jnp.minimum, jnp.maximum)
        return low, bound(jax.lax.cummax, jnp.maximum, jnp.minimum)


class Coverage(NamedTuple):
    """Which tiles a mask leaves EMPTY (no pair is visible), PARTIAL, or FULL (all pairs are visible).

    A tile is EMPTY if `any_visible` is False, FULL if `all_visible` is True, and PARTIAL otherwise. A mask
    may report a tile as PARTIAL that is EMPTY or FULL: that costs time, not correctness. Single masks are
    exact, except VerticalSlash and Document with descending ids; masks composed with & and | may not be.

    Attributes:
        any_visible: Whether any pair of a tile may be visible.
        all_visible: Whether all pairs of a tile are known to be visible.
    """

    any_visible: Any
    all_visible: Any


def coverage_of_ids(query_ids: tuple[Any, Any], key_ids: tuple[Any, Any]) -> Coverage:
    """Return the coverage of tiles whose visible pairs have equal ids, from the lowest and highest ids."""
    (low_q, high_q), (low_k, high_k) = query_ids, key_ids
    any_visible = (low_q <= high_k) & (low_k <= high_q)
    return Coverage(any_visible, (low_q == high_q) & (low_k == high_k) & (low_q == low_k))


class BatchSizes(NamedTuple):
    """The static sizes of a batch that a mask must fit; None = unknown.

    Attributes:
        num_q_heads: Number of query heads on this device.
        num_rows: Number of rows of the batch metadata.
        max_query_len: Maximum number of queries per request.
        max_seq_len: Maximum number of keys per request, which also bounds the positions of its queries.
        max_query_end: Maximum position of a query plus one, if it differs from `max_seq_len`.
        query_ends: Function that returns, for each row, the position of its last query plus one; 0 for a row
            without queries.
    """

    num_q_heads: int
    num_rows: int | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    max_query_end: int | None = None
    query_ends: Callable[[], np.ndarray] | None = None


def entry(array: Any, row: Any, head: Any, position: Any) -> Any:
    """Return the entry of an array, with clamped row and position.

    Args:
        array: Array with an optional leading axis of requests, then axes of heads and of positions.
        row: Row of the batch.
        head: Query head; None if the array has no such axis.
        position: Position in the request; None if the array has no such axis.
    """
    array, index = jnp.asarray(array), () if head is None else (head,)
    if position is not None:
        index = (*index, jnp.clip(position, 0, array.shape[-1] - 1))
    if array.ndim > len(index):
        index = (jnp.minimum(row, array.shape[0] - 1), *index)
    return array[index]


def quotient(x: Any, size: int) -> Any:
    """Return `x // size` for x >= 0; unlike `//` it lowers in kernels, too."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """Return `x % size` for x >= 0; unlike `%` it lowers in kernels, too."""
    return jax.lax.rem(x, jnp.full_like(x, size))
