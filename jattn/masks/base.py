"""The `Mask` base class and its compositions with &, | and ~."""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from jattn.batch.metadata import BatchMetadata, rows_from
from jattn.masks.in_kernel import BlockFormula, Formula, KernelTiling, why_not_formula
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles
from jattn.pytree import replace
from pallas_kernels import architectures
from pallas_kernels.checks import require
from pallas_kernels.varlen_prefill import Inverted, Joined, KernelMask


class Mask(abc.ABC):
    """A rule for which keys each query attends to.

    Combine masks with &, | and ~. To define your own mask, subclass Mask and register the class: with
    `jax.tree_util.register_static` if it holds no arrays, else as a pytree. `visible` and `coverage` serve
    all implementations. Kernels evaluate `visible` in partial tiles, unless a class overrides `kernel_mask`
    with a faster form.

    Attributes:
        row_axes: For each array field that may have a leading axis of requests, the number of axes the array
            has with it. Required for masks that hold arrays; {} if none of them is per request.
        num_gathered: Maximum number of keys per head that kernels copy into contiguous tiles. A class that
            sets it defines `split_gathered`.
    """

    row_axes: ClassVar[Mapping[str, int] | None] = None
    num_gathered: int = 0

    @abc.abstractmethod
    def visible(self, pairs: Pairs) -> Any:
        """Return whether each query attends to its key: bool, broadcastable to the shape of `pairs`.

        Kernels read arrays through `pairs.at_query`, `pairs.at_key` and `pairs.at_row` alone.
        """

    def coverage(self, tiles: Tiles) -> Coverage:
        """Return whether any and whether all pairs of each tile are visible.

        By default every pair is evaluated, which is slow for long sequences. `tiles.at_queries` and
        `tiles.at_keys` bound the arrays' entries in a tile.
        """

        def add_pair_axes(x: Any) -> Any:
            return jnp.asarray(x)[..., None, None]

        def positions(first: Any, size: int, axis: int) -> Any:
            offset = np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in (-2, -1)])
            return add_pair_axes(first) + np.expand_dims(offset, tuple(range(jnp.ndim(first))))

        query = positions(tiles.first_query, tiles.size[0], -2)
        key = positions(tiles.first_key, tiles.size[1], -1)
        is_inside = (query <= add_pair_axes(tiles.last_query)) & (key <= add_pair_axes(tiles.last_key))
        head, row = add_pair_axes(tiles.head), add_pair_axes(tiles.row)
        visible = self.visible(Pairs(head, row, query, key, tiles.num_heads, tiles.is_prefill))
        any_visible = (visible & is_inside).any(axis=(-2, -1))
        return Coverage(any_visible, (visible | ~is_inside).all(axis=(-2, -1)))

    @property
    def block_shape(self) -> tuple[int | None, int] | None:
        """Numbers of queries and keys per block if the mask is constant within blocks; None otherwise.

        The number of queries is None if all queries of a request attend to the same keys.
        """
        return None

    @property
    def has_short_runs(self) -> bool:
        """Return whether queries typically attend to runs of keys that begin anywhere and fill no tiles."""
        return False

    @property
    def has_isolated_slashes(self) -> bool:
        """Return whether the mask consists of diagonals that few tiles share."""
        return False

    @property
    def skips_most_tiles(self) -> bool:
        """Whether a query of a long request typically attends to few of its tiles of keys."""
        return False

    @property
    def has_common_keys(self) -> bool:
        """Return whether queries all over a request attend to the same few keys, such as its first ones."""
        return False

    def key_range(self, query: Any) -> tuple[Any | None, Any | None] | None:
        """Return the visible keys of queries at positions from 0 on, as a range of positions [begin, end).

        None if they are no range that follows from the position alone; an end is None if it has no bound.
        """
        return None

    def is_equal_within_groups(self, num_heads: tuple[int, int]) -> bool:
        """Return whether all query heads of a kv head attend to the same keys."""
        q_heads, kv_heads = num_heads
        period, _ = self.num_heads
        return q_heads == kv_heads or (period is not None and kv_heads % period == 0)

    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        """Return why kernels cannot evaluate the mask in tiles of these sizes; None if they can."""
        return None if self.is_static else why_not_formula(self, tiling)

    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        """Return the mask as kernels evaluate it in partial tiles; why_no_kernel must be None.

        By default they evaluate the formula `visible` of each pair, or of one pair per block of keys if the
        mask is constant within blocks and tiles do not cut them. Works inside jit.
        """
        has_aligned_keys = tiling.is_aligned and not tiling.has_key_rows
        blocks = self.block_shape if self.is_static and tiling.needs_words and has_aligned_keys else None
        lies_in_block = blocks is not None and blocks[1] % tiling.keys == 0
        return (BlockFormula if lies_in_block else Formula).of(self, tiling)

    def for_kernels(self) -> "Mask":
        """Return the mask that kernels compute in place of this one."""
        return self

    def split_gathered(self) -> tuple[Any, "Mask"]:
        """Return the mask of the gathered keys, a GatheredColumns, and the mask of the other keys."""
        raise NotImplementedError

    def map_leaves(self, function: Callable[["Mask"], "Mask"]) -> "Mask":
        """Return the composition with `function` applied to each mask that is not composed."""
        return function(self)

    def __and__(self, other: "Mask") -> "Mask":
        return And(masks=(*_operands(self, And), *_operands(other, And)))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(masks=(*_operands(self, Or), *_operands(other, Or)))

    def __invert__(self) -> "Mask":
        return Not(masks=(self,))

    def __bool__(self) -> bool:
        """Raise TypeError: `and` and `or` would silently return one of the two masks."""
        name = type(self).__name__
        raise TypeError(
            f"{name} has no truth value. Combine masks with &, | and ~ instead of `and`, `or` and `not`."
        )

    __rand__, __ror__ = __and__, __or__
    __array_ufunc__ = None  # Makes numpy arrays defer & and | to the mask, which then raises a clear error.

    @property
    def is_causal(self) -> bool:
        """Whether no query attends to a later key."""
        return False

    @property
    def allows_all_past_keys(self) -> bool:
        """Whether every query attends to its own and all earlier keys."""
        return False

    @property
    def allows_future_keys(self) -> bool:
        """Whether the mask exists to let queries attend to later keys, which causal attention hides.

        False for masks that select keys regardless of order, such as blocks and documents: these may be
        combined with causal attention.
        """
        return False

    @property
    def num_heads(self) -> tuple[int | None, int | None]:
        """Numbers that the query heads and the kv heads must be multiples of.

        1 if the mask does not depend on heads; None if it depends on the total number of heads.
        """
        return 1, 1

    @property
    def has_exact_num_heads(self) -> bool:
        """Whether the number of query heads must equal `num_heads[0]` exactly, not a multiple of it."""
        return False

    @property
    def is_static(self) -> bool:
        """Whether the mask holds no arrays, so that it is hashable and may be part of a spec."""
        return not jax.tree.leaves(self)

    def check(self, sizes: BatchSizes) -> None:
        """Check that the mask fits a batch of these sizes.

        Raises:
            ValueError: If an array does not have one row, or as many rows as the batch; or if the mask has
                other heads or is smaller than the batch's lengths.
        """
        for name, num_rows in num_rows_by_field(self):
            if sizes.num_rows is not None and num_rows not in (1, sizes.num_rows):
                raise ValueError(
                    f"{name} has {num_rows} rows, but the batch metadata has {sizes.num_rows}. Pass one row "
                    "for all requests, or call mask.to_batch_rows(metadata) on a mask with one row per "
                    "request. For a mask of the decode rows only, attend with metadata.decode_region."
                )

    def map_rows(self, function: Callable[[Any], Any]) -> "Mask":
        """Return the mask with `function` applied to every array that has one row per request."""
        changed = {name: function(array) for name, array in per_request_arrays(self).items()}
        return replace(self, **changed) if changed else self

    def slice_rows(self, first: int) -> "Mask":
        """Return the mask of the batch's rows from `first` on."""
        return self if first == 0 else self.map_rows(lambda x: x if x.shape[0] == 1 else rows_from(x, first))

    def to_batch_rows(self, metadata: BatchMetadata) -> "Mask":
        """Return the mask in the row order of a batch, from a mask with one row per request.

        A bucket pads the decode rows, so the first prefill request is not in the row after the last decode.
        Works inside jit. `advance` keeps the rows, so later steps take the same mask.

        Args:
            metadata: Metadata of the batch that `build_batch_metadata` made from these requests.

        Raises:
            ValueError: If the mask has more rows than the bucket, or (with metadata that is not traced) not
                one row per request.
        """
        bucket, counts = metadata.bucket, (metadata.num_decodes, metadata.num_prefills)
        num_reqs = sum(map(int, counts)) if architectures.is_concrete(counts) else None
        for name, num_rows in num_rows_by_field(self):
            matches_num_rows = num_rows <= bucket.max_reqs if num_reqs is None else num_rows == num_reqs
            expected = f"at most {bucket.max_reqs}" if num_reqs is None else num_reqs
            require(
                num_rows == 1 or matches_num_rows, name, f"have one row per request ({expected})", num_rows
            )
        row = np.arange(bucket.max_reqs, dtype=np.int32)
        prefill_request = jnp.asarray(metadata.num_decodes, jnp.int32) + (row - bucket.max_decodes)
        request = jnp.where(row < bucket.max_decodes, row, prefill_request)

        def gather_rows(array: Any) -> Any:
            # Padding rows receive an arbitrary request's row: they have no keys.
            return (
                array if array.shape[0] == 1 else jnp.take(jnp.asarray(array), request, axis=0, mode="clip")
            )

        return self.map_rows(gather_rows)


