"""Masks that hold arrays: pytrees, so that they change from step to step without a recompile."""

import numbers
from typing import Any, ClassVar, override

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn.masks.arguments import require_array
from jattn.masks.base import Coverage, Mask, Pairs, Sizes, Tiles
from jattn.masks.positions import distances
from jattn.pytree import pytree
from pallas_kernels.checks import require


def entry(table: Any, row: Any, position: Any) -> Any:
    """`table[row, position]`, or `table[position]` of a table for all rows; past its end its last entry."""
    table = jnp.asarray(table)
    position = jnp.clip(position, 0, table.shape[-1] - 1)
    if table.ndim == 1:
        return table[position]
    return table[jnp.minimum(row, table.shape[0] - 1), position]


@pytree
class Document(Mask):
    """Keys of the query's own document, where a request is several documents one after the other.

    Attributes:
        ids: Document of each position, for all rows [positions] or for each [reqs, positions]; never
            decreases. Positions past the end belong to the last.
    """

    ids: Int[Array, "*reqs positions"] | Int[np.ndarray, "*reqs positions"]

    row_axes: ClassVar[dict[str, int]] = {"ids": 2}

    def __post_init__(self) -> None:
        axes = {1: "[positions]", 2: "[reqs, positions]"}
        require_array("ids", self.ids, "integer", axes)
        require(self.ids.shape[-1] > 0, "ids", "have at least one position", self.ids.shape)

    @override
    def sees(self, pairs: Pairs) -> Any:
        return entry(self.ids, pairs.row, pairs.query) == entry(self.ids, pairs.row, pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        of = lambda position: entry(self.ids, tiles.row, position)
        first_q, last_q = of(tiles.first_query), of(tiles.last_query)
        first_k, last_k = of(tiles.first_key), of(tiles.last_key)
        some = (first_q <= last_k) & (first_k <= last_q)
        return Coverage(some, (first_q == last_q) & (first_k == last_k) & (first_q == first_k))


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
            object.__setattr__(self, "length", np.asarray(self.length, np.int32))
        require_array("length", self.length, "integer", {0: "[]", 1: "[reqs]"})

    @property
    @override
    def sees_ahead(self) -> bool:
        return True

    def _length(self, row: Any) -> Any:
        lengths = jnp.asarray(self.length)
        return lengths if lengths.ndim == 0 else lengths[jnp.minimum(row, lengths.shape[0] - 1)]

    @override
    def sees(self, pairs: Pairs) -> Any:
        return jnp.maximum(pairs.query, pairs.key) < self._length(pairs.row)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        length = self._length(tiles.row)
        some = jnp.maximum(tiles.first_query, tiles.first_key) < length
        return Coverage(some, jnp.maximum(tiles.last_query, tiles.last_key) < length)


@pytree
class VerticalSlash(Mask):
    """Columns (keys that all queries see) and slashes (distances at which every query sees), for each head.

    Positions and distances past the ends of the arrays have no column and no slash.

    Attributes:
        columns: Whether all queries see the key at a position.
        slashes: Whether a query sees the key so many positions before it.

    Source: MInference's vertical-slash pattern.
    """

    columns: Bool[Array, "q_heads positions"] | Bool[np.ndarray, "q_heads positions"]
    slashes: Bool[Array, "q_heads distances"] | Bool[np.ndarray, "q_heads distances"]
    row_axes: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        require_array("columns", self.columns, "bool", {2: "[q_heads, positions]"})
        require_array("slashes", self.slashes, "bool", {2: "[q_heads, distances]"})
        for name, marks in (("columns", self.columns), ("slashes", self.slashes)):
            require(0 not in marks.shape, name, "have at least one head and one place", marks.shape)

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.columns.shape[0], 1

    @override
    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        self._check_heads(sizes.num_q_heads)

    @classmethod
    def of(cls, columns: Array, slashes: Array, max_seq_len: int) -> "VerticalSlash":
        """From lists [q_heads, n] of positions and of distances; outside [0, max_seq_len) is padding."""

        def marked(places: Array) -> Array:
            places = jnp.where(places < 0, max_seq_len, places)
            heads = jnp.arange(places.shape[0])[:, None]
            return jnp.zeros((places.shape[0], max_seq_len), bool).at[heads, places].set(True, mode="drop")

        return cls(columns=marked(jnp.asarray(columns)), slashes=marked(jnp.asarray(slashes)))

    def _check_heads(self, num_q_heads: int) -> None:
        heads = self.columns.shape[0], self.slashes.shape[0]
        wanted = f"be one for each query head ({num_q_heads})"
        require(heads == (num_q_heads, num_q_heads), "columns' and slashes' rows", wanted, heads)

    @override
    def sees(self, pairs: Pairs) -> Any:
        self._check_heads(pairs.num_heads[0])

        def has(marks: Any, place: Any) -> Any:
            marks = jnp.asarray(marks)
            is_in = (place >= 0) & (place < marks.shape[1])
            return marks[pairs.head, jnp.clip(place, 0, marks.shape[1] - 1)] & is_in

        return has(self.columns, pairs.key) | has(self.slashes, pairs.query - pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        self._check_heads(tiles.num_heads[0])

        def marked(marks: Any, first: Any, last: Any) -> Any:
            """How many marks there are from first to last."""
            marks = jnp.asarray(marks)
            sums = jnp.pad(jnp.cumsum(marks, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
            at = lambda place: sums[tiles.head, jnp.clip(place, 0, marks.shape[1])]
            return at(last + 1) - at(first)

        nearest, farthest = distances(tiles)
        columns = marked(self.columns, tiles.first_key, tiles.last_key)
        slashes = marked(self.slashes, nearest, farthest)
        every = (columns == tiles.last_key - tiles.first_key + 1) | (slashes == farthest - nearest + 1)
        return Coverage((columns > 0) | (slashes > 0), every)
