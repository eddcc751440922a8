"""The wording of every error, so that each names the argument, the rule and the value."""

import dataclasses
import numbers
from collections.abc import Collection
from typing import Any

import numpy as np


def require(condition: bool, name: str, rule: str, got: object) -> None:
    """Raises `ValueError("{name} must {rule}, got {got}.")` unless `condition`."""
    if not condition:
        raise ValueError(f"{name} must {rule}, got {got}.")


def require_int(**values: object) -> None:
    """Every named value must be an int, Python's or numpy's; a bool is none."""
    for name, value in values.items():
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        require(is_int, name, "be an int", repr(value))


def require_int32s(name: str, ints: Any) -> None:
    """An array of ints on the host must fit int32, where JAX would have them wrap; others are not read."""
    if isinstance(ints, np.ndarray) and ints.dtype.kind in "iu" and ints.dtype.itemsize >= 4 and ints.size:
        for extreme in (int(ints.min()), int(ints.max())):
            require(-(2**31) <= extreme < 2**31, name, "hold int32s", extreme)


def require_bool(**values: object) -> None:
    """Every named value must be a bool, Python's or numpy's."""
    for name, value in values.items():
        require(type(value).__name__ in ("bool", "bool_"), name, "be True or False", repr(value))


def require_number(**values: object) -> None:
    """Every named value must be a real number, Python's or numpy's; a bool is none."""
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(is_number, name, "be a number", repr(value))


def require_built_for(name: str, built_for: Any, expected: Any) -> None:
    """Raise ValueError unless the static sizes that `name` was built for are this call's.

    Args:
        name: Argument that was built ahead of the call, such as "schedule".
        built_for: Dataclass of the static sizes that it was built for.
        expected: The same dataclass for this call.
    """
    for field in dataclasses.fields(expected):
        actual, needed = getattr(built_for, field.name), getattr(expected, field.name)
        if actual != needed:
            raise ValueError(
                f"{name} was built for {field.name}={actual}, but this call has {field.name}={needed}. "
                f"Build it from the arguments of this call."
            )


def require_positive(**values: int | float) -> None:
    """Every named value must be > 0."""
    for name, value in values.items():
        require(value > 0, name, "be positive", value)


def require_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """`value` must be a member of `allowed`, which the message lists."""
    listed = ", ".join(repr(choice) for choice in allowed)
    require(value in allowed, name, f"be one of {listed}", repr(value))


def require_shape(name: str, got: tuple[int, ...], want: tuple[int, ...], meaning: str) -> None:
    """The shape `got` must equal `want`; `meaning` says what the axes are."""
    require(tuple(got) == tuple(want), name, f"have shape {tuple(want)} ({meaning})", tuple(got))


def require_arrays(**arrays: Any) -> None:
    """Every named value must be an array, JAX's or numpy's, or None."""
    for name, array in arrays.items():
        is_array = hasattr(array, "shape") and hasattr(array, "dtype")
        require(array is None or is_array, name, "be an array", type(array).__name__)


def require_axes(num: int, **arrays: Any) -> None:
    """Every named value must be an array of so many axes."""
    for name, array in arrays.items():
        require(array is not None, name, "be an array", None)
        require_arrays(**{name: array})
        require(len(array.shape) == num, name, f"have {num} axes", tuple(array.shape))


def require_type(name: str, value: object, kind: type | tuple[type, ...], hint: str) -> None:
    """`value` must be of a type; the hint says where to get one, or what to write."""
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join("None" if one is type(None) else one.__name__ for one in kinds)
    shape = getattr(value, "shape", None)  # of an array rather than its numbers
    got = repr(value)[:80] if shape is None else f"shape {shape}"
    require(False, name, f"be a {names} ({hint})", f"{type(value).__name__}: {got}")


def unsupported(what: str, reason: str, way_out: str) -> NotImplementedError:
    """The error for a right request that cannot be served here."""
    return NotImplementedError(f"{what}: {reason}. {way_out}")
