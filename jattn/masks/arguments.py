"""Checks of what a mask is made from, and of what chooses one."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.checks import require, require_int

MAX_INT = 2**31 - 1  # positions are int32
KINDS = {"bool": jnp.bool_, "integer": jnp.integer}


def require_ints(at_least: int, **values: Any) -> None:
    """Every named value must be an int, not a bool, at least so large, and fit 32 bits."""
    for name, value in values.items():
        require_int(**{name: value})
        require(value >= at_least, name, "be positive" if at_least == 1 else f"be at least {at_least}", value)
        require(value <= MAX_INT, name, f"be at most {MAX_INT}", value)


def set_ints(mask: Any, at_least: int, *names: str) -> None:
    """Checks fields of a mask by require_ints, and makes numpy's ints Python's: those wrap in few bits."""
    require_ints(at_least, **{name: getattr(mask, name) for name in names})
    for name in names:
        object.__setattr__(mask, name, int(getattr(mask, name)))


def require_heads(num_q_heads: int, num_kv_heads: int | None) -> None:
    """Numbers of heads must be positive, and kv heads, where they are known, divide query heads."""
    require_ints(1, num_q_heads=num_q_heads)
    if num_kv_heads is not None:
        require_ints(1, num_kv_heads=num_kv_heads)
        divides = num_q_heads % num_kv_heads == 0
        require(divides, "num_kv_heads", f"divide num_q_heads ({num_q_heads})", num_kv_heads)


def require_array(name: str, value: Any, kind: str, axes: dict[int, str]) -> None:
    """`value` must be an array of this kind, "bool" or "integer", with axes as one of those named.

    Args:
        name: Of the argument.
        value: What was given.
        kind: What its elements must be.
        axes: Number of axes -> what they are.
    """
    require(_is_array(value), name, f"be an array of {kind} elements", f"a {type(value).__name__}")
    is_kind = jnp.issubdtype(value.dtype, KINDS[kind])
    require(is_kind, name, f"be an array of {kind} elements", value.dtype)
    require(value.ndim in axes, name, f"have axes {' or '.join(axes.values())}", value.shape)


def require_floats(**values: Any) -> None:
    """Every named value must be an array of floats: of ints means are cut off, and outputs are."""
    for name, value in values.items():
        require(_is_array(value), name, "be an array", type(value).__name__)
        require(jnp.issubdtype(value.dtype, jnp.floating), name, "hold floats", value.dtype)


def _is_array(value: Any) -> bool:
    return all(hasattr(value, part) for part in ("shape", "dtype", "ndim"))
