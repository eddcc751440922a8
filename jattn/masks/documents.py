"""Document masks: queries attend to the keys of their own document, given by an id per position."""

from typing import Any, ClassVar, override

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jattn.masks.base import Mask
from jattn.masks.checks import require_array
from jattn.masks.in_kernel import KernelTiling
from jattn.masks.pairs import Coverage, Pairs, Tiles, coverage_of_ids, entry
from jattn.pytree import pytree
from pallas_kernels import architectures
from pallas_kernels.checks import require
from pallas_kernels.varlen_prefill import MAX_ROWS, KernelMask, Lines, RowRanges

BEFORE_ALL = -(2**30)  # start of the first document: query positions may be negative


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

    skips_most_tiles = True

    @override
    def visible(self, pairs: Pairs) -> Any:
        return pairs.at_query(self.ids) == pairs.at_key(self.ids)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """Return coverage from the range of ids in each tile: exact for ascending ids, else conservative."""
        return coverage_of_ids(tiles.at_queries(self.ids), tiles.at_keys(self.ids))

    @override
    def for_kernels(self) -> Mask:
        return document_runs(jnp.asarray(self.ids))

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        reason = "there is no kernel for a Document whose ids are not contiguous"
        return None if has_contiguous_ids(self.ids) else reason

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        """Store the first position of each position's document, and one past the last."""
        ids = jnp.atleast_2d(jnp.asarray(self.ids))
        past_end = tiling.max_seq_len + MAX_ROWS  # a tile's first key may be as low as -MAX_ROWS
        position = jnp.arange(-MAX_ROWS, past_end, dtype=jnp.int32)

        def id_at(position: Any) -> Any:
            return ids[:, jnp.clip(position, 0, ids.shape[1] - 1)]

        begins, ends = id_at(position) != id_at(position - 1), id_at(position) != id_at(position + 1)
        return RowRanges(
            first=lax.cummax(jnp.where(begins, position, BEFORE_ALL), axis=1),
            end=lax.cummin(jnp.where(ends, position + 1, past_end), axis=1, reverse=True),
            lines=Lines(ids.shape[0], None),
            num_positions=None,
        )


@pytree
class DocumentRuns(Document):
    """A Document mask whose ids never decrease, so that the ids at a tile's ends bound those between."""

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        ends = tiles.first_query, tiles.last_query, tiles.first_key, tiles.last_key
        first_q, last_q, first_k, last_k = (entry(self.ids, tiles.row, None, x) for x in ends)
        return coverage_of_ids((first_q, last_q), (first_k, last_k))

    @override
    def for_kernels(self) -> Mask:
        return self


def document_runs(ids: Int[Array, "*reqs positions"]) -> DocumentRuns:
    """Return a mask whose documents are the runs of equal ids, numbered from 0."""
    is_first = ids[..., 1:] != ids[..., :-1]
    pad_widths = [(0, 0)] * (ids.ndim - 1) + [(1, 0)]
    return DocumentRuns(ids=jnp.pad(jnp.cumsum(is_first, axis=-1, dtype=jnp.int32), pad_widths))


def has_contiguous_ids(ids: Any) -> bool:
    """Return whether equal ids are contiguous in each row; True for traced ids."""
    if not architectures.is_concrete(ids):
        return True
    ids = np.atleast_2d(np.asarray(ids))
    if (ids[:, 1:] >= ids[:, :-1]).all():
        return True
    num_runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(axis=1)
    return all(len(np.unique(row)) == runs for row, runs in zip(ids, num_runs, strict=True))
