"""Masks of positions: what a query sees depends on where it and the key stand in the request."""

import dataclasses
import numbers
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.masks.base import Mask
from jattn.masks.checks import MAX_INT, normalize_ints, require_array
from jattn.masks.pairs import Coverage, Pairs, Tiles, floor_div, quotient, remainder
from jattn.pytree import pytree
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
    def allows_all_past_keys(self) -> bool:
        return True

    @override
    def visible(self, pairs: Pairs) -> Any:
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
                normalize_ints(self, 0, name)

    @property
    @override
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    @override
    def allows_all_past_keys(self) -> bool:
        return self.left is None

    @property
    @override
    def allows_future_keys(self) -> bool:
        return bool(self.right)

    @override
    def visible(self, pairs: Pairs) -> Any:
        ahead = pairs.key - pairs.query
        visible = ahead == ahead
        if self.left is not None:
            visible = visible & (ahead >= -self.left)
        if self.right is not None:
            visible = visible & (ahead <= self.right)
        return visible

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        nearest, farthest = distances(tiles)
        any_visible = all_visible = nearest == nearest
        if self.left is not None:
            any_visible, all_visible = (
                any_visible & (nearest <= self.left),
                all_visible & (farthest <= self.left),
            )
        if self.right is not None:
            any_visible, all_visible = (
                any_visible & (farthest >= -self.right),
                all_visible & (nearest >= -self.right),
            )
        return Coverage(any_visible, all_visible)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sinks(Mask):
    """The request's first `num` keys: StreamingLLM's attention sinks, not the scores of `attend(sinks=)`."""

    num: int

    def __post_init__(self) -> None:
        normalize_ints(self, 1, "num")

    @override
    def visible(self, pairs: Pairs) -> Any:
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
        normalize_ints(self, 1, "size")

    @override
    def visible(self, pairs: Pairs) -> Any:
        return quotient(pairs.key, self.size) == floor_div(pairs.query, self.size)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first_q, last_q = (floor_div(x, self.size) for x in (tiles.first_query, tiles.last_query))
        first_k, last_k = (quotient(x, self.size) for x in (tiles.first_key, tiles.last_key))
        any_visible = (first_q <= last_k) & (first_k <= last_q)
        return Coverage(any_visible, (first_q == last_q) & (first_k == last_k) & (first_q == first_k))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """The query's own position and, on each side, the next `num` positions at multiples of `step`.

    Source: Longformer's dilated sliding window.
    """

    num: int
    step: int

    def __post_init__(self) -> None:
        normalize_ints(self, 0, "num")
        normalize_ints(self, 1, "step")
        rule = f"be at most {MAX_INT}, the last position that there may be"
        reach = self.num * self.step
        require(reach <= MAX_INT, "num * step", rule, reach)

    @override
    def visible(self, pairs: Pairs) -> Any:
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


@pytree
class Prefix(Mask):
    """The first `length` tokens of a request see each other, later ones too: no mask for causal attention.

    A prefix LM is `Causal() | Prefix(length=n)` with `AttentionSpec(causal=False)`. Where a prompt is
    computed in chunks, the first should have the whole prefix: what is not in the cache yet is not seen.

    Attributes:
        length: Of every request, an int or [], or of each [reqs].
    """

    length: Int[Array, "*reqs"] | Int[np.ndarray, "*reqs"] | int | np.integer
    row_axes: ClassVar[dict[str, int]] = {"length": 1}

    def __post_init__(self) -> None:
        if isinstance(self.length, numbers.Integral) and not isinstance(self.length, bool):
            object.__setattr__(self, "length", np.asarray(self.length))
        require_array("length", self.length, "integer", {0: "[]", 1: "[reqs]"})
        if isinstance(self.length, np.ndarray):  # JAX would take the low 32 bits of more
            length = self.length.ravel()
            require(all(abs(int(one)) <= MAX_INT for one in length), "length", "hold int32s", self.length)
            object.__setattr__(self, "length", self.length.astype(np.int32))

    @property
    @override
    def allows_future_keys(self) -> bool:
        return True

    def _length(self, row: Any) -> Any:
        lengths = jnp.asarray(self.length)
        return lengths if lengths.ndim == 0 else lengths[jnp.minimum(row, lengths.shape[0] - 1)]

    @override
    def visible(self, pairs: Pairs) -> Any:
        return jnp.maximum(pairs.query, pairs.key) < self._length(pairs.row)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        length = self._length(tiles.row)
        any_visible = jnp.maximum(tiles.first_query, tiles.first_key) < length
        return Coverage(any_visible, jnp.maximum(tiles.last_query, tiles.last_key) < length)
