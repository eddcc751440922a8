"""Masks of positions: what a query sees depends on where it and the key stand in the request."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks.arguments import MAX_INT, set_ints
from jattn.masks.base import Mask
from jattn.masks.integers import block_of, quotient, remainder
from jattn.masks.pairs import Coverage, Pairs, Tiles
from pallas_kernels.checks import require


def distances(tiles: Tiles) -> tuple[Any, Any]:
    """Smallest and largest `query - key` of a tile; every distance between them occurs."""
    return tiles.first_query - tiles.last_key, tiles.last_query - tiles.first_key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query's own position."""

    @property
    @override
    def is_causal(self) -> bool:
        return True

    @property
    @override
    def sees_all_before(self) -> bool:
        return True

    @override
    def sees(self, pairs: Pairs) -> Any:
        return pairs.key <= pairs.query

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        nearest, farthest = distances(tiles)
        return Coverage(farthest >= 0, nearest >= 0)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Keys at most `left` before the query and `right` behind it; None = unlimited."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, width in (("left", self.left), ("right", self.right)):
            if width is not None:
                set_ints(self, 0, name)

    @property
    @override
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    @override
    def sees_all_before(self) -> bool:
        return self.left is None

    @property
    @override
    def sees_ahead(self) -> bool:
        return bool(self.right)

    @override
    def sees(self, pairs: Pairs) -> Any:
        ahead = pairs.key - pairs.query
        sees = ahead == ahead
        if self.left is not None:
            sees = sees & (ahead >= -self.left)
        if self.right is not None:
            sees = sees & (ahead <= self.right)
        return sees

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        nearest, farthest = distances(tiles)
        some = every = nearest == nearest
        if self.left is not None:
            some, every = some & (nearest <= self.left), every & (farthest <= self.left)
        if self.right is not None:
            some, every = some & (farthest >= -self.right), every & (nearest >= -self.right)
        return Coverage(some, every)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sinks(Mask):
    """The request's first `num` keys: StreamingLLM's attention sinks, not the scores of `attend(sinks=)`."""

    num: int

    def __post_init__(self) -> None:
        set_ints(self, 1, "num")

    @override
    def sees(self, pairs: Pairs) -> Any:
        return pairs.key < self.num

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return Coverage(tiles.first_key < self.num, tiles.last_key < self.num)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Keys of the query's own chunk of `size` positions: Llama 4's chunked-local attention."""

    size: int

    def __post_init__(self) -> None:
        set_ints(self, 1, "size")

    @override
    def sees(self, pairs: Pairs) -> Any:
        return quotient(pairs.key, self.size) == block_of(pairs.query, self.size)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first_q, last_q = (block_of(x, self.size) for x in (tiles.first_query, tiles.last_query))
        first_k, last_k = (quotient(x, self.size) for x in (tiles.first_key, tiles.last_key))
        some = (first_q <= last_k) & (first_k <= last_q)
        return Coverage(some, (first_q == last_q) & (first_k == last_k) & (first_q == first_k))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """The query's own position and, on each side, the next `num` positions at multiples of `step`.

    Source: Longformer's dilated sliding window.
    """

    num: int
    step: int

    def __post_init__(self) -> None:
        set_ints(self, 0, "num")
        set_ints(self, 1, "step")
        rule = f"be at most {MAX_INT}, the last position that there may be"
        reach = self.num * self.step
        require(reach <= MAX_INT, "num * step", rule, reach)

    @override
    def sees(self, pairs: Pairs) -> Any:
        distance = jnp.abs(pairs.query - pairs.key)
        return (remainder(distance, self.step) == 0) & (distance <= self.num * self.step)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        reach = self.num * self.step
        nearest, farthest = distances(tiles)
        low, high = jnp.maximum(nearest, -reach), jnp.minimum(farthest, reach)
        # Rounded down, negative ones too; shifted by the reach they might not fit 32 bits.
        below = lambda x: jnp.where(x < 0, quotient(x + 1, self.step) - 1, quotient(x, self.step))
        num_seen = jnp.where(low <= high, below(high) - below(low - 1), 0)
        return Coverage(num_seen > 0, num_seen == farthest - nearest + 1)


@contextlib.contextmanager
def elementwise() -> Iterator[None]:
    """Where a mask's function is traced: ValueError where it asks an array whether it is true."""
    try:
        yield
    except jax.errors.TracerBoolConversionError as error:
        rule = "be elementwise: & for and, | for or, ~ for not, jnp.where for if"
        raise ValueError(f"function must {rule}, got one that asks an array whether it is true.") from error


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MaskFunction(Mask):
    """`function(head, query, key) -> bool`, elementwise, of int32 arrays that broadcast; hashed by identity.

    Its schedule takes a look at every pair. `query` and `key` are positions; arrays that the function closes
    over are constants of what is compiled, and with some there is no kernel. What it returns is an array of
    bool, or True or False of all.
    """

    function: Callable[[Any, Any, Any], Any]

    def __post_init__(self) -> None:
        is_function = callable(self.function)
        require(is_function, "function", "be a function of head, query and key", repr(self.function))
        try:
            taken = inspect.signature(self.function)
        except ValueError:  # of some that are not written in Python nobody knows
            return
        try:
            taken.bind(None, None, None)
        except TypeError:
            rule = "take three arguments: head, query and key"
            raise ValueError(f"function must {rule}, got one of {taken}.") from None

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, 1

    def _says(self, head: Any, query: Any, key: Any) -> Any:
        """What the function returns: of other numbers than bool & and ~ would take the bits."""
        with elementwise():
            said = self.function(head, query, key)
        said = np.bool_(said) if isinstance(said, bool) else said  # Python's ~True is -2
        dtype = getattr(said, "dtype", type(said).__name__)
        require(dtype == jnp.bool_, "function", "return bool, as comparisons do", dtype)
        return said

    @override
    def sees(self, pairs: Pairs) -> Any:
        return self._says(pairs.head, pairs.query, pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        def every_pair(of: Callable[[Any, Any], Any]) -> Any:
            """`of(sees, is_in_tile)` over each tile's pairs, which get two more axes."""
            wide = lambda x: jnp.asarray(x)[..., None, None]
            query = wide(tiles.first_query) + jnp.arange(tiles.size[0], dtype=jnp.int32)[:, None].reshape(
                *[1] * jnp.ndim(tiles.first_query), -1, 1
            )
            key = wide(tiles.first_key) + jnp.arange(tiles.size[1], dtype=jnp.int32).reshape(
                *[1] * jnp.ndim(tiles.first_key), 1, -1
            )
            is_in = (query <= wide(tiles.last_query)) & (key <= wide(tiles.last_key))
            return of(self._says(wide(tiles.head), query, key), is_in)

        some = every_pair(lambda sees, is_in: sees & is_in).any(axis=(-2, -1))
        every = every_pair(lambda sees, is_in: sees | ~is_in).all(axis=(-2, -1))
        return Coverage(some, every)
