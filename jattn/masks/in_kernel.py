"""Masks inside kernels: the sizes of a kernel's tiles, and the evaluation of a mask's formula on a tile."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn.masks.pairs import Pairs
from jattn.pytree import pytree, static
from pallas_kernels.varlen_prefill import MAX_ROWS, WORD_BITS, KernelMask, Lines, PairTile


class KernelTiling(NamedTuple):
    """Static sizes of the tiles in which a kernel evaluates a mask.

    Attributes:
        num_heads: Number of query heads and of KV heads.
        queries: Number of queries per tile.
        keys: Number of keys per tile.
        max_seq_len: Maximum number of tokens per request.
        is_aligned: Whether the position of a tile's first column is a multiple of the number of columns. If
            columns are keys in a paged cache, it always is.
        is_prefill: Whether the queries are in the prefill region.
        has_key_rows: Whether the rows of a tile are keys, as in varlen_backward, instead of queries.
        needs_words: Whether the kernel takes masks as words only, see `KernelMask.is_words`.
    """

    num_heads: tuple[int, int]
    queries: int
    keys: int
    max_seq_len: int
    is_aligned: bool
    is_prefill: bool = True
    has_key_rows: bool = False
    needs_words: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayField:
    """Stands for an array of a mask inside a kernel, where only the methods of Pairs read it.

    Attributes:
        index: Index of the array among the leaves of the mask.
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    index: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


class Lookup(NamedTuple):
    """A lookup of an array in a mask's formula.

    Attributes:
        field: The array.
        axis: What the array's last axis is indexed by: "query", "key" or "row".
        per_head: Whether the array has an axis of query heads.
    """

    field: ArrayField
    axis: str
    per_head: bool

    @property
    def lines(self) -> Lines:
        """Lines of the array."""
        num_axes = (self.axis != "row") + self.per_head
        has_rows = self.field.ndim > num_axes
        return Lines(
            self.field.shape[0] if has_rows else None,
            self.field.shape[-2 if self.axis != "row" else -1] if self.per_head else None,
        )

    def stored(self, array: Array) -> Array:
        """Return the array as a kernel reads it: [lines], or [lines, positions], with wide margins."""
        array = array.astype(jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32)
        if self.axis == "row":
            return array.reshape(-1)
        lines = array.reshape(-1, array.shape[-1])
        return jnp.pad(lines, ((0, 0), (MAX_ROWS, MAX_ROWS)), mode="edge")

    def load(self, tile: PairTile, req: Any, ref: Any) -> Any:
        """Load the array's elements for a tile."""
        line = self.lines.line_of(req, tile.head)
        if self.axis == "row":
            return ref[line]
        first, load = (
            (tile.first_query, tile.load_queries)
            if self.axis == "query"
            else (tile.first_key, tile.load_keys)
        )
        return load(ref, (line,), jnp.clip(first, -MAX_ROWS, self.field.shape[-1]) + MAX_ROWS)

    def broadcast(self, tile: PairTile, loaded: Any) -> Any:
        """Return the loaded elements per pair, in the array's dtype."""
        if self.axis != "row":
            loaded = (tile.broadcast_queries if self.axis == "query" else tile.broadcast_keys)(loaded)
        return loaded != 0 if self.field.dtype == np.bool_ else loaded


class _RecordedPairs(Pairs):
    """A pair that records the lookups of a formula."""

    lookups: dict[Lookup, None]

    @override
    def look_up(self, array: Any, axis: str, *, per_head: bool = False) -> Any:
        if not isinstance(array, ArrayField):
            raise TypeError(f"The mask looks up an array that is not one of its fields: {array}.")
        self.lookups[Lookup(array, axis, per_head)] = None
        return jnp.zeros((), array.dtype)


class _PairsOfTile(Pairs):
    """Pairs that compute positions only when a mask reads them: Pallas has no layout for unused arrays."""

    tile: PairTile
    values: dict[Lookup, Any]

    @property
    def query(self) -> Any:
        return self.tile.query

    @property
    def key(self) -> Any:
        return self.tile.key

    @override
    def look_up(self, array: Any, axis: str, *, per_head: bool = False) -> Any:
        lookup = Lookup(array, axis, per_head)
        return lookup.broadcast(self.tile, self.values[lookup])


class _RowsOfTile(_PairsOfTile):
    """Pairs of the rows of a tile with its first key."""

    @property
    def query(self) -> Any:
        return self.tile.row_positions

    @property
    def key(self) -> Any:
        return self.tile.first_key


