"""Sorting by XLA, where lists are many and short."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def sorted_places(keys: Int32[Array, "sets lists"]) -> Int32[Array, "sets lists"]:
    """Where each list stands when those of its set are sorted by their keys, ties in order.

    Every pair is compared, which XLA does in one small kernel; its sort takes several, each of them longer.
    """
    return is_before(keys).sum(axis=-1, dtype=jnp.int32)


def is_before(keys: Int32[Array, "sets lists"]) -> Bool[Array, "sets lists lists"]:
    """Whether of two lists of a set the second stands before the first."""
    number = jnp.arange(keys.shape[1], dtype=jnp.int32)
    mine, other = keys[:, :, None], keys[:, None, :]
    return (other < mine) | ((other == mine) & (number[None, None, :] < number[None, :, None]))
