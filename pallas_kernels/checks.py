"""Argument checks whose errors name the argument, the rule it breaks and its value; errors of derivatives."""

import dataclasses
import functools
import numbers
import os
import pathlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = (_ROOT / "jattn", _ROOT / "pallas_kernels", pathlib.Path(jax.__file__).parent)
INTERNAL_FILES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)  # beginnings of their paths


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning that names the line of the caller's code: outside of jattn, its kernels and JAX."""
    warnings.warn(message, category, skip_file_prefixes=INTERNAL_FILES)


def require(condition: bool, name: str, rule: str, got: object) -> None:
    """Raise `ValueError("{name} must {rule}, got {got}.")` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name} must {rule}, got {got}.")


def require_int(**values: object) -> None:
    """Require every named value to be an int of Python or NumPy; a bool is not an int."""
    for name, value in values.items():
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        require(is_int, name, "be an int", repr(value))


def require_int32s(name: str, ints: Any) -> None:
    """Require the values of a NumPy array of ints to fit int32, where JAX would wrap them silently.

    Arrays on a device are not read.
    """
    if isinstance(ints, np.ndarray) and ints.dtype.kind in "iu" and ints.dtype.itemsize >= 4 and ints.size:
        for extreme in (int(ints.min()), int(ints.max())):
            require(-(2**31) <= extreme < 2**31, name, "hold int32s", extreme)


def require_bool(**values: object) -> None:
    """Require every named value to be a bool of Python or NumPy."""
    for name, value in values.items():
        require(type(value).__name__ in ("bool", "bool_"), name, "be True or False", repr(value))


def require_number(**values: object) -> None:
    """Require every named value to be a real number of Python or NumPy; a bool is not a number."""
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(is_number, name, "be a number", repr(value))


def set_ints(spec: Any, *names: str) -> None:
    """Check that fields are ints and convert numpy ints to Python ints."""
    for name in names:
        require_int(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, int(getattr(spec, name)))


def set_bools(spec: Any, *names: str) -> None:
    """Check that fields are bools and convert numpy bools to Python bools."""
    for name in names:
        require_bool(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, bool(getattr(spec, name)))


def set_floats(spec: Any, *names: str) -> None:
    """Check that fields are real numbers or None and convert numbers to Python floats."""
    for name in names:
        if getattr(spec, name) is not None:
            require_number(**{name: getattr(spec, name)})
            object.__setattr__(spec, name, float(getattr(spec, name)))


def require_built_for(name: str, built_for: Any, expected: Any) -> None:
    """Raise ValueError unless `name` was built for the static sizes of this call.

    Args:
        name: Argument that was built before the call, such as "schedule".
        built_for: Dataclass of the static sizes that it was built for.
        expected: Dataclass of the static sizes of this call.
    """
    for field in dataclasses.fields(expected):
        actual, needed = getattr(built_for, field.name), getattr(expected, field.name)
        if actual != needed:
            raise ValueError(
                f"{name} was built for {field.name}={actual}, but this call has {field.name}={needed}. "
                f"Build it from the arguments of this call."
            )


def require_positive(**values: int | float) -> None:
    """Require every named value to be greater than 0."""
    for name, value in values.items():
        require(value > 0, name, "be positive", value)


def require_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Require `value` to be one of `allowed`; the message lists them."""
    listed = ", ".join(map(repr, allowed))
    require(value in allowed, name, f"be one of {listed}", repr(value))


def require_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...], meaning: str) -> None:
    """Require the shape `got` to equal `expected`; `meaning` names the axes or their source."""
    require(tuple(got) == tuple(expected), name, f"have shape {tuple(expected)} ({meaning})", tuple(got))


def require_arrays(**arrays: Any) -> None:
    """Require every named value to be a JAX or NumPy array, or None."""
    for name, array in arrays.items():
        is_array = hasattr(array, "shape") and hasattr(array, "dtype")
        require(array is None or is_array, name, "be an array", type(array).__name__)


def require_axes(num_axes: int, **arrays: Any) -> None:
    """Require every named value to be an array with `num_axes` axes."""
    for name, array in arrays.items():
        require(array is not None, name, "be an array", None)
        require_arrays(**{name: array})
        require(len(array.shape) == num_axes, name, f"have {num_axes} axes", tuple(array.shape))


