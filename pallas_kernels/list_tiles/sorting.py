"""The lists by a sort of XLA, for machines without the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from pallas_kernels.list_tiles.codes import FIRST_PART, PART_SHIFT, SEEN, WHOLE, Lists


def by_sorting(codes: UInt[Array, "lists tiles"]) -> Lists:
    """Lists; behind them zeros."""
    tiles = codes.shape[1]
    code, number = codes.astype(jnp.int32), jnp.arange(tiles, dtype=jnp.int32)[None, :]
    is_seen, is_whole = (code >> SEEN) & 1 != 0, (code >> WHOLE) & 1 != 0
    place = jnp.where(is_seen, jnp.where(is_whole, number, -1 - number), tiles)
    entries = jnp.where(is_seen, number + (code >> FIRST_PART << PART_SHIFT), 0)
    _, entries = jax.lax.sort((place, entries), num_keys=1)
    count = lambda which: which.sum(axis=1, dtype=jnp.int32)
    return Lists(entries, count(is_seen & ~is_whole), count(is_seen & is_whole))
