"""Document masks: queries attend to the keys of their own document, given by an id per position."""

from collections.abc import Callable
from typing import Any, ClassVar, override

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jattn.masks.base import And, Mask, Not, Or
from jattn.masks.checks import require_array
from jattn.masks.pairs import Coverage, Pairs, Tiles, quotient
from jattn.pytree import pytree
from pallas_kernels import support
from pallas_kernels.checks import require


def entry(table: Any, row: Any, position: Any) -> Any:
    """Return `table[row, position]`, or `table[position]` for all rows; positions are clamped."""
    table = jnp.asarray(table)
    position = jnp.clip(position, 0, table.shape[-1] - 1)
    if table.ndim == 1:
        return table[position]
    return table[jnp.minimum(row, table.shape[0] - 1), position]


def as_int32(ids: Any) -> Any:
    """Return host ids as int32. Ids that do not fit are renumbered, which preserves their order."""
    if not isinstance(ids, np.ndarray) or ids.dtype.itemsize <= 4:
        return ids
    bounds = np.iinfo(np.int32)
    if ids.size and (int(ids.min()) < bounds.min or int(ids.max()) > bounds.max):
        ids = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    return ids.astype(np.int32)


@pytree
class Document(Mask):
    """Keys of the query's own document, in requests that concatenate several documents.

    Positions with equal ids attend to each other, wherever they are. The kernels treat each run of equal ids
    as a separate document, so masks in which an id occurs in several runs are computed by XLA. Traced ids
    cannot be inspected: inside jit, use implementation "xla" or "reference" if an id may recur.

    Attributes:
        ids: Document id of each position, [positions] for all requests or [reqs, positions]. Ids may be in
            any order, and padding may have any id, such as 0 or -1. Positions past the end have the last id.
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
        """Return coverage from the range of ids in each tile: exact for ascending ids, else conservative."""
        bounds = _id_range_function(self.ids, max(tiles.size))
        low_q, high_q = bounds(tiles.row, tiles.first_query, tiles.last_query)
        low_k, high_k = bounds(tiles.row, tiles.first_key, tiles.last_key)
        any_visible = (low_q <= high_k) & (low_k <= high_q)
        return Coverage(any_visible, (low_q == high_q) & (low_k == high_k) & (low_q == low_k))


@pytree
class DocumentRuns(Document):
    """A Document mask whose ids never decrease, so that the ids at a tile's ends bound those between."""

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first_q, last_q = (entry(self.ids, tiles.row, x) for x in (tiles.first_query, tiles.last_query))
        first_k, last_k = (entry(self.ids, tiles.row, x) for x in (tiles.first_key, tiles.last_key))
        any_visible = (first_q <= last_k) & (first_k <= last_q)
        return Coverage(any_visible, (first_q == last_q) & (first_k == last_k) & (first_q == first_k))


def document_runs(ids: Int[Array, "*reqs positions"]) -> DocumentRuns:
    """Return a mask whose documents are the runs of equal ids, numbered from 0."""
    is_first = ids[..., 1:] != ids[..., :-1]
    pad_widths = [(0, 0)] * (ids.ndim - 1) + [(1, 0)]
    return DocumentRuns(ids=jnp.pad(jnp.cumsum(is_first, axis=-1, dtype=jnp.int32), pad_widths))


def documents_to_runs(mask: Mask) -> Mask:
    """Return the mask with each run of equal ids as a separate document, as the kernels compute it."""
    if isinstance(mask, And | Or | Not):
        return type(mask)(masks=tuple(map(documents_to_runs, mask.masks)))
    if isinstance(mask, Document) and not isinstance(mask, DocumentRuns):
        return document_runs(jnp.asarray(mask.ids))
    return mask


def has_contiguous_ids(ids: Any) -> bool:
    """Return whether equal ids are contiguous in each row; True for traced ids."""
    if not support.is_concrete(ids):
        return True
    ids = np.atleast_2d(np.asarray(ids))
    if (ids[:, 1:] >= ids[:, :-1]).all():
        return True
    num_runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(axis=1)
    return all(len(np.unique(row)) == runs for row, runs in zip(ids, num_runs, strict=True))


def _id_range_function(ids: Any, size: int) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Return a function `id_range(row, first, last)` that bounds the ids from first to last inclusive.

    Rows are cut into pieces of `size`, and the running minimum and maximum from the start and from the end of
    each piece are precomputed. A range has at most `size` positions. If it spans two pieces, combining both
    sides is exact. If it lies in one piece, both sides are bounds and the tighter one is returned, which is
    exact for ids that ascend or descend.
    """
    ids = jnp.asarray(ids)
    num_positions = ids.shape[-1]
    pad_widths = [(0, 0)] * (ids.ndim - 1) + [(0, -num_positions % size)]
    pieces = jnp.pad(ids, pad_widths, mode="edge").reshape(*ids.shape[:-1], -1, size)

    def running(extreme: Callable[..., Array], *, reverse: bool) -> Array:
        return extreme(pieces, pieces.ndim - 1, reverse=reverse).reshape(*ids.shape[:-1], -1)

    min_before, min_after = (running(lax.cummin, reverse=reverse) for reverse in (False, True))
    max_before, max_after = (running(lax.cummax, reverse=reverse) for reverse in (False, True))

    def id_range(row: Any, first: Any, last: Any) -> tuple[Any, Any]:
        first, last = (jnp.clip(position, 0, num_positions - 1) for position in (first, last))
        is_one_piece = quotient(first, size) == quotient(last, size)
        low_before, low_after = entry(min_before, row, last), entry(min_after, row, first)
        high_before, high_after = entry(max_before, row, last), entry(max_after, row, first)
        low = jnp.where(is_one_piece, jnp.maximum(low_before, low_after), jnp.minimum(low_before, low_after))
        high = jnp.where(
            is_one_piece, jnp.minimum(high_before, high_after), jnp.maximum(high_before, high_after)
        )
        return low, high

    return id_range
