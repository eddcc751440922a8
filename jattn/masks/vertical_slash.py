"""VerticalSlash masks, and their split into gathered columns and the remainder.

Kernels may gather the keys of a mask's columns into contiguous tiles. `split_gathered` splits a
VerticalSlash mask into a GatheredColumns mask over the gathered keys and an UngatheredVerticalSlash mask over
the other keys in place.
"""

import math
from typing import Any, ClassVar, NamedTuple, override

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jattn.masks.base import Mask
from jattn.masks.checks import MAX_INT, normalize_ints, require_array, require_ints
from jattn.masks.in_kernel import KernelTiling
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles, entry, quotient, remainder
from jattn.masks.positions import distances
from jattn.pytree import pytree, static
from pallas_kernels.checks import require, require_bool
from pallas_kernels.varlen_prefill import MAX_ROWS, KernelMask, Lines, RowRanges, SlashWords


@pytree
class VerticalSlash(Mask):
    """Columns (keys visible to all queries) and slashes (visible distances between query and key) per head.

    Positions and distances beyond the arrays have no column and no slash.

    Attributes:
        columns: Whether the key at each position is visible to all queries: bool [q_heads, positions] for all
            requests, or [reqs, q_heads, positions].
        slashes: Whether each query attends to the key at each distance before it: bool [q_heads, distances]
            for all requests, or [reqs, q_heads, distances].
        num_gathered: Static: maximum number of columns per head whose keys the kernels gather into contiguous
            tiles. Used if the mask is the only mask of a causal layer without window or ALiBi. Faster for
            scattered columns, each of which otherwise costs a block or a tile of keys. 0 = no gathering.

    Source: MInference's vertical-slash pattern.
    """

    columns: Bool[Array, "*reqs q_heads positions"] | Bool[np.ndarray, "*reqs q_heads positions"]
    slashes: Bool[Array, "*reqs q_heads distances"] | Bool[np.ndarray, "*reqs q_heads distances"]
    num_gathered: int = static(default=0)
    row_axes: ClassVar[dict[str, int]] = {"columns": 3, "slashes": 3}

    def __post_init__(self) -> None:
        for name, axis in (("columns", "positions"), ("slashes", "distances")):
            marks, axes = getattr(self, name), f"[q_heads, {axis}]"
            require_array(name, marks, "bool", {2: axes, 3: f"[reqs, *{axes}]"})
            require(0 not in marks.shape[-2:], name, "have at least one entry along each axis", marks.shape)
        rows = self.columns.shape[:-2]
        rule = f"have as many rows as columns with shape {self.columns.shape}"
        require(self.slashes.shape[:-2] == rows, "slashes", rule, f"shape {self.slashes.shape}")
        normalize_ints(self, 0, "num_gathered")

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.columns.shape[-2], 1

    @property
    @override
    def has_exact_num_heads(self) -> bool:
        return True

    has_short_runs = True

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        self._check_heads(sizes.num_q_heads)

    @classmethod
    def from_indices(
        cls, columns: Array, slashes: Array, max_seq_len: int, *, gather: bool = True
    ) -> "VerticalSlash":
        """Make a mask from lists of positions and distances; entries outside [0, max_seq_len) are padding.

        Args:
            columns: Positions of the columns: [q_heads, n] for all requests, or [reqs, q_heads, n].
            slashes: Distances of the slashes: [q_heads, n] for all requests, or [reqs, q_heads, n].
            max_seq_len: Static: number of positions and distances of the mask's arrays.
            gather: Static: whether kernels gather the keys of the columns, see `num_gathered`. Pass False if
                the columns are in long runs.
        """
        require_ints(1, max_seq_len=max_seq_len)
        require_bool(gather=gather)
        columns, slashes = jnp.asarray(columns), jnp.asarray(slashes)
        axes = {2: "[q_heads, n]", 3: "[reqs, q_heads, n]"}
        require_array("columns", columns, "integer", axes)
        require_array("slashes", slashes, "integer", axes)

        def to_mask(indices: Array) -> Array:
            *heads, count = indices.shape
            indices = indices.astype(jnp.int32)  # max_seq_len may not fit 8 or 16 bits.
            indices = jnp.where(indices < 0, max_seq_len, indices).reshape(math.prod(heads), count)
            head = jnp.arange(indices.shape[0])[:, None]
            marks = jnp.zeros((indices.shape[0], max_seq_len), bool).at[head, indices].set(True, mode="drop")
            return marks.reshape(*heads, max_seq_len)

        num_gathered = columns.shape[-1] if gather else 0
        return cls(columns=to_mask(columns), slashes=to_mask(slashes), num_gathered=num_gathered)

    def _check_heads(self, num_q_heads: int) -> None:
        heads = self.columns.shape[-2], self.slashes.shape[-2]
        if heads != (num_q_heads, num_q_heads):
            raise ValueError(
                f"VerticalSlash has columns for {heads[0]} heads and slashes for {heads[1]} heads, but the "
                f"layer has {num_q_heads} query heads. Pass columns and slashes for {num_q_heads} heads."
            )

    @override
    def visible(self, pairs: Pairs) -> Any:
        self._check_heads(pairs.num_heads[0])

        by_column = lookup_marks(self.columns, pairs, pairs.key)
        return by_column | lookup_marks(self.slashes, pairs, pairs.query - pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        self._check_heads(tiles.num_heads[0])
        columns = marks_in_ranges(self.columns, tiles, tiles.first_key, tiles.last_key)
        slashes = marks_in_ranges(self.slashes, tiles, *distances(tiles))
        return Coverage(*(column | slash for column, slash in zip(columns, slashes, strict=True)))

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        return None

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return self._slash_words(None, tiling)

    def _slash_words(self, hidden: Any, tiling: KernelTiling) -> SlashWords:
        return SlashWords.make(
            flatten_lines(self.columns),
            flatten_lines(self.slashes),
            None if hidden is None else flatten_lines(hidden),
            lines=(lines_of(self.columns), lines_of(self.slashes)),
            has_key_rows=tiling.has_key_rows,
        )

    def split_gathered(self) -> "VerticalSlashParts":
        """Split a mask with num_gathered > 0. Works inside jit.

        Columns beyond num_gathered stay in the remainder.
        """
        marks = jnp.asarray(self.columns)
        num_gathered = min(self.num_gathered, marks.shape[-1])
        counts = jnp.cumsum(marks, axis=-1, dtype=jnp.int32)
        gathered = marks & (counts <= num_gathered)
        capacity = math.ceil(num_gathered / GATHER_ALIGNMENT) * GATHER_ALIGNMENT
        index = flatten_lines(jnp.where(gathered, counts - 1, capacity))
        line, position = (jnp.arange(size, dtype=jnp.int32) for size in index.shape)
        positions = jnp.full((index.shape[0], capacity), UNUSED_POSITION, jnp.int32)
        positions = positions.at[line[:, None], index].set(position[None], mode="drop")
        columns = GatheredColumns(
            positions=positions.reshape(*marks.shape[:-1], capacity), counts=jnp.minimum(counts, num_gathered)
        )
        others = UngatheredVerticalSlash(
            columns=marks & ~gathered, slashes=jnp.asarray(self.slashes), gathered=gathered
        )
        return VerticalSlashParts(columns, remainder=others)


def lookup_marks(marks: Any, pairs: Pairs, index: Any) -> Any:
    """Return the entries of `marks` at `index` for the pairs' rows and heads; False out of range."""
    line, marks = lines_of(marks).line_of(pairs.row, pairs.head), flatten_lines(marks)
    is_inside = (index >= 0) & (index < marks.shape[1])
    return marks[line, jnp.clip(index, 0, marks.shape[1] - 1)] & is_inside


def marks_in_ranges(marks: Any, tiles: Tiles, first: Any, last: Any) -> Coverage:
    """Return whether any, and whether all, of the entries from `first` to `last` are True, for each tile.

    One lookup answers both: the number of equal entries from `first` on, negated if they are False.

    Args:
        marks: Entries per position or distance, bool [q_heads, n] or [reqs, q_heads, n]. Entries outside of
            the array count as False.
        tiles: Tiles whose row and head select the line of `marks`.
        first: Index of the first entry of each tile.
        last: Index of the last entry, at most `sum(tiles.size) - 1` after the first.
    """
    line, marks = lines_of(marks).line_of(tiles.row, tiles.head), flatten_lines(marks)
    num_lines, num_marks = marks.shape
    margin, step = sum(tiles.size), tiles.size[1]
    # False entries on both sides, as many as the longest range has, stand for those outside of the array.
    per_step = -(-(num_marks + 2 * margin) // step)
    marks = jnp.pad(marks, ((0, 0), (margin, per_step * step - num_marks - margin)))
    index = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    changes = jnp.pad(marks[:, 1:] != marks[:, :-1], ((0, 0), (1, 0)))
    next_change = lax.cummin(jnp.where(changes, index, MAX_INT), axis=1, reverse=True)
    next_change = jnp.pad(next_change[:, 1:], ((0, 0), (0, 1)), constant_values=MAX_INT)
    runs = jnp.where(marks, next_change - index, index - next_change)
    # Consecutive tiles look up entries that are `step` apart, so store these next to each other.
    runs = jnp.swapaxes(runs.reshape(num_lines, per_step, step), 1, 2).reshape(num_lines, -1)
    start = jnp.clip(first + margin, 0, num_marks + margin)
    run = runs[line, remainder(start, step) * per_step + quotient(start, step)]
    num = last - first + 1
    return Coverage(run > -num, run >= num)


def flatten_lines(marks: Any) -> Array:
    """Reshape [heads, n] or [rows, heads, n] to [lines, n]."""
    return jnp.asarray(marks).reshape(-1, marks.shape[-1])


def lines_of(marks: Any) -> Lines:
    """Return the description of the lines of `flatten_lines`."""
    *rows, heads, _ = marks.shape
    return Lines(rows[0] if rows else None, heads)


GATHER_ALIGNMENT = 128  # Keys of the widest tile: each row's gathered keys start at a tile boundary.
UNUSED_POSITION = 2**30  # Position of unused gathered keys: after all queries.


@pytree
class GatheredColumns(Mask):
    """Causal attention to gathered keys.

    A pair's key is the index of a gathered key; its query is a position, as in other masks.

    Attributes:
        positions: Position of each gathered key, ascending, padded with UNUSED_POSITION.
        counts: Number of gathered keys up to and including each position.
    """

    positions: Int32[Array, "*reqs q_heads gathered"]
    counts: Int32[Array, "*reqs q_heads positions"]
    row_axes: ClassVar[dict[str, int]] = {"positions": 3, "counts": 3}

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.positions.shape[-2], 1

    skips_most_tiles = True

    @override
    def visible(self, pairs: Pairs) -> Any:
        is_inside = pairs.key < self.positions.shape[-1]
        return is_inside & (pairs.at_key(self.positions, per_head=True) <= pairs.query)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        num_keys = self.positions.shape[-1]  # Keys from here on belong to the next request.
        first, last = (
            entry(self.positions, tiles.row, tiles.head, key) for key in (tiles.first_key, tiles.last_key)
        )
        any_visible = (tiles.first_key < num_keys) & (first <= tiles.last_query)
        return Coverage(any_visible, (tiles.last_key < num_keys) & (last <= tiles.first_query))

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        """Store for each query how many keys it attends to, or for each key the first query that does."""
        ends = (0, 0), (MAX_ROWS, MAX_ROWS)
        if tiling.has_key_rows:
            first = jnp.pad(flatten_lines(self.positions), ends, constant_values=UNUSED_POSITION)
            end, array = None, self.positions
        else:
            padded = jnp.pad(flatten_lines(self.counts), ((0, 0), (0, MAX_ROWS)), mode="edge")
            end, first, array = jnp.pad(padded, ((0, 0), (MAX_ROWS, 0))), None, self.counts
        return RowRanges(first=first, end=end, lines=lines_of(array), num_positions=array.shape[-1])


@pytree
class UngatheredVerticalSlash(VerticalSlash):
    """A VerticalSlash mask without its gathered keys.

    Attributes:
        gathered: Whether each key is gathered; same shape as `columns`.
    """

    has_isolated_slashes = True  # like the gathered columns: typically both come from the same selection
    gathered: Bool[Array, "*reqs q_heads positions"]
    row_axes: ClassVar[dict[str, int]] = {**VerticalSlash.row_axes, "gathered": 3}

    @override
    def visible(self, pairs: Pairs) -> Any:
        by_slash = lookup_marks(self.slashes, pairs, pairs.query - pairs.key)
        return lookup_marks(self.columns, pairs, pairs.key) | (
            by_slash & ~lookup_marks(self.gathered, pairs, pairs.key)
        )

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        any_visible, all_visible = super().coverage(tiles)
        has_gathered, _ = marks_in_ranges(self.gathered, tiles, tiles.first_key, tiles.last_key)
        return Coverage(any_visible, all_visible & ~has_gathered)

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return self._slash_words(self.gathered, tiling)


class VerticalSlashParts(NamedTuple):
    """The parts of a causal VerticalSlash mask; each visible pair is visible in exactly one of them."""

    columns: GatheredColumns
    remainder: UngatheredVerticalSlash