def require_type(name: str, value: object, types: type | tuple[type, ...], hint: str) -> None:
    """Require `value` to be an instance of `types`; `hint` says how to get one, or what to write."""
    if isinstance(value, types):
        return
    alternatives = types if isinstance(types, tuple) else (types,)
    names = " or ".join("None" if choice is type(None) else choice.__name__ for choice in alternatives)
    shape = getattr(value, "shape", None)  # an array is described by its shape, not by its numbers
    got = repr(value)[:80] if shape is None else f"shape {shape}"
    require(False, name, f"be a {names} ({hint})", f"{type(value).__name__}: {got}")


def suggest_argument_names[F: Callable[..., Any]](name: str, hints: Mapping[str, str]) -> Callable[[F], F]:
    """Return a decorator that makes a function raise a helpful TypeError for names of other libraries.

    Args:
        name: Name of the function in the message.
        hints: Sentence without a final period for each unknown argument name.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                if argument in hints:
                    raise TypeError(f"{name}() got an unexpected argument {argument!r}. {hints[argument]}.")
            return function(*args, **kwargs)

        return cast(F, wrapper)

    return decorate


def unsupported(feature: str, reason: str, fix: str) -> NotImplementedError:
    """Return the error for a valid request that this build or machine does not support.

    Args:
        feature: Function or feature that was requested.
        reason: Clause that says what is not supported, without a final period.
        fix: Instruction that makes the request work, without a final period, such as "Pass cp=1".
    """
    return NotImplementedError(f"{feature}: {reason}. {fix}.")


# ------------------------------------------------------------------------------------- attention kernels
def check_heads(q_heads: int, kv_heads: int, **per_head: jax.Array | None) -> None:
    """Raise ValueError unless the query heads form groups, one per KV head.

    Args:
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        **per_head: Named arrays that must have one number per query head, or be None.
    """
    require(kv_heads > 0, "kv_heads", "be positive", kv_heads)
    require(q_heads > 0, "q_heads", "be positive", q_heads)
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    for name, array in per_head.items():
        if array is not None:
            require_shape(name, array.shape, (q_heads,), "q_heads")


def check_scale(name: str, scale: jax.Array | None, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise ValueError unless a scale is None or has one of these shapes."""
    if scale is not None:
        require_one_of(f"{name}'s shape", tuple(np.shape(scale)), shapes)


def check_supported(kernel: str, reason: str | None) -> None:
    """Raise NotImplementedError if there is a reason why a kernel does not support a call."""
    if reason is not None:
        raise unsupported(kernel, reason, "Call jattn.attend with implementation='xla'")


# ------------------------------------------------------------------------------------- derivatives
def forbid_derivative[Tree](arrays: Tree, derivative: str, reason: str, fix: str) -> Tree:
    """Return `arrays` unchanged, such that differentiating anything computed from them raises.

    Args:
        arrays: Tree of arrays. Those that are not of float dtype have no derivative in any case.
        derivative: Derivative that does not exist, such as "second derivatives of attention".
        reason: Clause that says why it does not exist.
        fix: Instruction that says what to do instead, without a final period.

    Raises:
        NotImplementedError: If the result is differentiated, in forward or reverse mode.
    """

    def forbid(array: Any) -> Any:
        is_float = jnp.issubdtype(array.dtype, jnp.inexact)
        return _forbid_derivative(array, derivative, reason, fix) if is_float else array

    return jax.tree.map(forbid, arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _forbid_derivative(array: Any, derivative: str, reason: str, fix: str) -> Any:
    return array


@_forbid_derivative.defjvp
def _raise_unsupported(derivative: str, reason: str, fix: str, primals: Any, tangents: Any) -> Any:
    raise unsupported(derivative, reason, fix)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def forbid_kernel_derivative[Tree](arrays: Tree, kernel: str, fix: str) -> Tree:
    """Return the inputs of a kernel without a derivative; differentiating the kernel then raises.

    Args:
        arrays: Tree of all arrays that the kernel reads.
        kernel: Name of the kernel's public function.
        fix: Instruction that names a function with a derivative, without a final period.

    Raises:
        NotImplementedError: If the result is differentiated, in forward or reverse mode.
    """
    return arrays


@forbid_kernel_derivative.defjvp
def _raise_kernel_unsupported(kernel: str, fix: str, primals: Any, tangents: Any) -> Any:
    fix = f"{fix}, or apply jax.lax.stop_gradient to the inputs"
    raise unsupported(f"a derivative of {kernel}", "the kernel has none", fix)
