"""The elementwise operations of a score function that kernels evaluate."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

FIRST_INTEGER = 2.0**23  # From here on every f32 is an integer.


def _bind(eqn: Any, *args: Any) -> Any:
    return eqn.primitive.bind(*args, **eqn.params)


def _convert(eqn: Any, x: Any) -> Any:
    dtype = eqn.params["new_dtype"]
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def _integer_power(eqn: Any, x: Any) -> Any:
    exponent = eqn.params["y"]
    power = functools.reduce(operator.mul, [x] * abs(exponent), jnp.ones_like(x))
    return power if exponent >= 0 else 1 / power


def _floor(eqn: Any, x: Any) -> Any:
    truncated = x.astype(jnp.int32).astype(jnp.float32)
    floor = jnp.where(truncated > x, truncated - 1.0, truncated)
    return jnp.where(jnp.abs(x) < FIRST_INTEGER, floor, x)


def _ceil(eqn: Any, x: Any) -> Any:
    return _floor(eqn, x * -1.0) * -1.0


def _negate(eqn: Any, x: Any) -> Any:
    return x * -1


def _invert(eqn: Any, x: Any) -> Any:
    return x ^ jnp.full_like(x, x.dtype == jnp.bool_ or -1)


def _absolute(eqn: Any, x: Any) -> Any:
    return jnp.maximum(x, x * -1) if x.dtype == jnp.int32 else _bind(eqn, x)


floor_divide_p = Primitive("floor_divide")  # of an int32 by a positive constant


@floor_divide_p.def_abstract_eval
def _(x: Any, *, divisor: int) -> Any:
    return jax.core.ShapedArray((), jnp.dtype(jnp.int32))


def _floor_divide(eqn: Any, x: Any) -> Any:
    divisor = eqn.params["divisor"]
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_arithmetic(x, jnp.full_like(x, divisor.bit_length() - 1))
    # Of a negative x, the quotient of ~x = -x - 1 rounds the other way.
    magnitude = jnp.where(x < 0, _invert(eqn, x), x)
    quotient = lax.div(magnitude, jnp.full_like(x, divisor))
    return jnp.where(x < 0, _invert(eqn, quotient), quotient)


# Elementwise operations that kernels evaluate; the arguments have been broadcast against each other. Those
# that Mosaic GPU lacks are composed of others.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "div", "rem", "max", "min", "sign", "round", "clamp"),
            *("exp", "exp2", "log", "tanh", "logistic", "sqrt", "rsqrt", "sin", "cos", "square"),
            *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "select_n"),
            *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
        ),
        _bind,
    ),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "broadcast_in_dim", "reshape"), lambda eqn, x: x),
    "add_any": lambda eqn, x, y: x + y,
    "neg": _negate,
    "not": _invert,
    "abs": _absolute,
    "floor_divide": _floor_divide,
    "floor": _floor,
    "ceil": _ceil,
    "integer_pow": _integer_power,
    "convert_element_type": _convert,
    "one_minus_square": lambda eqn, x: 1 - x * x,
    "log1p": lambda eqn, x: jnp.log(1 + x),
    "expm1": lambda eqn, x: jnp.exp(x) - 1,
    "is_finite": lambda eqn, x: jnp.abs(x) < jnp.inf,
    "look_up": _bind,  # is evaluated by _Evaluation
}
