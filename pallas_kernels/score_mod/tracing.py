"""Score functions as jaxprs of scalars, and why kernels cannot evaluate some."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, partial_eval

from pallas_kernels.score_mod.intervals import UNKNOWN, Bounds, bounds_in
from pallas_kernels.score_mod.operations import OPERATIONS, floor_divide_p

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.int32), jnp.dtype(jnp.bool_))
MAX_ELEMENTS = 2**31 - 1  # of an array, which int32 indexes


class TableType(NamedTuple):
    """Shape and dtype of an array that a score function looks up."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def kernel_dtype(self) -> np.dtype:
        """Dtype in which a kernel computes with the elements: f32, int32 or bool."""
        if self.dtype == np.bool_:
            return jnp.dtype(jnp.bool_)
        return jnp.dtype(jnp.float32 if jnp.issubdtype(self.dtype, jnp.floating) else jnp.int32)


class ScoreModType(NamedTuple):
    """The static part of a score function.

    Attributes:
        function: Function of score, batch, head, query position and key position, all scalars, and the
            arrays. It is hashed by identity.
        tables: Types of the arrays.
    """

    function: Callable[..., Any]
    tables: tuple[TableType, ...] = ()

    @override
    def __str__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


look_up_p = Primitive("look_up")  # of scalar indices, one per axis of the array


@look_up_p.def_abstract_eval
def _(*indices: Any, table: int, kernel_type: TableType) -> Any:
    return jax.core.ShapedArray((), kernel_type.dtype)


def _look_up_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    element = look_up_p.bind(*primals, **params)
    return element, ad.instantiate_zeros(ad.Zero(jax.typeof(element).to_tangent_aval()))


ad.primitive_jvps[look_up_p] = _look_up_jvp


@dataclasses.dataclass(frozen=True)
class _TracedTable:
    """Stands for an array while a score function is traced; only indexing by scalars reads it."""

    number: int
    table: TableType
    indices: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape[len(self.indices) :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.table.kernel_dtype

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        for i in index:
            is_scalar = isinstance(i, int | np.integer) or getattr(i, "shape", None) == ()
            if not is_scalar or isinstance(i, bool) or not jnp.issubdtype(jnp.result_type(i), jnp.integer):
                raise TypeError(f"an array is indexed by {i}, which is no integer scalar")
        if len(index) > self.ndim:
            raise TypeError(f"an array with {self.ndim} axes is indexed by {len(index)} integers")
        table = dataclasses.replace(self, indices=self.indices + index)
        return table.read() if not table.ndim else table

    def read(self) -> Any:
        indices = [lax.convert_element_type(index, jnp.int32) for index in self.indices]
        kernel_type = self.table._replace(dtype=self.dtype)
        return look_up_p.bind(*indices, table=self.number, kernel_type=kernel_type)


class _Unsupported(Exception):
    """A reason why kernels cannot evaluate a score function."""


def why_no_kernel(function: ScoreModType) -> str | None:
    """Return why kernels cannot evaluate a score function; None if they can."""
    reason = trace(function, trace_settings())
    return reason if isinstance(reason, str) else None


def looks_up_each_pair(function: ScoreModType) -> bool:
    """Return whether kernels look up elements for each key, even of tiles far from the diagonal.

    They do unless all indices that depend on the key are bounded by the positions of a tile, as a clipped
    distance is.
    """
    traces = trace(function, trace_settings())
    assert not isinstance(traces, str), traces
    jaxpr = traces.value
    score, _, _, query, key = jaxpr.invars
    per_key, per_query = {score, key}, {score, query}
    positions = (0, 0), (0, 0), (0, 1), (0, 1)
    bounds = bounds_in(jaxpr, [None, *positions])
    for eqn in jaxpr.eqns:
        variables = {variable for variable in eqn.invars if not isinstance(variable, Literal)}
        indices = variables & per_key
        per_key.update(eqn.outvars if indices else ())
        per_query.update(eqn.outvars if variables & per_query else ())
        if eqn.primitive is look_up_p and indices:
            is_per_pair = bool(variables & per_query)
            if not is_per_pair or any(bounds(index) is None for index in indices):
                return True
    return False


def trace_settings() -> tuple[Any, ...]:
    """Return the settings of JAX that the trace of a function depends on."""
    return jax.config.jax_numpy_dtype_promotion, jax.config.jax_enable_x64


class Traces(NamedTuple):
    """A score function as a jaxpr, and the function together with its derivative by the score.

    Attributes:
        value: The function. As in the other jaxpr, no equation calls a jaxpr, and none has only constants.
        value_and_derivative: The function and its derivative.
        bounds: Bounds of the new score for any arguments, or None.
        derivative_bounds: Bounds of the derivative, or None.
    """

    value: Jaxpr
    value_and_derivative: Jaxpr
    bounds: Bounds
    derivative_bounds: Bounds

    @property
    def is_derivative_one(self) -> bool:
        """Return whether the function adds something to the score that does not depend on it."""
        return self.derivative_bounds == (1.0, 1.0)


@functools.lru_cache(maxsize=256)
def trace(function: ScoreModType, promotion: tuple[Any, ...]) -> "Traces | str":
    """Trace a score function; return why kernels cannot evaluate it if they cannot."""

    def value(score: Any, *indices: Any) -> Any:
        tables = [_TracedTable(number, table) for number, table in enumerate(function.tables)]
        arrays = [table if table.ndim else table.read() for table in tables]
        result = jnp.asarray(function.function(score, *indices, *arrays))
        if result.shape or not jnp.issubdtype(result.dtype, jnp.floating):
            raise _Unsupported("it does not return a scalar of float dtype")
        return lax.convert_element_type(result, jnp.float32)

    def value_and_derivative(score: Any, *indices: Any) -> Any:
        return jax.jvp(lambda score: value(score, *indices), (score,), (jnp.float32(1.0),))

    try:
        for table in function.tables:
            if not 0 < np.prod(table.shape, dtype=np.int64) <= MAX_ELEMENTS:
                raise _Unsupported(f"an array has shape {table.shape}")
            if jnp.issubdtype(table.dtype, jnp.complexfloating) or table.dtype.itemsize > 4:
                raise _Unsupported(f"an array has dtype {table.dtype}")
        jaxpr, jaxpr_with_derivative = _jaxpr_of(value), _jaxpr_of(value_and_derivative)
        bounds, derivative_bounds = map(
            bounds_in(jaxpr_with_derivative, UNKNOWN), jaxpr_with_derivative.outvars
        )
        return Traces(jaxpr, jaxpr_with_derivative, bounds, derivative_bounds)
    except _Unsupported as error:
        return f"there is no kernel for the score function {function}: {error}"
    except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
        first_line = str(error).strip().split("\n")[0]
        rule = "it must index its arrays with scalars and be elementwise otherwise"
        return f"there is no kernel for the score function {function}: {rule} ({first_line})"


def _jaxpr_of(function: Callable[..., Any]) -> Jaxpr:
    """Return the jaxpr of a function of a score and four indices, whose constants are scalars.

    Raises:
        _Unsupported: If kernels cannot evaluate it.
    """
    types = [jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, *[jnp.int32] * 4)]
    closed = jax.make_jaxpr(function)(*types)
    for constant in closed.consts:
        if isinstance(constant, jax.core.Tracer) or np.ndim(constant):
            raise _Unsupported("it captures an array, which jattn.ScoreMod(f, *arrays) takes as an argument")
    closed = jax.make_jaxpr(functools.partial(_evaluate_inline, closed))(*types)
    assert not closed.consts
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    _check(jaxpr)
    return jaxpr


