"""What masks are asked: of pairs of a query and a key, of tiles of these, and of a step's sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared import floor_div as floor_div


class Pairs(NamedTuple):
    """Pairs of a query and a key: int32 arrays that broadcast against each other, or scalars.

    Attributes:
        head: Query head of this device.
        row: Row of the batch: which request. Masks of positions alone do not look at it.
        query: Position of the query in its request: before 0 where there are more queries than keys, in
            block -1 of a pattern and those before it.
        key: Position of the key.
        num_heads: Static: query heads and kv heads of this device.
        is_prefill: Static: whether the queries stand in the prefill region.
    """

    head: Any
    row: Any
    query: Any
    key: Any
    num_heads: tuple[int, int]
    is_prefill: bool = True


class Tiles(NamedTuple):
    """Tiles of pairs: every query from first_query to last_query with every key from first_key to last_key.

    Both ends included; a tile has at least one pair. Other attributes are those of Pairs.

    Attributes:
        head: As Pairs.head.
        row: As Pairs.row.
        first_query: Position of the first query.
        last_query: Position of the last query.
        first_key: Position of the first key.
        last_key: Position of the last key.
        num_heads: Static: query heads and kv heads of this device.
        size: Static: queries and keys of the largest tile.
        is_prefill: Static: whether the queries stand in the prefill region.
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
    """How much of each tile is visible: `any_visible` is False if no pair is, `all_visible` True if all are.

    A tile is EMPTY if not `any_visible`, FULL if `all_visible`, and PARTIAL otherwise. Both fields may err on
    the side of PARTIAL, which costs time but not correctness.
    """

    any_visible: Any
    all_visible: Any


class BatchSizes(NamedTuple):
    """What is static of a step that a mask meets.

    Attributes:
        num_q_heads: Query heads of this device.
        num_rows: Rows of the step's metadata; None = unknown.
        max_query_len: Bound of a request's queries; None = unknown.
        max_seq_len: Bound of its keys, and so of the positions of queries; None = unknown.
        max_query_end: Bound of the positions of queries where that is another; None = it is not.
        query_ends: Reads one past the position of each row's last query, 0 of a row without; None = unknown.
    """

    num_q_heads: int
    num_rows: int | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    max_query_end: int | None = None
    query_ends: Callable[[], np.ndarray] | None = None


def quotient(x: Any, size: int) -> Any:
    """`x // size` for x >= 0."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """`x % size` for x >= 0."""
    return jax.lax.rem(x, jnp.full_like(x, size))
