"""Masks that hold arrays: pytrees, so that they change from step to step without a recompile."""

import math
from typing import Any, ClassVar, NamedTuple, override

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jattn.masks.base import Mask
from jattn.masks.checks import normalize_ints, require_array, require_ints
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles
from jattn.masks.positions import distances
from jattn.pytree import pytree, static
from pallas_kernels.checks import require, require_bool


@pytree
class VerticalSlash(Mask):
    """Columns (keys that all queries see) and slashes (distances at which every query sees), for each head.

    Positions and distances past the ends of the arrays have no column and no slash.

    Attributes:
        columns: Whether all queries see the key at a position; for all rows, or for each.
        slashes: Whether a query sees the key so many positions before it; likewise.
        num_gathered: Static: kernels gather the keys of so many columns of a head, at most, into tiles of
            their own, where the mask stands alone in a causal layer without window or ALiBi. Quicker where
            columns lie apart: where they stand, each makes a tile of keys be computed. 0 = none.

    Source: MInference's vertical-slash pattern.
    """

    columns: Bool[Array, "*reqs q_heads positions"] | Bool[np.ndarray, "*reqs q_heads positions"]
    slashes: Bool[Array, "*reqs q_heads distances"] | Bool[np.ndarray, "*reqs q_heads distances"]
    num_gathered: int = static(default=0)
    row_axes: ClassVar[dict[str, int]] = {"columns": 3, "slashes": 3}

    def __post_init__(self) -> None:
        for name, what in (("columns", "positions"), ("slashes", "distances")):
            marks, axes = getattr(self, name), f"[q_heads, {what}]"
            require_array(name, marks, "bool", {2: axes, 3: f"[reqs, *{axes}]"})
            require(0 not in marks.shape[-2:], name, "have at least one head and one place", marks.shape)
        rows = self.columns.shape[:-2]
        rule = f"have the rows of columns {rows}"
        require(self.slashes.shape[:-2] == rows, "slashes", rule, self.slashes.shape)
        normalize_ints(self, 0, "num_gathered")

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.columns.shape[-2], 1

    @property
    @override
    def has_exact_num_heads(self) -> bool:
        return True

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        self._check_heads(sizes.num_q_heads)

    @classmethod
    def of(cls, columns: Array, slashes: Array, max_seq_len: int, *, gather: bool = False) -> "VerticalSlash":
        """From lists of positions and of distances; outside [0, max_seq_len) is padding.

        Args:
            columns: [q_heads, n] for all rows, or [reqs, q_heads, n].
            slashes: Likewise.
            max_seq_len: Static: how many positions and distances the mask's arrays have.
            gather: Static: columns lie apart, so that kernels are to gather their keys: `num_gathered`.
        """
        require_ints(1, max_seq_len=max_seq_len)
        require_bool(gather=gather)
        columns, slashes = jnp.asarray(columns), jnp.asarray(slashes)
        axes = {count: f"[{'reqs, ' * (count - 2)}q_heads, places]" for count in (2, 3)}
        require_array("columns", columns, "integer", axes)
        require_array("slashes", slashes, "integer", axes)

        def marked(places: Array) -> Array:
            *heads, count = places.shape
            places = places.astype(jnp.int32)  # in 8 or 16 bits max_seq_len wraps
            places = jnp.where(places < 0, max_seq_len, places).reshape(math.prod(heads), count)
            head = jnp.arange(places.shape[0])[:, None]
            marks = jnp.zeros((places.shape[0], max_seq_len), bool).at[head, places].set(True, mode="drop")
            return marks.reshape(*heads, max_seq_len)

        num_gathered = columns.shape[-1] if gather else 0
        return cls(columns=marked(columns), slashes=marked(slashes), num_gathered=num_gathered)

    def _check_heads(self, num_q_heads: int) -> None:
        heads = self.columns.shape[-2], self.slashes.shape[-2]
        wanted = f"be one for each query head ({num_q_heads})"
        require(heads == (num_q_heads, num_q_heads), "columns' and slashes' heads", wanted, heads)

    @override
    def visible(self, pairs: Pairs) -> Any:
        self._check_heads(pairs.num_heads[0])

        by_column = marks_in(self.columns, pairs, pairs.key)
        return by_column | marks_in(self.slashes, pairs, pairs.query - pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        self._check_heads(tiles.num_heads[0])
        nearest, farthest = distances(tiles)
        columns = num_marks(self.columns, tiles, tiles.first_key, tiles.last_key)
        slashes = num_marks(self.slashes, tiles, nearest, farthest)
        all_visible = (columns == tiles.last_key - tiles.first_key + 1) | (slashes == farthest - nearest + 1)
        return Coverage((columns > 0) | (slashes > 0), all_visible)


def marks_in(marks: Any, pairs: Pairs, place: Any) -> Any:
    """Whether there is a mark at a place, in the line of the pairs' row and head; none lies outside."""
    line, marks = line_of(marks, pairs.row, pairs.head), lines_of(marks)
    is_in = (place >= 0) & (place < marks.shape[1])
    return marks[line, jnp.clip(place, 0, marks.shape[1] - 1)] & is_in


def num_marks(marks: Any, tiles: Tiles, first: Any, last: Any) -> Any:
    """How many marks there are from first to last, in the line of the tiles' row and head."""
    line, marks = line_of(marks, tiles.row, tiles.head), lines_of(marks)
    sums = jnp.pad(jnp.cumsum(marks, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    at = lambda place: sums[line, jnp.clip(place, 0, marks.shape[1])]
    return at(last + 1) - at(first)


def lines_of(marks: Any) -> Array:
    """Marks of heads, or of rows and heads, as [lines, places]."""
    return jnp.asarray(marks).reshape(-1, marks.shape[-1])


def line_of(marks: Any, row: Any, head: Any) -> Any:
    """Which of these lines a row's head has."""
    *rows, heads, _ = marks.shape
    return jnp.minimum(row, rows[0] - 1) * heads + head if rows else head


ALIGN = 128  # keys of the widest tile: gathered keys of a row begin where a tile does
NOWHERE = 2**30  # the place of a gathered key that there is not: behind all queries


@pytree
class GatheredColumns(Mask):
    """Gathered keys as queries see them: the queries that stand at them, and all later ones.

    A pair's key is the number of a gathered key, its query a position as ever.

    Attributes:
        places: Position of each gathered key, ascending; NOWHERE behind the last.
        counts: Of each position how many gathered keys stand there or before.
    """

    places: Int32[Array, "*reqs q_heads gathered"]
    counts: Int32[Array, "*reqs q_heads positions"]
    row_axes: ClassVar[dict[str, int]] = {"places": 3, "counts": 3}

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.places.shape[-2], 1

    def _place(self, row: Any, head: Any, key: Any) -> Any:
        places = lines_of(self.places)
        return places[line_of(self.places, row, head), jnp.minimum(key, places.shape[1] - 1)]

    @override
    def visible(self, pairs: Pairs) -> Any:
        is_in = pairs.key < self.places.shape[-1]
        return is_in & (self._place(pairs.row, pairs.head, pairs.key) <= pairs.query)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        num_keys = self.places.shape[-1]  # behind them stand the next request's
        first, last = (self._place(tiles.row, tiles.head, key) for key in (tiles.first_key, tiles.last_key))
        any_visible = (tiles.first_key < num_keys) & (first <= tiles.last_query)
        return Coverage(any_visible, (tiles.last_key < num_keys) & (last <= tiles.first_query))


@pytree
class UngatheredVerticalSlash(VerticalSlash):
    """What is left of a VerticalSlash: slashes except at gathered keys, and columns that are not gathered.

    Attributes:
        gathered: Which keys are gathered; shaped as columns.
    """

    gathered: Bool[Array, "*reqs q_heads positions"]
    row_axes: ClassVar[dict[str, int]] = {**VerticalSlash.row_axes, "gathered": 3}

    @override
    def visible(self, pairs: Pairs) -> Any:
        by_slash = marks_in(self.slashes, pairs, pairs.query - pairs.key)
        return marks_in(self.columns, pairs, pairs.key) | (
            by_slash & ~marks_in(self.gathered, pairs, pairs.key)
        )

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        any_visible, all_visible = super().coverage(tiles)
        return Coverage(
            any_visible, all_visible & (num_marks(self.gathered, tiles, tiles.first_key, tiles.last_key) == 0)
        )


class VerticalSlashParts(NamedTuple):
    """A VerticalSlash under causality: a query sees a key in just one of the two."""

    columns: GatheredColumns
    rest: UngatheredVerticalSlash


def split_gathered(mask: VerticalSlash) -> VerticalSlashParts:
    """Takes a mask apart whose num_gathered is not 0; columns beyond that stay where they are. Traced."""
    marks = jnp.asarray(mask.columns)
    most = min(mask.num_gathered, marks.shape[-1])
    ranks = jnp.cumsum(marks, axis=-1, dtype=jnp.int32)  # from 1
    gathered = marks & (ranks <= most)
    room = math.ceil(most / ALIGN) * ALIGN
    place = lines_of(jnp.where(gathered, ranks - 1, room))
    line, position = (jnp.arange(size, dtype=jnp.int32) for size in place.shape)
    places = jnp.full((place.shape[0], room), NOWHERE, jnp.int32)
    places = places.at[line[:, None], place].set(position[None], mode="drop")
    columns = GatheredColumns(places=places.reshape(*marks.shape[:-1], room), counts=jnp.minimum(ranks, most))
    rest = UngatheredVerticalSlash(
        columns=marks & ~gathered, slashes=jnp.asarray(mask.slashes), gathered=gathered
    )
    return VerticalSlashParts(columns, rest)