def _evaluate_inline(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr together with the jaxprs that it calls; operations on constants become constants."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args, strict=True))
    values.update(zip(closed.jaxpr.constvars, (np.asarray(x)[()] for x in closed.consts), strict=True))

    def read(variable: Any) -> Any:
        if not isinstance(variable, Literal):
            return values[variable]
        literal_type: Any = variable.aval
        return np.asarray(variable.val, literal_type.dtype)[()]

    for eqn in closed.jaxpr.eqns:
        inputs, inner = [read(variable) for variable in eqn.invars], inner_jaxpr(eqn)
        if eqn.params.get("name") == "floor_divide" and _is_positive_int(inputs[1]):
            outputs: Any = [floor_divide_p.bind(inputs[0], divisor=int(inputs[1]))]
        elif inner is not None:
            outputs = _evaluate_inline(inner, *inputs)
        elif inputs and all(isinstance(x, np.generic) for x in inputs):
            with jax.ensure_compile_time_eval():
                outputs = eqn.primitive.bind(*inputs, **eqn.params)
                outputs = outputs if eqn.primitive.multiple_results else [outputs]
                outputs = [np.asarray(x)[()] for x in outputs]
        else:
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(variable) for variable in closed.jaxpr.outvars]


def _is_positive_int(x: Any) -> bool:
    return isinstance(x, np.integer) and 0 < int(x) < 2**31


def _check(jaxpr: Jaxpr) -> None:
    """Raise _Unsupported if kernels cannot evaluate a jaxpr."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in OPERATIONS:
            raise _Unsupported(f"it uses {name}")
        types: list[Any] = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
        for variable_type in types:
            if variable_type.shape:
                raise _Unsupported("it computes with arrays")
            if variable_type.dtype not in DTYPES:
                raise _Unsupported(f"it computes in {variable_type.dtype}")
        if name == "rem" and types[0].dtype == jnp.float32:
            raise _Unsupported("it uses rem of floats")
        if name == "select_n" and len(eqn.invars) != 3:
            raise _Unsupported("it uses select_n of several cases")


def inner_jaxpr(eqn: Any) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls, such as that of jit, or None."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
        return None
    params = eqn.params
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
