"""Masks of documents that follow each other in a request, told apart by an id of each position."""

from collections.abc import Callable
from typing import Any, ClassVar, override

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jattn.masks.base import And, Mask, Not, Or, leaves
from jattn.masks.checks import require_array
from jattn.masks.pairs import Coverage, Pairs, Tiles, quotient
from jattn.pytree import pytree
from pallas_kernels import support
from pallas_kernels.checks import require


def entry(table: Any, row: Any, position: Any) -> Any:
    """`table[row, position]`, or `table[position]` of a table for all rows; past its end its last entry."""
    table = jnp.asarray(table)
    position = jnp.clip(position, 0, table.shape[-1] - 1)
    if table.ndim == 1:
        return table[position]
    return table[jnp.minimum(row, table.shape[0] - 1), position]


def as_int32(ids: Any) -> Any:
    """Ids of 64 bits on the host that jax would cut to 32, numbered anew where those do not hold them.

    Equal ones stay equal, and smaller ones smaller.
    """
    if not isinstance(ids, np.ndarray) or ids.dtype.itemsize <= 4:
        return ids
    bounds = np.iinfo(np.int32)
    if ids.size and (int(ids.min()) < bounds.min or int(ids.max()) > bounds.max):
        ids = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    return ids.astype(np.int32)


@pytree
class Document(Mask):
    """Keys of the query's own document, where a request is several documents one after the other.

    Equal ids see each other wherever they stand. The kernels take each run of equal ids for a document of its
    own: masks in which an id comes again behind another one go to XLA. Inside jit nobody can see that one
    does, so there ids that come again are for "xla" and "reference" alone.

    Attributes:
        ids: Document of each position, for all rows [positions] or for each [reqs, positions]; in any order,
            padding of 0 or -1 behind the last one among it. Positions past the end belong to the last.
    """

    ids: Int[Array, "*reqs positions"] | Int[np.ndarray, "*reqs positions"]

    row_axes: ClassVar[dict[str, int]] = {"ids": 2}

    def __post_init__(self) -> None:
        axes = {1: "[positions]", 2: "[reqs, positions]"}
        require_array("ids", self.ids, "integer", axes)
        require(self.ids.shape[-1] > 0, "ids", "have at least one position", self.ids.shape)
        object.__setattr__(self, "ids", as_int32(self.ids))

    @override
    def visible(self, pairs: Pairs) -> Any:
        return entry(self.ids, pairs.row, pairs.query) == entry(self.ids, pairs.row, pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """By bounds of a tile's ids, which say all where ids ascend, and never too little."""
        bounds = _bounds(self.ids, max(tiles.size))
        low_q, high_q = bounds(tiles.row, tiles.first_query, tiles.last_query)
        low_k, high_k = bounds(tiles.row, tiles.first_key, tiles.last_key)
        any_visible = (low_q <= high_k) & (low_k <= high_q)
        return Coverage(any_visible, (low_q == high_q) & (low_k == high_k) & (low_q == low_k))


@pytree
class DocumentRuns(Document):
    """Documents whose ids never decrease, so that those at a tile's ends say which lie between."""

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        of = lambda position: entry(self.ids, tiles.row, position)
        first_q, last_q = of(tiles.first_query), of(tiles.last_query)
        first_k, last_k = of(tiles.first_key), of(tiles.last_key)
        any_visible = (first_q <= last_k) & (first_k <= last_q)
        return Coverage(any_visible, (first_q == last_q) & (first_k == last_k) & (first_q == first_k))


def document_runs(ids: Int[Array, "*reqs positions"]) -> DocumentRuns:
    """The runs of equal ids, numbered from 0, as documents."""
    begins = ids[..., 1:] != ids[..., :-1]
    ends = [(0, 0)] * (ids.ndim - 1) + [(1, 0)]
    return DocumentRuns(ids=jnp.pad(jnp.cumsum(begins, axis=-1, dtype=jnp.int32), ends))


def documents_to_runs(mask: Mask) -> Mask:
    """The mask with each run of equal ids as a document of its own: what the kernels compute."""
    if isinstance(mask, And | Or | Not):
        return type(mask)(masks=tuple(map(documents_to_runs, mask.masks)))
    if isinstance(mask, Document) and not isinstance(mask, DocumentRuns):
        return document_runs(jnp.asarray(mask.ids))
    return mask


def has_contiguous_documents(mask: Mask) -> bool:
    """Whether `documents_to_runs` is the mask itself, as far as can be seen."""
    return all(has_contiguous_ids(leaf.ids) for leaf in leaves(mask) if isinstance(leaf, Document))


def has_contiguous_ids(ids: Any) -> bool:
    """Whether equal ids stand together in each row, as far as can be seen."""
    if not support.is_concrete(ids):
        return True
    ids = np.atleast_2d(np.asarray(ids))
    if (ids[:, 1:] >= ids[:, :-1]).all():
        return True
    num_runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(axis=1)
    return all(len(np.unique(row)) == runs for row, runs in zip(ids, num_runs, strict=True))


def _bounds(ids: Any, size: int) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`of(row, first, last)`: no id between is smaller or larger than what it returns.

    Rows are cut into pieces of `size`, and what is smallest and largest from a piece's begin and to its end
    is written down. From `first` to `last` are `size` positions at most: where they lie in two pieces, that
    is the answer. Where they lie in one, both ways say a bound, and the better one holds: the ids at the ends
    where they ascend or descend.
    """
    ids = jnp.asarray(ids)
    positions = ids.shape[-1]
    spare = [(0, 0)] * (ids.ndim - 1) + [(0, -positions % size)]
    pieces = jnp.pad(ids, spare, mode="edge").reshape(*ids.shape[:-1], -1, size)
    axis = pieces.ndim - 1
    flat = lambda x: x.reshape(*ids.shape[:-1], -1)
    least, most = ([flat(of(pieces, axis, reverse=way)) for way in (False, True)] for of in _EXTREMES)

    def of(row: Any, first: Any, last: Any) -> tuple[Any, Any]:
        first, last = (jnp.clip(place, 0, positions - 1) for place in (first, last))
        is_in_one = quotient(first, size) == quotient(last, size)
        low, low_behind = entry(least[0], row, last), entry(least[1], row, first)
        high, high_behind = entry(most[0], row, last), entry(most[1], row, first)
        smaller, larger = jnp.minimum, jnp.maximum
        lowest = jnp.where(is_in_one, larger(low, low_behind), smaller(low, low_behind))
        return lowest, jnp.where(is_in_one, smaller(high, high_behind), larger(high, high_behind))

    return of


_EXTREMES = (lax.cummin, lax.cummax)
