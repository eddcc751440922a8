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
from pallas_kernels.score_mod.operations import OPERATIONS
from pallas_kernels.score_mod.tracing import (
    ScoreModType,
    TableType,
    Traces,
    inner_jaxpr,
    look_up_p,
    trace,
    trace_settings,
)
from pallas_kernels.shared.types import Layout, Ref, Scalar, Tile

W = plgpu.Layout.WGMMA
LAYOUTS: Mapping[tuple[int, ...], Layout] = {(0,): W.reduce(1), (1,): W.reduce(0), (0, 1): W}


class PairValue(NamedTuple):
    """A value of the pairs of a tile: a scalar, or one element per row, per column or per pair.

    Attributes:
        array: The value.
        axes: Axes of the tile that the array has: (), (0,), (1,) or (0, 1).
    """

    array: Any
    axes: tuple[int, ...]


class ScoreTile(NamedTuple):
    """The pairs of a tile of scores. The functions are called only for what a score function reads.

    Attributes:
        shape: Shape of the tile.
        request: Index of the request.
        head: Function that returns the query head.
        query: Function that returns the position of the query in its sequence.
        key: Function that returns the position of the key in its sequence.
        is_interpreted: Whether the kernel runs in interpret mode.
    """

    shape: tuple[int, int]
    request: Scalar
    head: Callable[[], PairValue]
    query: Callable[[], PairValue]
    key: Callable[[], PairValue]
    is_interpreted: bool


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

    def apply(self, s: Tile, tile: ScoreTile) -> Tile:
        """Return the new scores of a tile.

        Args:
            s: Scores of the tile in natural units, f32.
            tile: Pairs of the tile.
        """
        (value,) = self._evaluate(self._traces().value, s, tile)
        return value

    def apply_with_derivative(self, s: Tile, tile: ScoreTile) -> tuple[Tile, Tile | None]:
        """Return the new scores of a tile, and their derivatives by the scores; None if these are all 1."""
        jaxpr = self._traces().value_and_derivative
        derivative = jaxpr.outvars[1]
        if isinstance(derivative, Literal) and derivative.val == 1.0:
            return self.apply(s, tile), None
        new_scores, derivatives = self._evaluate(jaxpr, s, tile)
        return new_scores, derivatives

    def _traces(self) -> Traces:
        traces = trace(self.function, trace_settings())
        assert not isinstance(traces, str), traces
        return traces

    def _evaluate(self, jaxpr: Jaxpr, s: Tile, tile: ScoreTile) -> list[Tile]:
        evaluation = _Evaluation(self.arrays, tile)
        is_used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
        is_used |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        inputs = (
            lambda: PairValue(s, (0, 1)),
            lambda: PairValue(tile.request + self.first_row, ()),
            tile.head,
            tile.query,
            tile.key,
        )
        args = [
            value() if variable in is_used else None
            for variable, value in zip(jaxpr.invars, inputs, strict=True)
        ]
        results = evaluation.run(jaxpr, (), args)
        tiles = [evaluation.broadcast(result, (0, 1)) for result in results]
        # A result that depends on no score may be a constant, which has no layout.
        return tiles if tile.is_interpreted else [plgpu.layout_cast(x, W) for x in tiles]


class _Evaluation(NamedTuple):
    """Evaluation of the jaxpr of a score function on a tile."""

    arrays: tuple[Ref, ...]
    tile: ScoreTile

    def run(
        self, jaxpr: Jaxpr, constants: Sequence[Any], args: Sequence[PairValue | None]
    ) -> list[PairValue]:
        """Return the results of a jaxpr."""
        values: dict[Any, PairValue | None] = dict(zip(jaxpr.invars, args, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            values[variable] = PairValue(jnp.asarray(constant), ())

        def read(variable: Any) -> PairValue:
            if isinstance(variable, Literal):
                literal_type: Any = variable.aval
                return PairValue(jnp.asarray(variable.val, literal_type.dtype), ())
            value = values[variable]
            assert value is not None
            return value

        for eqn in jaxpr.eqns:
            inputs, inner = [read(variable) for variable in eqn.invars], inner_jaxpr(eqn)
            if inner is not None:
                outputs = self.run(inner.jaxpr, inner.consts, inputs)
            else:
                axes = tuple(sorted(set().union(*(value.axes for value in inputs))))
                broadcast = [self.broadcast(value, axes) for value in inputs]
                if eqn.primitive is look_up_p:
                    output = self.look_up(broadcast, axes, **eqn.params)
                else:
                    output = OPERATIONS[eqn.primitive.name](eqn, *broadcast)
                outputs = [PairValue(output, axes)]
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def broadcast(self, value: PairValue, axes: tuple[int, ...]) -> Any:
        """Return a value with an element for each element along the given axes."""
        if value.axes == axes:
            return value.array
        shape = tuple(self.tile.shape[axis] for axis in axes)
        return lax.broadcast_in_dim(value.array, shape, [axes.index(axis) for axis in value.axes])

    def look_up(
        self, indices: Sequence[Any], axes: tuple[int, ...], *, table: int, kernel_type: TableType
    ) -> Any:
        """Return elements of an array. As in JAX, indices below 0 count from the end; others are clipped."""
        index: Any = jnp.int32(0)
        for i, size in zip(indices, kernel_type.shape, strict=True):
            i = jnp.clip(jnp.where(i < 0, i + size, i), 0, size - 1)
            index = index * size + i
        array = self.arrays[table]
        if axes:
            element = look_up(array, index, layout=LAYOUTS[axes], is_interpreted=self.tile.is_interpreted)
        else:
            element = array[index]
        return element != 0 if kernel_type.dtype == jnp.bool_ else element
