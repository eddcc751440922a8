"""VerticalSlash in two parts: columns whose keys are gathered, side by side, and all else where it stands."""

import math
from typing import Any, ClassVar, NamedTuple, override

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jattn.masks.base import Mask
from jattn.masks.pairs import Coverage, Pairs, Tiles
from jattn.masks.traced import VerticalSlash, line_of, lines_of, marks_in, num_marks
from jattn.pytree import pytree

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
    def sees(self, pairs: Pairs) -> Any:
        is_in = pairs.key < self.places.shape[-1]
        return is_in & (self._place(pairs.row, pairs.head, pairs.key) <= pairs.query)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        num_keys = self.places.shape[-1]  # behind them stand the next request's
        first, last = (self._place(tiles.row, tiles.head, key) for key in (tiles.first_key, tiles.last_key))
        some = (tiles.first_key < num_keys) & (first <= tiles.last_query)
        return Coverage(some, (tiles.last_key < num_keys) & (last <= tiles.first_query))


@pytree
class Ungathered(VerticalSlash):
    """What is left of a VerticalSlash: slashes except at gathered keys, and columns that are not gathered.

    Attributes:
        gathered: Which keys are gathered; shaped as columns.
    """

    gathered: Bool[Array, "*reqs q_heads positions"]
    row_axes: ClassVar[dict[str, int]] = {**VerticalSlash.row_axes, "gathered": 3}

    @override
    def sees(self, pairs: Pairs) -> Any:
        by_slash = marks_in(self.slashes, pairs, pairs.query - pairs.key)
        return marks_in(self.columns, pairs, pairs.key) | (
            by_slash & ~marks_in(self.gathered, pairs, pairs.key)
        )

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        some, every = super().coverage(tiles)
        return Coverage(some, every & (num_marks(self.gathered, tiles, tiles.first_key, tiles.last_key) == 0))


class InParts(NamedTuple):
    """A VerticalSlash under causality: a query sees a key in just one of the two."""

    columns: GatheredColumns
    rest: Ungathered


def in_parts(mask: VerticalSlash) -> InParts:
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
    rest = Ungathered(columns=marks & ~gathered, slashes=jnp.asarray(mask.slashes), gathered=gathered)
    return InParts(columns, rest)
