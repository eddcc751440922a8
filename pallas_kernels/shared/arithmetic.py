"""Blocks of positions, in arrays and in kernels, which have no floor division."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32


def floor_div(query: Any, size: int) -> Any:
    """`query // size`, of queries before position 0, too: there are some where there are more than keys."""
    if size & (size - 1) == 0:
        return lax.shift_right_arithmetic(query, jnp.full_like(query, size.bit_length() - 1))
    sorts_before = lax.shift_right_arithmetic(query, jnp.full_like(query, 31))  # all bits, or none
    return lax.div(query - (sorts_before & (size - 1)), jnp.full_like(query, size))


def sort_ranks(keys: Int32[Array, "sets lists"]) -> Int32[Array, "sets lists"]:
    """Where each list stands when those of its set are sorted by their keys, ties in order.

    Every pair is compared, which XLA does in one small kernel; its sort takes several, each of them longer.
    """
    return sorts_before(keys).sum(axis=-1, dtype=jnp.int32)


def sorts_before(keys: Int32[Array, "sets lists"]) -> Bool[Array, "sets lists lists"]:
    """Whether of two lists of a set the second stands before the first."""
    number = jnp.arange(keys.shape[1], dtype=jnp.int32)
    mine, other = keys[:, :, None], keys[:, None, :]
    return (other < mine) | ((other == mine) & (number[None, None, :] < number[None, :, None]))
