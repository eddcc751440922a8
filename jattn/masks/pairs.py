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


def quotient(x: Any, size: int) -> Any:
    """Return `x // size` for x >= 0; unlike `//` it lowers in kernels, too."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """Return `x % size` for x >= 0; unlike `%` it lowers in kernels, too."""
    return jax.lax.rem(x, jnp.full_like(x, size))
