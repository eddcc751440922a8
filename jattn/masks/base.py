"""What a mask is: which pairs of a query and a key see each other, and how much of a tile of pairs does."""

import abc
import dataclasses
import functools
import operator
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jattn.pytree import pytree, static
from pallas_kernels.checks import require

GOLDEN_RATIO = 0.6180339887


class Pairs(NamedTuple):
    """Pairs of a query and a key: int32 arrays that broadcast against each other, or scalars.

    Attributes:
        head: Query head of this device.
        row: Row of the batch: which request. Masks of positions alone do not look at it.
        query: Position of the query in its request.
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
    """How much of each tile is seen: `some` False = no pair, `every` True = all pairs.

    `some` may be True where no pair is seen and `every` False where all are: that costs time, no more.
    Masks by themselves are exact (but VerticalSlash); compositions with & and | may err that way.
    """

    some: Any
    every: Any


class Mask(abc.ABC):
    """Which keys a query sees. Compose with & and |."""

    @abc.abstractmethod
    def sees(self, pairs: Pairs) -> Any:
        """Bool, of the shape that the pairs broadcast to (or one that broadcasts to it)."""

    @abc.abstractmethod
    def coverage(self, tiles: Tiles) -> Coverage:
        """How much of each tile is seen."""

    def __and__(self, other: "Mask") -> "Mask":
        return And(masks=(*_parts(self, And), *_parts(other, And)))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(masks=(*_parts(self, Or), *_parts(other, Or)))

    def of_rows_from(self, first: int) -> "Mask":
        """The mask of a part of the batch that begins at row `first`."""
        return self if first == 0 or self.is_static else RowsFrom(mask=self, first=first)

    @property
    def is_static(self) -> bool:
        """It holds no arrays, so it is hashable and may be a part of a spec."""
        return not jax.tree.leaves(self)


def _parts(mask: Mask, kind: "type[And] | type[Or]") -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, kind) else (mask,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Pairs that every one of `masks` lets see each other."""

    masks: tuple[Mask, ...]

    @override
    def sees(self, pairs: Pairs) -> Any:
        return functools.reduce(operator.and_, (mask.sees(pairs) for mask in self.masks))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        some, every = zip(*(mask.coverage(tiles) for mask in self.masks), strict=True)
        return Coverage(functools.reduce(operator.and_, some), functools.reduce(operator.and_, every))

    @override
    def of_rows_from(self, first: int) -> Mask:
        return And(masks=tuple(mask.of_rows_from(first) for mask in self.masks))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Pairs that at least one of `masks` lets see each other."""

    masks: tuple[Mask, ...]

    @override
    def sees(self, pairs: Pairs) -> Any:
        return functools.reduce(operator.or_, (mask.sees(pairs) for mask in self.masks))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        some, every = zip(*(mask.coverage(tiles) for mask in self.masks), strict=True)
        return Coverage(functools.reduce(operator.or_, some), functools.reduce(operator.or_, every))


@pytree
class RowsFrom(Mask):
    """A mask whose row 0 is `first` of another's."""

    mask: Mask
    first: int = static()

    @override
    def sees(self, pairs: Pairs) -> Any:
        return self.mask.sees(pairs._replace(row=pairs.row + self.first))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return self.mask.coverage(tiles._replace(row=tiles.row + self.first))


def quotient(x: Any, size: int) -> Any:
    """`x // size` for x >= 0, in arrays and in kernels, which have no floor division."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """`x % size` for x >= 0."""
    return jax.lax.rem(x, jnp.full_like(x, size))


def dense(
    mask: Mask,
    query_len: int,
    seq_len: int,
    *,
    num_q_heads: int = 1,
    num_kv_heads: int | None = None,
    row: int = 0,
    is_prefill: bool = True,
) -> Bool[Array, "q_heads queries keys"]:
    """The whole mask of a request whose last `query_len` of `seq_len` tokens are queries. For tests.

    Raises:
        ValueError: There are more queries than keys.
    """
    require(query_len <= seq_len, "query_len", f"be at most seq_len ({seq_len})", query_len)
    queries = jnp.arange(seq_len - query_len, seq_len, dtype=jnp.int32)
    heads = num_q_heads, num_kv_heads or num_q_heads
    return _seen(mask, queries, seq_len, heads, row=row, is_prefill=is_prefill)


def density(
    mask: Mask,
    query_len: int,
    seq_len: int,
    *,
    num_q_heads: int = 1,
    num_kv_heads: int | None = None,
    row: int = 0,
    is_prefill: bool = True,
    max_queries: int = 1024,
) -> float:
    """The share that the mask has of the pairs that causality allows, of a request as dense's.

    Args:
        mask: The mask.
        query_len: Queries of the request, its last tokens.
        seq_len: Its keys.
        num_q_heads: Query heads; all count.
        num_kv_heads: Default as many.
        row: The request's row of the batch.
        is_prefill: Whether its queries stand in the prefill region.
        max_queries: Of more queries so many are looked at, one in each of so many equal parts of them.

    Raises:
        ValueError: There are no queries or more than keys, or max_queries is less than 1.
    """
    is_some = 1 <= query_len <= seq_len
    require(is_some, "query_len", f"be at least 1 and at most seq_len ({seq_len})", query_len)
    require(max_queries >= 1, "max_queries", "be at least 1", max_queries)
    places = np.arange(min(query_len, max_queries))
    if query_len > max_queries:
        # Each at another place in its part, or blocks would be looked at always in the same of their rows.
        places = ((places + places * GOLDEN_RATIO % 1) * (query_len / max_queries)).astype(int)
    queries = jnp.asarray(seq_len - query_len + places, jnp.int32)
    heads = num_q_heads, num_kv_heads or num_q_heads
    seen = _num_seen(mask, queries, jnp.int32(row), seq_len=seq_len, num_heads=heads, is_prefill=is_prefill)
    return float(np.asarray(seen, np.float64).sum() / np.asarray(queries + 1, np.float64).sum() / num_q_heads)


@functools.partial(jax.jit, static_argnames=("seq_len", "num_heads", "is_prefill"))
def _num_seen(
    mask: Mask,
    queries: Int32[Array, " queries"],
    row: Int32[Array, ""],
    *,
    seq_len: int,
    num_heads: tuple[int, int],
    is_prefill: bool,
) -> Int32[Array, " queries"]:
    """How many keys up to its own place each of the queries sees, all heads together."""

    def of_one(query: Array) -> Array:
        seen = _seen(mask, query[None], seq_len, num_heads, row=row, is_prefill=is_prefill)
        return (seen & (jnp.arange(seq_len, dtype=jnp.int32)[None, None] <= query)).sum(dtype=jnp.int32)

    return jax.lax.map(of_one, queries)


def _seen(
    mask: Mask,
    queries: Int32[Array, " queries"],
    seq_len: int,
    num_heads: tuple[int, int],
    *,
    row: int | Int32[Array, ""],
    is_prefill: bool,
) -> Bool[Array, "q_heads queries keys"]:
    """Which of a request's keys the queries at these positions see."""
    pairs = Pairs(
        head=jnp.arange(num_heads[0], dtype=jnp.int32)[:, None, None],
        row=jnp.full((1, 1, 1), row, jnp.int32),
        query=queries[None, :, None],
        key=jnp.arange(seq_len, dtype=jnp.int32)[None, None, :],
        num_heads=num_heads,
        is_prefill=is_prefill,
    )
    return jnp.broadcast_to(mask.sees(pairs), (num_heads[0], queries.shape[0], seq_len))
