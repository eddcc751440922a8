"""Division of whole numbers, in arrays and in kernels, which have no floor division."""

from typing import Any

import jax
import jax.numpy as jnp


def quotient(x: Any, size: int) -> Any:
    """`x // size` for x >= 0."""
    return jax.lax.div(x, jnp.full_like(x, size))


def block_of(query: Any, size: int) -> Any:
    """`query // size`, of queries before position 0, too: there are some where there are more than keys."""
    if size & (size - 1) == 0:
        return jax.lax.shift_right_arithmetic(query, jnp.full_like(query, size.bit_length() - 1))
    is_before = jax.lax.shift_right_arithmetic(query, jnp.full_like(query, 31))  # all bits, or none
    return quotient(query - (is_before & (size - 1)), size)


def remainder(x: Any, size: int) -> Any:
    """`x % size` for x >= 0."""
    return jax.lax.rem(x, jnp.full_like(x, size))