def check_is_mask(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a mask that JAX can flatten."""
    if isinstance(value, type) and issubclass(value, Mask):
        raise ValueError(f"{name} is the class {value.__name__}. Pass a mask, such as {value.__name__}(...).")
    if not isinstance(value, Mask):
        raise ValueError(
            f"{name} must be a mask of jattn.masks, got a {type(value).__name__}. Wrap a function in "
            "MaskFunction or a bool array of blocks in BlockMask."
        )
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, Mask):
            raise ValueError(
                f"{name} contains a {type(leaf).__name__}, whose class is not registered as a pytree. "
                "Decorate a mask class without arrays with jax.tree_util.register_static."
            )


def leaves(mask: Mask) -> Iterator[Mask]:
    """Yield the masks that a mask is composed of."""
    if isinstance(mask, _Joined):
        for operand in mask.masks:
            yield from leaves(operand)
    else:
        yield mask


def factors(mask: Mask) -> tuple[Mask, ...]:
    """Return the masks whose intersection a mask is."""
    return mask.masks if isinstance(mask, And) else (mask,)


def per_request_arrays(mask: Mask) -> dict[str, Any]:
    """Return the arrays of a mask, excluding those of its operands, that have one row per request."""
    if mask.is_static:
        return {}
    axes, name = mask.row_axes, type(mask).__name__
    rule = "map the arrays that may have one row per request to their number of axes"
    require(axes is not None, f"{name}.row_axes", rule, axes)
    arrays = {field: (getattr(mask, field), count) for field, count in (axes or {}).items()}
    return {field: array for field, (array, count) in arrays.items() if getattr(array, "ndim", None) == count}


def num_rows_by_field(mask: Mask) -> list[tuple[str, int]]:
    """Return the name and the number of rows of each array that has one row per request."""
    return [
        (f"{type(leaf).__name__}.{field}", array.shape[0])
        for leaf in leaves(mask)
        for field, array in per_request_arrays(leaf).items()
    ]


def _operands(mask: Mask, operator_class: "type[_Joined]") -> tuple[Mask, ...]:
    check_is_mask("The operand of a mask", mask)
    return mask.masks if isinstance(mask, operator_class) else (mask,)


@dataclasses.dataclass(frozen=True)
class _Joined(Mask):
    """A composition of masks with &, | or ~.

    Attributes:
        masks: The composed masks.
        join: Function that composes the results of two masks; unused for ~.
    """

    masks: tuple[Mask, ...]
    join: ClassVar[Callable[..., Any]]

    @override
    def visible(self, pairs: Pairs) -> Any:
        return functools.reduce(self.join, (mask.visible(pairs) for mask in self.masks))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        coverages = zip(*(mask.coverage(tiles) for mask in self.masks), strict=True)
        return Coverage(*(functools.reduce(self.join, x) for x in coverages))

    @override
    def map_leaves(self, function: Callable[[Mask], Mask]) -> Mask:
        return type(self)(masks=tuple(mask.map_leaves(function) for mask in self.masks))

    @override
    def for_kernels(self) -> Mask:
        return self.map_leaves(lambda leaf: leaf.for_kernels())

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        reasons = (mask.why_no_kernel(tiling) for mask in self.masks)
        return next((reason for reason in reasons if reason is not None), None)

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        if self.is_static:
            return Formula.of(self, tiling)
        return self.join_kernel_masks(tuple(mask.kernel_mask(tiling) for mask in self.masks))

    def join_kernel_masks(self, operands: tuple[KernelMask, ...]) -> KernelMask:
        """Return the composition of the kernel masks of `masks`."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        is_valid = isinstance(self.masks, tuple) and all(isinstance(mask, Mask) for mask in self.masks)
        rule = "be a tuple of masks (a & b, a | b)"
        require(is_valid and len(self.masks) > 0, f"{type(self).__name__}.masks", rule, repr(self.masks))

    @override
    def map_rows(self, function: Callable[[Any], Any]) -> Mask:
        return self.map_leaves(lambda leaf: leaf.map_rows(function))

    @override
    def check(self, sizes: BatchSizes) -> None:
        for mask in self.masks:
            mask.check(sizes)

    @property
    @override
    def allows_all_past_keys(self) -> bool:
        return all(mask.allows_all_past_keys for mask in self.masks)

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        q_heads, kv_heads = zip(*(mask.num_heads for mask in self.masks), strict=True)
        # If one mask fixes the number of query heads, formulas over the total (None) do not restrict it.
        num_query_heads = [num for num in q_heads if num] if self.has_exact_num_heads else q_heads
        return _common_multiple(num_query_heads), _common_multiple(kv_heads)

    @property
    @override
    def has_exact_num_heads(self) -> bool:
        return any(mask.has_exact_num_heads for mask in self.masks)


def _common_multiple(nums: Sequence[int | None]) -> int | None:
    """Return the least common multiple of the masks' numbers of heads; None if one of them is None."""
    return None if None in nums else math.lcm(*(num for num in nums if num))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(_Joined):
    """The intersection of `masks`: pairs that are visible under all of them."""

    join = staticmethod(operator.and_)

    @override
    def join_kernel_masks(self, operands: tuple[KernelMask, ...]) -> KernelMask:
        return Joined(operands=operands, is_union=False)

    @property
    @override
    def is_causal(self) -> bool:
        return any(mask.is_causal for mask in self.masks)

    @property
    @override
    def allows_future_keys(self) -> bool:
        return not self.is_causal and any(mask.allows_future_keys for mask in self.masks)

    @property
    @override
    def skips_most_tiles(self) -> bool:
        return any(mask.skips_most_tiles for mask in self.masks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(_Joined):
    """The union of `masks`: pairs that are visible under at least one of them."""

    join = staticmethod(operator.or_)

    @override
    def join_kernel_masks(self, operands: tuple[KernelMask, ...]) -> KernelMask:
        return Joined(operands=operands, is_union=True)

    @property
    @override
    def is_causal(self) -> bool:
        return all(mask.is_causal for mask in self.masks)

    @property
    @override
    def allows_future_keys(self) -> bool:
        # Whatever another mask adds to complete causality can only be later keys.
        is_more = (
            any(mask.is_causal and mask.allows_all_past_keys for mask in self.masks) and not self.is_causal
        )
        return is_more or any(mask.allows_future_keys for mask in self.masks)

    @property
    @override
    def skips_most_tiles(self) -> bool:
        return all(mask.skips_most_tiles for mask in self.masks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(_Joined):
    """The complement of the mask in `masks`, including pairs that lie outside its arrays."""

    @override
    def __post_init__(self) -> None:
        is_valid = isinstance(self.masks, tuple) and all(isinstance(mask, Mask) for mask in self.masks)
        rule = "be a tuple of one mask (~a)"
        require(is_valid and len(self.masks) == 1, "Not.masks", rule, repr(self.masks))

    @override
    def __invert__(self) -> Mask:
        return self.masks[0]

    @override
    def join_kernel_masks(self, operands: tuple[KernelMask, ...]) -> KernelMask:
        (operand,) = operands
        return Inverted(operand=operand)

    @property
    @override
    def allows_all_past_keys(self) -> bool:
        return False

    @override
    def visible(self, pairs: Pairs) -> Any:
        return ~self.masks[0].visible(pairs)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        any_visible, all_visible = self.masks[0].coverage(tiles)
        return Coverage(~all_visible, ~any_visible)
