"""Bounds of the variables of a score function, by interval arithmetic.

Bounds are Python numbers if they hold for any arguments, or traced scalars if they hold for a tile of pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from pallas_kernels.score_mod.operations import OPERATIONS

# Lower and upper bound of a variable, both included; None if they are not known.
type Bounds = tuple[Any, Any] | None

# Bounds of the arguments of a score function that hold for any arguments.
UNKNOWN: Sequence[Bounds] = ((-np.inf, np.inf),) * 5
MAX_FACTOR = 2**16  # of integers: the products of a tile's positions do not overflow twice
MAX_INT = 2.0**30  # Larger floats are not converted exactly.

# Functions that are monotone increasing, and the same in numpy.
MONOTONE: Mapping[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "sign": np.sign,
}
# Those of them that are not defined for small numbers, with their smallest argument.
DEFINED_FROM: Mapping[str, tuple[Callable[[Any], Any], float]] = {
    "log": (np.log, 0.0),
    "log1p": (np.log1p, -1.0),
    "sqrt": (np.sqrt, 0.0),
}
RANGES = {"tanh": (-1.0, 1.0), "logistic": (0.0, 1.0), "sin": (-1.0, 1.0), "cos": (-1.0, 1.0)}
IDENTITIES = ("copy", "copy_p", "stop_gradient", "broadcast_in_dim", "reshape")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def bounds_in(jaxpr: Jaxpr, inputs: Sequence[Bounds]) -> Callable[[Any], Bounds]:
    """Return a function that returns the bounds of a variable or literal of a jaxpr without calls.

    Args:
        jaxpr: Jaxpr of scalars.
        inputs: Bounds of its arguments.
    """
    bounds: dict[Any, Bounds] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Bounds:
        if isinstance(variable, Literal):
            constant = np.asarray(variable.val).item()
            return constant, constant
        return bounds.get(variable)

    for eqn in jaxpr.eqns:
        bounds[eqn.outvars[0]] = _valid(eqn, _bounds(eqn, [read(variable) for variable in eqn.invars]))
    return read


def _valid(eqn: Any, bounds: Bounds) -> Bounds:
    """Return bounds, or None if they are NaN or if integers overflow."""
    if bounds is None or not _is_static(*bounds):
        return bounds
    is_overflow = eqn.outvars[0].aval.dtype == jnp.int32 and any(
        np.isfinite(bound) and abs(bound) >= 2**31 for bound in bounds
    )
    return None if is_overflow or np.isnan(bounds).any() else bounds


def _is_static(*values: Any) -> bool:
    return not any(isinstance(value, jax.Array) for value in values)


def _minimum(x: Any, y: Any) -> Any:
    return min(x, y) if _is_static(x, y) else jnp.minimum(x, y)


def _maximum(x: Any, y: Any) -> Any:
    return max(x, y) if _is_static(x, y) else jnp.maximum(x, y)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if _is_static(condition):
        return x if condition else y
    return jnp.where(condition, x, y)


def _not(x: Any) -> Any:
    return not x if _is_static(x) else ~x


def _and(x: Any, y: Any) -> Any:
    return (x and y) if _is_static(x, y) else jnp.logical_and(x, y)


def _or(x: Any, y: Any) -> Any:
    return (x or y) if _is_static(x, y) else jnp.logical_or(x, y)


def _apply(eqn: Any, in_numpy: Callable[[Any], Any], x: Any) -> Any:
    """Return a function of one argument."""
    if not _is_static(x):
        return OPERATIONS[eqn.primitive.name](eqn, x)
    with np.errstate(all="ignore"):
        return in_numpy(x).item() if isinstance(in_numpy(x), np.generic) else in_numpy(x)


def _bounds(eqn: Any, inputs: list[Bounds]) -> Bounds:
    """Return the bounds of the result of an equation."""
    name = eqn.primitive.name
    if name == "select_n":
        return _select(*inputs)
    if not inputs or None in inputs:
        return RANGES.get(name)
    args = [x for x in inputs if x is not None]
    low, high = args[0]
    match name:
        case "add" | "add_any":
            return low + args[1][0], high + args[1][1]
        case "sub":
            return low - args[1][1], high - args[1][0]
        case "neg":
            return high * -1, low * -1
        case "max":
            return _maximum(low, args[1][0]), _maximum(high, args[1][1])
        case "min":
            return _minimum(low, args[1][0]), _minimum(high, args[1][1])
        case "clamp":
            return tuple(_minimum(_maximum(args[1][i], args[0][i]), args[2][i]) for i in (0, 1))
        case "abs":
            return _absolute(low, high)
        case "square" | "one_minus_square":
            return _square(eqn, low, high)
        case "mul":
            if eqn.invars[0] is eqn.invars[1]:
                return _square(eqn, low, high)
            return _product(eqn, args[0], args[1])
        case "div":
            return _quotient(eqn, args[0], args[1])
        case "floor_divide":
            divisor = eqn.params["divisor"]
            if _is_static(low, high):
                return np.floor(low / divisor).item(), np.floor(high / divisor).item()
            return OPERATIONS[name](eqn, jnp.int32(low)), OPERATIONS[name](eqn, jnp.int32(high))
        case "convert_element_type":
            return _convert(eqn, low, high)
        case "and" if _is_bool(eqn):
            return _and(low, args[1][0]), _and(high, args[1][1])
        case "or" if _is_bool(eqn):
            return _or(low, args[1][0]), _or(high, args[1][1])
        case "not" if _is_bool(eqn):
            return _not(high), _not(low)
    if name in IDENTITIES:
        return low, high
    if name in COMPARISONS:
        return _compare(name, args[0], args[1])
    if name in MONOTONE:
        return _apply(eqn, MONOTONE[name], low), _apply(eqn, MONOTONE[name], high)
    if name in DEFINED_FROM:
        in_numpy, first = DEFINED_FROM[name]
        is_defined = low >= first
        bounds = (_apply(eqn, in_numpy, low), _apply(eqn, in_numpy, high))
        return _where(is_defined, bounds[0], -np.inf), _where(is_defined, bounds[1], np.inf)
    return RANGES.get(name)


def _is_bool(eqn: Any) -> bool:
    is_bool: bool = eqn.outvars[0].aval.dtype == jnp.bool_
    return is_bool


def _is_float(eqn: Any) -> bool:
    is_float: bool = eqn.outvars[0].aval.dtype == jnp.float32
    return is_float


def _absolute(low: Any, high: Any) -> Bounds:
    return _maximum(_maximum(low, high * -1), 0), _maximum(low * -1, high)


def _square(eqn: Any, low: Any, high: Any) -> Bounds:
    if not _is_float(eqn):
        return None
    bounds = _absolute(low, high)
    assert bounds is not None
    low, high = bounds[0] * bounds[0], bounds[1] * bounds[1]
    return (1.0 - high, 1.0 - low) if eqn.primitive.name == "one_minus_square" else (low, high)


def _product(eqn: Any, x: tuple[Any, Any], y: tuple[Any, Any]) -> Bounds:
    if not _is_float(eqn):
        if not _is_static(*y):
            x, y = y, x
        if not _is_static(*y) or y[0] != y[1] or abs(y[0]) > MAX_FACTOR:
            return None
        products = [x[0] * y[0], x[1] * y[0]]
        return (products[0], products[1]) if y[0] >= 0 else (products[1], products[0])
    products = [a * b for a in x for b in y]
    low = high = products[0]
    for product in products[1:]:
        low, high = _minimum(low, product), _maximum(high, product)
    return low, high


def _quotient(eqn: Any, x: tuple[Any, Any], y: tuple[Any, Any]) -> Bounds:
    divisor = y[0]
    if not _is_static(*y) or y[0] != y[1] or divisor == 0:
        return None
    if _is_float(eqn):
        quotients = x[0] / divisor, x[1] / divisor
        return quotients if divisor > 0 else (quotients[1], quotients[0])
    if divisor < 0:
        return None
    if _is_static(*x):
        return np.trunc(x[0] / divisor).item(), np.trunc(x[1] / divisor).item()
    return jax.lax.div(jnp.int32(x[0]), jnp.int32(divisor)), jax.lax.div(jnp.int32(x[1]), jnp.int32(divisor))


def _convert(eqn: Any, low: Any, high: Any) -> Bounds:
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if source == target:
        return low, high
    if target == jnp.bool_:
        return None
    is_truncated = target == jnp.int32 and source == jnp.float32
    if _is_static(low, high):
        if is_truncated and not max(abs(low), abs(high)) < MAX_INT:
            return None
        return (np.trunc(low).item(), np.trunc(high).item()) if is_truncated else (low, high)
    if is_truncated:
        low, high = [_minimum(_maximum(x, -MAX_INT), MAX_INT) for x in (low, high)]
    return jnp.asarray(low).astype(target), jnp.asarray(high).astype(target)


def _compare(name: str, x: tuple[Any, Any], y: tuple[Any, Any]) -> Bounds:
    match name:
        case "lt":
            return x[1] < y[0], x[0] < y[1]
        case "le":
            return x[1] <= y[0], x[0] <= y[1]
        case "gt":
            return x[0] > y[1], x[1] > y[0]
        case "ge":
            return x[0] >= y[1], x[1] >= y[0]
    is_equal = _and(_and(x[0] == x[1], y[0] == y[1]), x[0] == y[0])
    can_be_equal = _and(x[0] <= y[1], y[0] <= x[1])
    return (is_equal, can_be_equal) if name == "eq" else (_not(can_be_equal), _not(is_equal))


def _select(condition: Bounds, if_false: Bounds, if_true: Bounds) -> Bounds:
    if condition is not None and _is_static(*condition) and condition[0] == condition[1]:
        return if_true if condition[0] else if_false
    if if_false is None or if_true is None:
        return None
    low, high = _minimum(if_false[0], if_true[0]), _maximum(if_false[1], if_true[1])
    if condition is None:
        return low, high
    must, can = condition
    return (
        _where(must, if_true[0], _where(can, low, if_false[0])),
        _where(must, if_true[1], _where(can, high, if_false[1])),
    )
