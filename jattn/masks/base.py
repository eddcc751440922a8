"""What a mask is: which pairs of a query and a key see each other, and how much of a tile of pairs does."""

import abc
import dataclasses
import functools
import operator
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jattn.pytree import pytree, static
from pallas_kernels.checks import require


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
    axis = lambda start, stop, shape: jnp.arange(start, stop, dtype=jnp.int32).reshape(shape)
    pairs = Pairs(
        head=axis(0, num_q_heads, (-1, 1, 1)),
        row=jnp.full((1, 1, 1), row, jnp.int32),
        query=axis(seq_len - query_len, seq_len, (1, -1, 1)),
        key=axis(0, seq_len, (1, 1, -1)),
        num_heads=(num_q_heads, num_kv_heads or num_q_heads),
        is_prefill=is_prefill,
    )
    return jnp.broadcast_to(mask.sees(pairs), (num_q_heads, query_len, seq_len))


def density(mask: Mask, query_len: int, seq_len: int, *, num_q_heads: int = 1, **options: Any) -> float:
    """The share that the mask has of the pairs that causality allows; options are dense's."""
    seen = dense(mask, query_len, seq_len, num_q_heads=num_q_heads, **options)
    causal = jnp.tri(query_len, seq_len, seq_len - query_len, dtype=bool)[None]
    return float((seen & causal).sum() / (causal.sum() * num_q_heads))
