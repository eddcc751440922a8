"""Values of a tile as sums of a scalar, a vector along each axis and a tile, each with a pending factor.

Additions, and multiplications by constants and scalars, act on the terms. So they cost one operation per row,
per column or per tile instead of one per pair, and constant factors are folded.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

type TileAxes = tuple[int, ...]
type Constant = float | int
TILE: TileAxes = (0, 1)
MAX_EXACT = 2**24  # Integers up to here are exact in f32.
FACTORS = (2.0**-96, 2.0**96)  # Range of the factors that may be pending.
FACTOR_TOLERANCE = 1e-7  # of factors that are 1 but for rounding


class Term(NamedTuple):
    """One term of a sum, `array * (scale * factor)`.

    Attributes:
        source: Scalar, vector or tile, or a function that returns it when it is needed: an unused array would
            have no layout.
        factor: Pending factor, a Python number.
        scale: Another one, a scalar of the kernel; None for 1.
        end: The array's elements are in [0, end), if known.
        as_float: Function that returns the array in f32, if there is a cheaper way than to convert it.
    """

    source: Any
    factor: Constant = 1
    scale: Any = None
    end: int | None = None
    as_float: Callable[[], Any] | None = None

    @property
    def array(self) -> Any:
        """The scalar, vector or tile."""
        return self.source() if callable(self.source) else self.source

    def scaled(self, *, by: Constant = 1) -> Any:
        """Return the term times a Python number."""
        factor = self.factor * by
        if self.scale is None:
            return self.array if factor == 1 else self.array * factor
        return self.array * (self.scale if factor == 1 else self.scale * factor)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A value of each pair of a tile.

    Attributes:
        dtype: f32, int32 or bool.
        terms: Terms of the sum by their axes; a bool has one at most.
        constant: Python number that is added to them.
    """

    dtype: Any
    terms: Mapping[TileAxes, Term] = dataclasses.field(default_factory=dict)
    constant: Constant = 0

    @classmethod
    def of(cls, array: Any, axes: TileAxes, factor: Constant = 1) -> "Sum":
        """Return a sum of one term."""
        return cls(array.dtype, {axes: Term(array, factor)})

    @property
    def axes(self) -> TileAxes:
        """The axes that the sum varies along."""
        return tuple(sorted(set().union(*self.terms)))

    def times(self, factor: Constant) -> "Sum":
        """Return the sum times a Python number."""
        terms = {
            axes: term._replace(factor=_rounded(term.factor * factor)) for axes, term in self.terms.items()
        }
        return Sum(self.dtype, terms, self.constant * factor)

    def plus(self, other: "Sum") -> "Sum":
        """Return the sum of two sums."""
        terms = dict(self.terms)
        for axes, term in other.terms.items():
            terms[axes] = _add(terms[axes], term, self.dtype) if axes in terms else term
        return Sum(self.dtype, terms, self.constant + other.constant)

    def array(self, shape: tuple[int, int], axes: TileAxes | None = None) -> Any:
        """Return the value as an array.

        Args:
            shape: Shape of the tile.
            axes: TileAxes that the array has; None for those that the sum varies along.
        """
        axes = self.axes if axes is None else axes
        broadcast = functools.partial(_broadcast, shape=shape, axes=axes)
        if self.dtype == jnp.bool_:
            if not self.terms:
                return broadcast(jnp.asarray(bool(self.constant)), ())
            ((term_axes, term),) = self.terms.items()
            return broadcast(term.array, term_axes)
        # The scalar, with the constant, is added to a vector first if there is one.
        terms, rest = dict(self.terms), self.constant
        if () in terms:
            rest = _plus(terms.pop(()), rest)
        vectors = [vector for vector in ((0,), (1,)) if vector in terms]
        if not vectors and TILE not in terms:
            return broadcast(jnp.asarray(rest, self.dtype), ())
        arrays = []
        for vector in vectors:
            # Columns are multiplied after the broadcast: the product and the sum are one operation.
            array = terms[vector].array if vector == (0,) else broadcast(terms[vector].array, vector)
            total = _plus(terms[vector]._replace(source=array), rest if vector == vectors[0] else 0)
            arrays.append(broadcast(total, vector) if total.ndim < len(axes) else total)
        if TILE in terms:
            rest = 0 if vectors else rest
            arrays.append(_plus(terms[TILE], rest))
        return functools.reduce(lambda x, y: x + y, reversed(arrays))


