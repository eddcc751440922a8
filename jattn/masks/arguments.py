"""Checks of what a mask is made from."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.checks import require, require_int

KINDS = {"bool": jnp.bool_, "integer": jnp.integer}


def require_ints(at_least: int, **values: Any) -> None:
    """Every named value must be an int, not a bool, and at least so large."""
    for name, value in values.items():
        require_int(**{name: value})
        require(value >= at_least, name, "be positive" if at_least == 1 else f"be at least {at_least}", value)


def require_array(name: str, value: Any, kind: str, axes: dict[int, str]) -> None:
    """`value` must be an array of this kind, "bool" or "integer", with axes as one of those named.

    Args:
        name: Of the argument.
        value: What was given.
        kind: What its elements must be.
        axes: Number of axes -> what they are.
    """
    is_array = all(hasattr(value, part) for part in ("shape", "dtype", "ndim"))
    require(is_array, name, f"be an array of {kind} elements", f"a {type(value).__name__}")
    is_kind = jnp.issubdtype(value.dtype, KINDS[kind])
    require(is_kind, name, f"be an array of {kind} elements", value.dtype)
    require(value.ndim in axes, name, f"have axes {' or '.join(axes.values())}", value.shape)
