"""What a mask is, and the masks that are made of others by &, | and ~."""

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
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles
from jattn.pytree import replace
from pallas_kernels import support
from pallas_kernels.checks import require


class Mask(abc.ABC):
    """Which pairs of a query and a key see each other, and how much of a tile of pairs does.

    Compose with & and |. A class of one's own without arrays is registered by jax.tree_util.register_static.

    Attributes:
        row_axes: Which of its arrays may have a row for each request, and how many axes they have then. A
            mask with arrays must say; {} = none has.
    """

    row_axes: ClassVar[Mapping[str, int] | None] = None

    @abc.abstractmethod
    def visible(self, pairs: Pairs) -> Any:
        """Bool, of the shape that the pairs broadcast to (or one that broadcasts to it)."""

    @abc.abstractmethod
    def coverage(self, tiles: Tiles) -> Coverage:
        """How much of each tile is seen."""

    def __and__(self, other: "Mask") -> "Mask":
        return And(masks=(*_operands(self, And), *_operands(other, And)))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(masks=(*_operands(self, Or), *_operands(other, Or)))

    def __invert__(self) -> "Mask":
        return self.masks[0] if isinstance(self, Not) else Not(masks=(self,))

    def __bool__(self) -> bool:
        """As numpy's arrays: `and` and `or` would silently return one of two masks."""
        got = f"the truth value of a {type(self).__name__}, as `and`, `or` and `not` ask for it"
        raise TypeError(f"masks must be joined by &, | and ~, got {got}.")

    __rand__, __ror__ = __and__, __or__
    __array_ufunc__ = None  # numpy's arrays leave & and | to masks, which say what they are not

    @property
    def is_causal(self) -> bool:
        """No query sees a later key."""
        return False

    @property
    def allows_all_past_keys(self) -> bool:
        """Every query sees itself and all earlier keys."""
        return False

    @property
    def allows_future_keys(self) -> bool:
        """It is made to let queries see later keys, which causal attention would undo.

        Masks that choose among keys wherever these are, as blocks and documents do, are not: causal
        attention may be put on top.
        """
        return False

    @property
    def num_heads(self) -> tuple[int | None, int | None]:
        """Of how many query heads, and how many kv heads, there must be a multiple.

        1 where what is seen does not depend on heads; None where it depends on how many there are.
        """
        return 1, 1

    @property
    def has_exact_num_heads(self) -> bool:
        """There must be just so many query heads as num_heads says, no multiple of them."""
        return False

    @property
    def is_static(self) -> bool:
        """It holds no arrays, so it is hashable and may be a part of a spec."""
        return not jax.tree.leaves(self)

    def check(self, sizes: BatchSizes) -> None:
        """Raises ValueError where a step of these sizes asks for what the mask does not hold.

        An array with a row for each request must have the step's rows, or one for all of them.
        """
        rule = (
            f"have one row for all requests, or the {sizes.num_rows} rows of the metadata "
            "(mask.of_requests(metadata) makes them of the requests' rows; a mask of the decode rows alone "
            "goes with metadata.decode_region)"
        )
        for name, got in row_counts(self):
            require(got in (1, sizes.num_rows) or sizes.num_rows is None, name, rule, got)

    def map_rows(self, of: Callable[[Any], Any]) -> "Mask":
        """The mask with `of` applied to every array that has a row for each request."""
        changed = {name: of(array) for name, array in row_arrays(self).items()}
        return replace(self, **changed) if changed else self

    def slice_rows(self, first: int) -> "Mask":
        """The mask of a part of the batch that begins at row `first`."""
        return self if first == 0 else self.map_rows(lambda x: x if x.shape[0] == 1 else rows_from(x, first))

    def to_batch_rows(self, metadata: BatchMetadata) -> "Mask":
        """The mask of a step's rows, from one whose arrays are in the order of the requests.

        A bucket pads the decode rows, so prefill rows begin behind them; a mask is to have the metadata's
        rows. Traced or not; `advance` keeps the rows, so later steps take the same mask.

        Args:
            metadata: The step's, as build_batch_metadata made it of these requests.

        Raises:
            ValueError: There are more rows than the bucket has, or, where the metadata is not traced, another
                number than requests.
        """
        bucket, counts = metadata.bucket, (metadata.num_decodes, metadata.num_prefills)
        num_reqs = sum(map(int, counts)) if support.is_concrete(counts) else None
        for name, num_rows in row_counts(self):
            is_possible = num_rows <= bucket.max_reqs if num_reqs is None else num_rows == num_reqs
            rule = "have one row for each request"
            wanted = f"at most {bucket.max_reqs}" if num_reqs is None else num_reqs
            require(num_rows == 1 or is_possible, name, f"{rule} ({wanted})", num_rows)
        row = np.arange(bucket.max_reqs, dtype=np.int32)
        behind = jnp.asarray(metadata.num_decodes, jnp.int32) + (row - bucket.max_decodes)
        request = jnp.where(row < bucket.max_decodes, row, behind)
        # Padding rows get some request's: they have no keys.
        at_rows = lambda array: jnp.take(jnp.asarray(array), request, axis=0, mode="clip")
        return self.map_rows(lambda array: array if array.shape[0] == 1 else at_rows(array))


