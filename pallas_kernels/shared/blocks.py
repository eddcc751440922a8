"""Blocks of positions, in arrays and in kernels, which have no floor division."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def block_of(query: Any, size: int) -> Any:
    """`query // size`, of queries before position 0, too: there are some where there are more than keys."""
    if size & (size - 1) == 0:
        return lax.shift_right_arithmetic(query, jnp.full_like(query, size.bit_length() - 1))
    is_before = lax.shift_right_arithmetic(query, jnp.full_like(query, 31))  # all bits, or none
    return lax.div(query - (is_before & (size - 1)), jnp.full_like(query, size))