def product(x: Sum, y: Sum) -> Sum | None:
    """Return the product of two sums, if one is a number or a scalar, or None."""
    if not y.terms and is_foldable(x, y.constant):
        return x.times(y.constant)
    if not x.terms and is_foldable(y, x.constant):
        return y.times(x.constant)
    if y.axes and not x.axes:
        x, y = y, x
    if y.axes or not x.axes:
        return None
    scalar = y.array((1, 1))
    terms: dict[TileAxes, Term] = {}
    for axes, term in x.terms.items():
        # Scalars are multiplied first: that costs one operation.
        scale = scalar if term.scale is None else scalar * term.scale
        terms[axes] = Term(term.source, term.factor, scale) if axes else Term(term.scaled() * scalar)
    if x.constant:
        terms[()] = Term(_plus(terms[()], 0) + scalar * x.constant if () in terms else scalar * x.constant)
    return Sum(x.dtype, terms)


def is_foldable(x: Sum, factor: Constant) -> bool:
    """Return whether a factor can be pending: neither 0, infinite nor NaN, nor too large or too small."""
    if x.dtype == jnp.bool_ or not np.isfinite(factor):
        return False
    low, high = FACTORS if x.dtype == jnp.float32 else (1, 2**20)
    return all(low <= abs(term.factor * factor) <= high for term in x.terms.values())


def to_float(x: Sum) -> Sum | None:
    """Return an int32 sum in f32, if its terms can be converted one by one without rounding, or None."""
    vectors = {axes: term for axes, term in x.terms.items() if axes}
    ends = [term.end for term in vectors.values()]
    is_exact = all(
        term.end is not None and term.scale is None and term.end * abs(term.factor) <= MAX_EXACT
        for term in vectors.values()
    )
    if not ends or not is_exact or TILE in vectors:
        return None
    terms = {
        axes: Term(term.array.astype(jnp.float32) if term.as_float is None else term.as_float(), term.factor)
        for axes, term in vectors.items()
    }
    constant = float(x.constant)
    if () in x.terms:
        terms[()], constant = Term(_plus(x.terms[()], x.constant).astype(jnp.float32)), 0.0
    return Sum(jnp.dtype(jnp.float32), terms, constant)


def common_axes(values: Sequence[Sum]) -> TileAxes:
    """Return the axes that any of the values varies along."""
    return tuple(sorted(set().union(*(value.axes for value in values))))


def _broadcast(array: Any, array_axes: TileAxes, *, shape: tuple[int, int], axes: TileAxes) -> Any:
    if array_axes == axes:
        return array
    return lax.broadcast_in_dim(
        array, tuple(shape[axis] for axis in axes), [axes.index(axis) for axis in array_axes]
    )


def _rounded(factor: Constant) -> Constant:
    return 1 if abs(factor - 1) < FACTOR_TOLERANCE else factor


def _plus(term: Term, addend: Any) -> Any:
    """Return a term plus an array or number of the same or fewer axes."""
    if isinstance(addend, float | int) and addend == 0:
        return term.scaled()
    is_negated = term.factor == -1 and term.scale is None
    return addend - term.array if is_negated else term.scaled() + addend


def _add(x: Term, y: Term, dtype: Any) -> Term:
    """Return the sum of two terms with the same axes."""
    if x.scale is y.scale and x.factor == y.factor:
        return Term(x.array + y.array, x.factor, x.scale)
    if x.scale is y.scale and x.factor == -y.factor:
        return Term(x.array - y.array, x.factor, x.scale)
    if dtype != jnp.float32 or (x.scale is not None and y.scale is not None):
        return Term(x.scaled() + y.scaled())
    # Scores keep their factor, which the softmax multiplies them by for nothing.
    if x.scale is not None or (y.scale is None and x.factor == 1):
        x, y = y, x
    return Term(x.array + y.scaled(by=1 / x.factor), x.factor)