@pytree
class Formula(KernelMask):
    """The formula `visible` of a mask, which the kernel evaluates for each pair.

    Attributes:
        arrays: Array of each lookup.
        lookups: Lookups of arrays in the formula (static).
        fields: Leaves of the mask (static).
        mask: Tree structure of the mask (static).
        num_heads: Number of query heads and of KV heads (static).
        is_prefill: Whether the queries are in the prefill region (static).
    """

    arrays: tuple[Array, ...]
    lookups: tuple[Lookup, ...] = static()
    fields: tuple[ArrayField, ...] = static()
    mask: Any = static()
    num_heads: tuple[int, int] = static()
    is_prefill: bool = static()

    pairs_type: ClassVar[type[_PairsOfTile]] = _PairsOfTile

    @classmethod
    def of(cls, mask: Any, tiling: KernelTiling) -> "Formula":
        """Return the formula of a mask; why_not_formula must be None."""
        arrays, structure = jax.tree.flatten(mask)
        lookups = record_lookups(mask, tiling) if arrays else ()
        return cls(
            arrays=tuple(lookup.stored(jnp.asarray(arrays[lookup.field.index])) for lookup in lookups),
            lookups=lookups,
            fields=fields_of(arrays),
            mask=structure,
            num_heads=tiling.num_heads,
            is_prefill=tiling.is_prefill,
        )

    @property
    @override
    def is_words(self) -> bool:
        return False

    @override
    def load(self, tile: PairTile, req: Any) -> Any:
        # A value per column takes many registers while the scores are computed, so `visible` loads those.
        columns = "query" if tile.has_key_rows else "key"
        return req, tuple(
            None if lookup.axis == columns else lookup.load(tile, req, ref)
            for lookup, ref in zip(self.lookups, self.arrays, strict=True)
        )

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Any:
        req, values = loaded or (None, ())
        values = (
            lookup.load(tile, req, ref) if value is None else value
            for lookup, ref, value in zip(self.lookups, self.arrays, values, strict=True)
        )
        pairs = self.pairs_type(tile.head, jnp.int32(0), None, None, self.num_heads, self.is_prefill)
        pairs.tile, pairs.values = tile, dict(zip(self.lookups, values, strict=True))
        return jax.tree.unflatten(self.mask, self.fields).visible(pairs)


@pytree
class BlockFormula(Formula):
    """The formula of a mask without arrays that is constant in blocks, for tiles that lie in a block of keys.

    The kernel evaluates it for one key per row.
    """

    pairs_type = _RowsOfTile

    @property
    @override
    def is_words(self) -> bool:
        return True

    @override
    def visible(self, tile: PairTile, loaded: Any) -> Any:
        word = jnp.where(super().visible(tile, loaded), jnp.int32(-1), jnp.int32(0))
        word = tile.fill_rows(word) if word.ndim == 0 else word  # a mask may not depend on the query
        return (word,) * (tile.shape[1] // WORD_BITS)


def fields_of(arrays: Sequence[Any]) -> tuple[ArrayField, ...]:
    """Return the fields that stand for the leaves of a mask."""
    return tuple(ArrayField(i, jnp.shape(x), np.dtype(jnp.result_type(x))) for i, x in enumerate(arrays))


def record_lookups(mask: Any, tiling: KernelTiling) -> tuple[Lookup, ...]:
    """Return the lookups of a mask's arrays in its formula.

    Raises:
        TypeError: If the formula reads an array in another way.
    """
    leaves, structure = jax.tree.flatten(mask)
    lookups: dict[Lookup, None] = {}

    def evaluate(query: Array) -> Any:
        pairs = _RecordedPairs(query, query, query, query, tiling.num_heads, tiling.is_prefill)
        pairs.lookups = lookups
        return jax.tree.unflatten(structure, fields_of(leaves)).visible(pairs)

    jax.eval_shape(evaluate, jax.ShapeDtypeStruct((), jnp.int32))
    return tuple(lookups)


def why_not_formula(mask: Any, tiling: KernelTiling) -> str | None:
    """Return why a kernel cannot evaluate the formula of a mask with arrays; None if it can."""
    try:
        record_lookups(mask, tiling)
    except (TypeError, AttributeError) as error:
        rule = "its method visible must read them with pairs.at_query, pairs.at_key or pairs.at_row alone"
        return f"there is no kernel for the arrays of a {type(mask).__name__}: {rule} ({error})"
    return None