def check_is_mask(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a mask, and one that JAX can take apart."""
    got = f"a {type(value).__name__}"
    takes = "MaskFunction takes functions, BlockMask arrays of bool"
    require(isinstance(value, Mask), name, f"be a mask of jattn.masks ({takes})", got)
    rule = "be a pytree (jax.tree_util.register_static makes one of a class of masks without arrays)"
    for leaf in jax.tree.leaves(value):
        require(not isinstance(leaf, Mask), name, rule, f"a {type(leaf).__name__}")


def leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that a mask is composed of."""
    if isinstance(mask, _Joined):
        for operand in mask.masks:
            yield from leaves(operand)
    else:
        yield mask


def row_arrays(mask: Mask) -> dict[str, Any]:
    """The arrays of a mask, not of its operands, that have a row for each request."""
    if mask.is_static:
        return {}
    axes, name = mask.row_axes, type(mask).__name__
    rule = "name the arrays that may have a row for each request, with their axes"
    require(axes is not None, f"{name}.row_axes", rule, axes)
    arrays = {field: (getattr(mask, field), count) for field, count in (axes or {}).items()}
    return {field: array for field, (array, count) in arrays.items() if getattr(array, "ndim", None) == count}


def row_counts(mask: Mask) -> list[tuple[str, int]]:
    """The arrays that have a row for each request, by name, and how many rows."""
    return [
        (f"{type(leaf).__name__}.{field}", array.shape[0])
        for leaf in leaves(mask)
        for field, array in row_arrays(leaf).items()
    ]


def _operands(mask: Mask, kind: "type[_Joined]") -> tuple[Mask, ...]:
    check_is_mask("what a mask is joined with", mask)
    return mask.masks if isinstance(mask, kind) else (mask,)


@dataclasses.dataclass(frozen=True)
class _Joined(Mask):
    """Masks under &, | or ~."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        is_right = isinstance(self.masks, tuple) and all(isinstance(mask, Mask) for mask in self.masks)
        is_right = is_right and (len(self.masks) == 1 if isinstance(self, Not) else len(self.masks) > 0)
        rule = (
            "be a tuple of one mask (~a)" if isinstance(self, Not) else "be a tuple of masks (a & b, a | b)"
        )
        require(is_right, f"{type(self).__name__}.masks", rule, repr(self.masks))

    @override
    def map_rows(self, of: Callable[[Any], Any]) -> Mask:
        return type(self)(masks=tuple(mask.map_rows(of) for mask in self.masks))

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
        query, kv = zip(*(mask.num_heads for mask in self.masks), strict=True)
        # Where one mask says how many query heads there are, formulas are about as many.
        return _common([num for num in query if num] if self.has_exact_num_heads else query), _common(kv)

    @property
    @override
    def has_exact_num_heads(self) -> bool:
        return any(mask.has_exact_num_heads for mask in self.masks)


def _common(nums: Sequence[int | None]) -> int | None:
    """The heads of which some masks together need a multiple; None where one does not say."""
    return None if None in nums else math.lcm(*(num for num in nums if num))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(_Joined):
    """Pairs that every one of `masks` lets see each other."""

    @property
    @override
    def is_causal(self) -> bool:
        return any(mask.is_causal for mask in self.masks)

    @property
    @override
    def allows_future_keys(self) -> bool:
        return not self.is_causal and any(mask.allows_future_keys for mask in self.masks)

    @override
    def visible(self, pairs: Pairs) -> Any:
        return functools.reduce(operator.and_, (mask.visible(pairs) for mask in self.masks))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        any_visible, all_visible = zip(*(mask.coverage(tiles) for mask in self.masks), strict=True)
        return Coverage(
            functools.reduce(operator.and_, any_visible), functools.reduce(operator.and_, all_visible)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(_Joined):
    """Pairs that at least one of `masks` lets see each other."""

    @property
    @override
    def is_causal(self) -> bool:
        return all(mask.is_causal for mask in self.masks)

    @property
    @override
    def allows_future_keys(self) -> bool:
        # Beside causality itself, what another mask adds is later keys.
        is_more = (
            any(mask.is_causal and mask.allows_all_past_keys for mask in self.masks) and not self.is_causal
        )
        return is_more or any(mask.allows_future_keys for mask in self.masks)

    @override
    def visible(self, pairs: Pairs) -> Any:
        return functools.reduce(operator.or_, (mask.visible(pairs) for mask in self.masks))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        any_visible, all_visible = zip(*(mask.coverage(tiles) for mask in self.masks), strict=True)
        return Coverage(
            functools.reduce(operator.or_, any_visible), functools.reduce(operator.or_, all_visible)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(_Joined):
    """Pairs that the one of `masks` hides from each other, those outside of its arrays among them."""

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
