"""Evaluation of a score function on a tile of scores."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Jaxpr, Literal

from pallas_kernels.ptx.look_up import look_up
from pallas_kernels.score_mod.intervals import UNKNOWN, Bounds, bounds_in
from pallas_kernels.score_mod.operations import OPERATIONS
from pallas_kernels.score_mod.sums import (
    TILE,
    Sum,
    Term,
    TileAxes,
    common_axes,
    is_foldable,
    product,
    to_float,
)
from pallas_kernels.score_mod.tracing import (
    ScoreModType,
    Traces,
    look_up_p,
    trace,
    trace_settings,
)
from pallas_kernels.shared.layouts import COLUMN, ROW, WGMMA
from pallas_kernels.shared.types import Layout, Ref, Rows, Scalar, Tile

LAYOUTS: Mapping[tuple[int, ...], Layout] = {(0,): ROW, (1,): COLUMN, (0, 1): WGMMA}


class PairValue(NamedTuple):
    """A value of the pairs of a tile: a scalar, or one element per row or per column.

    Attributes:
        value: Function that returns the value.
        axes: TileAxes of the tile that the value has: (), (0,) or (1,).
    """

    value: Callable[[], Any]
    axes: TileAxes


class Positions(NamedTuple):
    """Positions in the sequence of the queries, or of the keys, of a tile.

    Attributes:
        first: Position of index 0.
        indices: Function that returns the indices of rows or columns, which are added to `first`; None for a
            single position.
        axes: TileAxes of the tile that the positions vary along: (), (0,) or (1,).
        num: Indices are in [0, num); None if that is not known.
        float_indices: Function that returns the indices in f32, if converting them costs more.
    """

    first: Scalar
    indices: Callable[[], Any] | None
    axes: TileAxes
    num: int | None
    float_indices: Callable[[], Any] | None = None

    def as_sum(self) -> Sum:
        """Return the positions as a sum."""
        terms: dict[TileAxes, Term] = {(): Term(self.first)}
        if self.indices is not None:
            terms[self.axes] = Term(self.indices, end=self.num, as_float=self.float_indices)
        return Sum(jnp.dtype(jnp.int32), terms)

    def bounds(self) -> Bounds:
        """Return the first and the last position, or None."""
        if self.indices is None:
            return self.first, self.first
        return None if self.num is None else (self.first, self.first + (self.num - 1))


class ScoreTile(NamedTuple):
    """The pairs of a tile of scores. The functions are called only for what a score function reads.

    Attributes:
        shape: Shape of the tile.
        request: Index of the request.
        head: Query head.
        query: Positions of the queries.
        key: Positions of the keys.
        query_axis: Axis along which the queries are.
        is_interpreted: Whether the kernel runs in interpret mode.
    """

    shape: tuple[int, int]
    request: Scalar
    head: PairValue
    query: Positions
    key: Positions
    query_axis: int
    is_interpreted: bool


class NewScores(NamedTuple):
    """Scores of a tile, as `tile * factor + query_term`.

    Attributes:
        tile: One element per pair.
        factor: Python number, which is positive.
        query_term: Scalar or one element per query, or None.
    """

    tile: Tile
    factor: float
    query_term: Scalar | Rows | None = None


class Lookups(NamedTuple):
    """Elements of arrays that are loaded before the scores are known, by the number of the equation.

    Attributes:
        elements: Elements that depend on no pair of a query and a key.
        uniform: Elements of lookups at an index per pair, if these indices are the same for all keys.
        is_uniform: Whether they are; None if that is not known for a tile.
    """

    elements: dict[int, Any]
    uniform: dict[int, Any]
    is_uniform: Scalar | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["function", "first_row"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelScoreMod:
    """A score function as kernels take it; why_no_kernel must be None.

    Attributes:
        arrays: The arrays as vectors of f32 or int32. They stay in global memory: in a kernel they are
            references.
        function: Function and types of the arrays. Static.
        first_row: Row of the batch that request 0 is. Static.
    """

    arrays: tuple[Ref, ...]
    function: ScoreModType
    first_row: int = 0

    @classmethod
    def of(cls, function: ScoreModType, arrays: Sequence[Any], first_row: int) -> "KernelScoreMod":
        """Return a score function with its arrays."""
        stored = [
            jnp.asarray(array)
            .reshape(-1)
            .astype(table.kernel_dtype if table.dtype != np.bool_ else jnp.int32)
            for array, table in zip(arrays, function.tables, strict=True)
        ]
        return cls(arrays=tuple(stored), function=function, first_row=first_row)

    @property
    def max_score(self) -> float | None:
        """Bound of the absolute values of the new scores, whatever the scores are; None if there is none."""
        bounds = self._traces().bounds
        max_score = np.inf if bounds is None else float(max(abs(bound) for bound in bounds))
        return max_score if np.isfinite(max_score) else None

    @property
    def is_increasing(self) -> bool:
        """Return whether the derivatives are known to be finite and not negative."""
        bounds = self._traces().derivative_bounds
        return bounds is not None and bounds[0] >= 0 and bool(np.isfinite(bounds[1]))

    def load(self, tile: ScoreTile, *, with_derivative: bool = False, finds_uniform: bool = True) -> Lookups:
        """Load what the score function of a tile looks up and what does not depend on the scores.

        Callers load early, because the arrays are in global memory.

        Args:
            tile: Pairs of the tile.
            with_derivative: Whether the lookups are for `apply_with_derivative`. Static.
            finds_uniform: Whether tiles whose lookups per pair have equal indices are computed in a branch of
                their own, which takes registers. Static.
        """
        return self._evaluation(tile, with_derivative=with_derivative).load(finds_uniform=finds_uniform)

    def apply(self, s: Tile, factor: float, tile: ScoreTile, lookups: Lookups) -> NewScores:
        """Return the new scores of a tile.

        Args:
            s: Scores of the tile before they are multiplied by `factor`, f32.
            factor: Factor that converts them to natural units. Static.
            tile: Pairs of the tile.
            lookups: Result of `load`.
        """
        new_scores, _ = self._evaluation(tile).run(s, factor, lookups)
        return new_scores

    def apply_with_derivative(
        self, s: Tile, factor: float, tile: ScoreTile, lookups: Lookups
    ) -> tuple[NewScores, Tile | None]:
        """Return the new scores of a tile, and their derivatives by the scores; None if these are all 1."""
        return self._evaluation(tile, with_derivative=True).run(s, factor, lookups)

    def _traces(self) -> Traces:
        traces = trace(self.function, trace_settings())
        assert not isinstance(traces, str), traces
        return traces

    def _evaluation(self, tile: ScoreTile, *, with_derivative: bool = False) -> "_Evaluation":
        traces = self._traces()
        adds_only = traces.is_derivative_one
        jaxpr = traces.value_and_derivative if with_derivative and not adds_only else traces.value
        return _Evaluation(self.arrays, jaxpr, tile, self.first_row, adds_only)


class _Evaluation(NamedTuple):
    """Evaluation of the jaxpr of a score function on a tile.

    Attributes:
        arrays: Arrays that the function looks up.
        jaxpr: The function of score, request, head and both positions, maybe with its derivative.
        tile: Pairs of the tile.
        first_row: Row of the batch that request 0 is.
        adds_only: Whether the new score is the score plus something that does not depend on it.
    """

    arrays: tuple[Ref, ...]
    jaxpr: Jaxpr
    tile: ScoreTile
    first_row: int
    adds_only: bool

    def load(self, *, finds_uniform: bool) -> Lookups:
        """Load what does not depend on the scores, and neither on both queries and keys."""
        axes = self._axes()
        numbers = [n for n, eqn in enumerate(self.jaxpr.eqns) if eqn.primitive is look_up_p]
        # Columns take too many registers.
        early = [n for n in numbers if axes[self.jaxpr.eqns[n].outvars[0]] in ((), (0,))]
        outputs = {n: self.jaxpr.eqns[n].outvars[0] for n in early}
        read = self._evaluate(list(outputs.values()))
        elements = {n: read(output).array(self.tile.shape) for n, output in outputs.items()}
        return Lookups(elements, *(self._load_uniform(axes, numbers) if finds_uniform else ({}, None)))

    def _load_uniform(
        self, axes: Mapping[Any, TileAxes], numbers: Sequence[int]
    ) -> tuple[dict[int, Any], Scalar | None]:
        """Return the elements of lookups per pair at their first index, and whether all indices are equal."""
        axes_of_lookups = {n: axes[self.jaxpr.eqns[n].outvars[0]] for n in numbers}
        per_pair = [n for n in numbers if axes_of_lookups[n] == TILE]
        # Elements per key would remain, and take the registers that a branch needs.
        if not per_pair or (1 - self.tile.query_axis,) in axes_of_lookups.values():
            return {}, None
        tile, key_axis = self.tile, 1 - self.tile.query_axis
        request = self.tile.request + self.first_row
        head = tile.head.value() if not tile.head.axes else None
        head_bounds = None if head is None else (head, head)
        bounds = bounds_in(
            self.jaxpr, [None, (request, request), head_bounds, tile.query.bounds(), tile.key.bounds()]
        )
        reduced: dict[int, list[Scalar | None]] = {n: [] for n in per_pair}
        is_uniform = jnp.bool_(True)
        for n, scalars in reduced.items():
            eqn = self.jaxpr.eqns[n]
            for variable, size in zip(eqn.invars, eqn.params["kernel_type"].shape, strict=True):
                if isinstance(variable, Literal) or key_axis not in axes[variable]:
                    scalars.append(None)
                    continue
                variable_bounds = bounds(variable)
                if variable_bounds is None:
                    return {}, None
                low, high = [jnp.int32(bound) for bound in variable_bounds]
                # Indices below 0 count from the end: their order differs from that of the elements.
                has_one_sign = (low < 0) == (high < 0)
                is_uniform = is_uniform & has_one_sign & (low <= high)
                is_uniform = is_uniform & (_in_range(low, size) == _in_range(high, size))
                scalars.append(low)
        others = [
            variable
            for n, scalars in reduced.items()
            for variable, scalar in zip(self.jaxpr.eqns[n].invars, scalars, strict=True)
            if scalar is None
        ]
        read, uniform = self._evaluate(others), {}
        for n, scalars in reduced.items():
            eqn = self.jaxpr.eqns[n]
            indices = [
                read(variable) if scalar is None else Sum.of(scalar, ())
                for variable, scalar in zip(eqn.invars, scalars, strict=True)
            ]
            uniform[n] = self._look_up(eqn, indices).array(tile.shape)
        return uniform, is_uniform

    def run(self, s: Tile, factor: float, lookups: Lookups) -> tuple[NewScores, Tile | None]:
        """Return the new scores of a tile and, if the jaxpr has them, their derivatives."""
        axes = self._axes()
        eqns, key_axis = self.jaxpr.eqns, 1 - self.tile.query_axis
        loaded = {n: Sum.of(x, axes[eqns[n].outvars[0]]) for n, x in lookups.elements.items()}
        uniform = dict(loaded)
        for n, element in lookups.uniform.items():
            index_axes = [axes[v] for v in eqns[n].invars if not isinstance(v, Literal)]
            kept = set().union(*(element_axes for element_axes in index_axes if key_axis not in element_axes))
            uniform[n] = Sum.of(element, tuple(sorted(kept)))
        score = Sum.of(s, TILE, factor)

        def results(loaded: Mapping[int, Sum]) -> list[Sum]:
            return list(map(self._evaluate(self.jaxpr.outvars, loaded, score), self.jaxpr.outvars))

        def as_tiles(loaded: Mapping[int, Sum]) -> tuple[Tile, ...]:
            return tuple(self._tile(result) for result in results(loaded))

        if lookups.is_uniform is None:
            value, *derivative = results(loaded)
            return self._split(value), self._tile(derivative[0]) if derivative else None
        if not self.adds_only:
            new, *derivatives = lax.cond(
                lookups.is_uniform, lambda: as_tiles(uniform), lambda: as_tiles(loaded)
            )
            return NewScores(new, 1.0), derivatives[0] if derivatives else None
        # Where all indices are equal, the scores stay as they are, and a term per query is added.
        new_scores = self._split(results(uniform)[0])

        def add_elements() -> tuple[Tile, Any]:
            (value,) = results(loaded)
            query_term = new_scores.query_term
            if query_term is not None:
                # A branch cannot return a literal.
                zero = (self.tile.request * 0).astype(jnp.float32)
                query_term = self._with_layout(jnp.broadcast_to(zero, query_term.shape))
            return self._tile(value.times(1 / new_scores.factor)), query_term

        tile, query_term = lax.cond(
            lookups.is_uniform, lambda: (new_scores.tile, new_scores.query_term), add_elements
        )
        return NewScores(tile, new_scores.factor, query_term), None

    def _split(self, value: Sum) -> NewScores:
        """Return a value with a term per query, if there is one, apart from its tile."""
        query_axes: TileAxes = (self.tile.query_axis,)
        key_axes: TileAxes = (1 - self.tile.query_axis,)
        term = value.terms.get(TILE)
        if term is None or term.factor <= 0 or term.scale is not None:
            return NewScores(self._tile(value), 1.0)
        of_tile: dict[TileAxes, Term] = {
            axes: value.terms[axes] for axes in (TILE, key_axes) if axes in value.terms
        }
        of_query: dict[TileAxes, Term] = {
            axes: value.terms[axes] for axes in ((), query_axes) if axes in value.terms
        }
        tile = self._tile(Sum(value.dtype, of_tile).times(1 / term.factor))
        query_term = None
        if of_query or value.constant:
            query_term = Sum(value.dtype, of_query, value.constant).array(self.tile.shape)
        return NewScores(tile, float(term.factor), query_term)

    def _tile(self, value: Sum) -> Tile:
        """Return a value per pair."""
        return self._with_layout(value.array(self.tile.shape, TILE))

    def _with_layout(self, x: Any) -> Any:
        """Return a vector along the queries or a tile with its layout, which constants do not have."""
        if self.tile.is_interpreted or not x.ndim:
            return x
        return plgpu.layout_cast(x, LAYOUTS[TILE if x.ndim == 2 else (self.tile.query_axis,)])

    def _axes(self) -> dict[Any, TileAxes]:
        """Return the axes that each variable varies along."""
        tile = self.tile
        inputs = (TILE, (), tile.head.axes, tile.query.axes, tile.key.axes)
        axes: dict[Any, TileAxes] = dict(zip(self.jaxpr.invars, inputs, strict=True))
        for eqn in self.jaxpr.eqns:
            of_inputs = [axes[v] for v in eqn.invars if not isinstance(v, Literal)]
            axes[eqn.outvars[0]] = tuple(sorted(set().union(*of_inputs)))
        return axes

    def _evaluate(
        self, outputs: Sequence[Any], loaded: Mapping[int, Sum] | None = None, score: Sum | None = None
    ) -> Callable[[Any], Sum]:
        """Return a function that returns the value of an output, which is a variable or a literal.

        Args:
            outputs: The outputs. Only what they depend on is computed.
            loaded: Elements of lookups, by the number of the equation.
            score: The score; None if no output depends on it.
        """
        jaxpr, loaded = self.jaxpr, loaded or {}
        needed = {v for v in outputs if not isinstance(v, Literal)}
        for n, eqn in reversed(list(enumerate(jaxpr.eqns))):
            if eqn.outvars[0] in needed and n not in loaded:
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        tile, int32 = self.tile, jnp.dtype(jnp.int32)
        inputs: tuple[Callable[[], Any], ...] = (
            lambda: score,
            lambda: Sum(int32, {(): Term(tile.request)}, self.first_row),
            lambda: Sum.of(tile.head.value(), tile.head.axes),
            tile.query.as_sum,
            tile.key.as_sum,
        )
        values: dict[Any, Sum] = {
            variable: value()
            for variable, value in zip(jaxpr.invars, inputs, strict=True)
            if variable in needed
        }

        def read(variable: Any) -> Sum:
            if not isinstance(variable, Literal):
                return values[variable]
            constant = np.asarray(variable.val)
            return Sum(jnp.dtype(constant.dtype), {}, constant.item())

        for n, eqn in enumerate(jaxpr.eqns):
            if eqn.outvars[0] in needed:
                values[eqn.outvars[0]] = loaded[n] if n in loaded else self._equation(eqn, read)
        return read

    def _equation(self, eqn: Any, read: Callable[[Any], Sum]) -> Sum:
        """Return the result of an equation."""
        inputs, name = [read(variable) for variable in eqn.invars], eqn.primitive.name
        if eqn.primitive is look_up_p:
            return self._look_up(eqn, inputs)
        result: Sum | None = None
        if name in ("add", "add_any"):
            result = inputs[0].plus(inputs[1])
        elif name == "sub":
            result = inputs[0].plus(inputs[1].times(-1))
        elif name == "neg":
            result = inputs[0].times(-1)
        elif name == "mul":
            result = product(*inputs)
        elif name == "div" and not inputs[1].terms and inputs[0].dtype == jnp.float32 and inputs[1].constant:
            reciprocal = 1 / inputs[1].constant
            result = inputs[0].times(reciprocal) if is_foldable(inputs[0], reciprocal) else None
        elif name == "convert_element_type" and eqn.params["new_dtype"] == jnp.float32:
            result = to_float(inputs[0]) if inputs[0].dtype == jnp.int32 else None
        if result is not None:
            return result
        axes = common_axes(inputs)
        arrays = [value.array(self.tile.shape, axes) for value in inputs]
        return Sum.of(OPERATIONS[name](eqn, *arrays), axes)

    def _look_up(self, eqn: Any, indices: Sequence[Sum]) -> Sum:
        """Return elements of an array. As in JAX, indices below 0 count from the end; others are clipped."""
        axes, kernel_type = common_axes(indices), eqn.params["kernel_type"]
        bounds = bounds_in(self.jaxpr, UNKNOWN)
        index: Any = jnp.int32(0)
        for variable, value, size in zip(eqn.invars, indices, kernel_type.shape, strict=True):
            i, index_bounds = value.array(self.tile.shape, axes), bounds(variable)
            if index_bounds is None or index_bounds[0] < 0 or index_bounds[1] >= size:
                i = _in_range(i, size)
            index = index * size + i
        array = self.arrays[eqn.params["table"]]
        if axes:
            element = look_up(array, index, layout=LAYOUTS[axes], is_interpreted=self.tile.is_interpreted)
        else:
            element = array[index]
        return Sum.of(element != 0 if kernel_type.dtype == jnp.bool_ else element, axes)


def _in_range(i: Any, size: int) -> Any:
    """Return an index as a number from 0 to size - 1."""
    return jnp.clip(jnp.where(i < 0, i + size, i), 0, size - 1)
