"""Masks of positions: visibility depends on the positions of the query and the key in the request."""

import dataclasses
import numbers
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.masks.base import Mask
from jattn.masks.checks import MAX_INT, normalize_ints, require_array
from jattn.masks.in_kernel import Formula, KernelTiling
from jattn.masks.pairs import Coverage, Pairs, Tiles, coverage_of_ids, floor_div, quotient, remainder
from jattn.pytree import pytree
from pallas_kernels.checks import require
from pallas_kernels.shared import normalize_window_side
from pallas_kernels.varlen_prefill import KernelMask, PrefixWords, WindowWords


def distances(tiles: Tiles) -> tuple[Any, Any]:
    """Return the smallest and largest `query - key` of each tile; every distance between them occurs."""
    return tiles.first_query - tiles.last_key, tiles.last_query - tiles.first_key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Keys up to and including the query's own position."""

    @property
    @override
    def is_causal(self) -> bool:
        return True

    @property
    @override
    def allows_all_past_keys(self) -> bool:
        return True

    @override
    def key_range(self, query: Any) -> tuple[Any, Any]:
        return None, query + 1

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return WindowWords(left=None, right=0)

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
    """Keys at most `left` positions before and `right` positions after the query.

    Attributes:
        left: Number of visible earlier keys, not counting the query's own; None = unlimited.
        right: Number of visible later keys; None = unlimited.
    """

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

    @property
    @override
    def skips_most_tiles(self) -> bool:
        return self.left is not None

    @override
    def key_range(self, query: Any) -> tuple[Any, Any]:
        right = normalize_window_side(self.right)
        low = None if self.left is None else jnp.maximum(query - self.left, 0)
        return low, None if right is None else query + (right + 1)

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return Formula.of(self, tiling) if self == Window() else WindowWords(left=self.left, right=self.right)

    @override
    def visible(self, pairs: Pairs) -> Any:
        offset = pairs.key - pairs.query
        visible = offset == offset
        if self.left is not None:
            visible = visible & (offset >= -self.left)
        if self.right is not None:
            visible = visible & (offset <= self.right)
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
    """The first `num` keys of the request: StreamingLLM's attention sinks.

    Not to be confused with the learned scores of `attend(sinks=)`.
    """

    num: int

    def __post_init__(self) -> None:
        normalize_ints(self, 1, "num")

    skips_most_tiles = True
    has_common_keys = True

    @override
    def visible(self, pairs: Pairs) -> Any:
        return pairs.key < self.num

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return Coverage(tiles.first_key < self.num, tiles.last_key < self.num)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Keys in the query's chunk of `size` positions: Llama 4's chunked local attention."""

    size: int

    def __post_init__(self) -> None:
        normalize_ints(self, 1, "size")

    skips_most_tiles = True

    @override
    def key_range(self, query: Any) -> tuple[Any, Any]:
        first = quotient(query, self.size) * self.size
        return first, first + self.size

    @override
    def visible(self, pairs: Pairs) -> Any:
        return quotient(pairs.key, self.size) == floor_div(pairs.query, self.size)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first_q, last_q = (floor_div(x, self.size) for x in (tiles.first_query, tiles.last_query))
        first_k, last_k = (quotient(x, self.size) for x in (tiles.first_key, tiles.last_key))
        return coverage_of_ids((first_q, last_q), (first_k, last_k))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """The query's own key and `num` keys on each side of it, `step` positions apart.

    Source: Longformer's dilated sliding window.
    """

    num: int
    step: int

    def __post_init__(self) -> None:
        normalize_ints(self, 0, "num")
        normalize_ints(self, 1, "step")
        max_distance = self.num * self.step
        require(max_distance <= MAX_INT, "num * step", f"be at most {MAX_INT}", max_distance)

    @override
    def visible(self, pairs: Pairs) -> Any:
        distance = jnp.abs(pairs.query - pairs.key)
        return (remainder(distance, self.step) == 0) & (distance <= self.num * self.step)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        max_distance = self.num * self.step
        nearest, farthest = distances(tiles)
        low, high = jnp.maximum(nearest, -max_distance), jnp.minimum(farthest, max_distance)

        def round_down(x: Any) -> Any:
            # Shifting by max_distance, to avoid negative numbers, could overflow int32.
            return jnp.where(x < 0, quotient(x + 1, self.step) - 1, quotient(x, self.step))

        num_visible = jnp.where(low <= high, round_down(high) - round_down(low - 1), 0)
        return Coverage(num_visible > 0, num_visible == farthest - nearest + 1)


@pytree
class Prefix(Mask):
    """Bidirectional attention among the first `length` tokens of a request.

    A prefix LM is `Causal() | Prefix(length=n)` with `AttentionSpec(causal=False)`. If a prompt is computed
    in chunks, the first chunk should contain the complete prefix: keys that are not cached yet are not
    visible.

    Attributes:
        length: Number of prefix tokens: an int or [] for all requests, or [reqs].
    """

    length: Int[Array, "*reqs"] | Int[np.ndarray, "*reqs"] | int | np.integer
    row_axes: ClassVar[dict[str, int]] = {"length": 1}

    def __post_init__(self) -> None:
        if isinstance(self.length, numbers.Integral) and not isinstance(self.length, bool):
            object.__setattr__(self, "length", np.asarray(self.length))
        require_array("length", self.length, "integer", {0: "[]", 1: "[reqs]"})
        if isinstance(self.length, np.ndarray):  # JAX would truncate larger values to 32 bits.
            fits_int32 = all(abs(int(length)) <= MAX_INT for length in self.length.ravel())
            require(fits_int32, "length", "fit int32", self.length)
            object.__setattr__(self, "length", self.length.astype(np.int32))

    @property
    @override
    def allows_future_keys(self) -> bool:
        return True

    @override
    def visible(self, pairs: Pairs) -> Any:
        return jnp.maximum(pairs.query, pairs.key) < pairs.at_row(self.length)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        length = tiles.at_row(self.length)
        any_visible = jnp.maximum(tiles.first_query, tiles.first_key) < length
        return Coverage(any_visible, jnp.maximum(tiles.last_query, tiles.last_key) < length)

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return PrefixWords(lengths=jnp.atleast_1d(jnp.asarray(self.length)).astype(jnp.int32))
