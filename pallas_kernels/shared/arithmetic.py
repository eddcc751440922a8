"""Integer arithmetic that kernels and the schedules around them need and JAX or XLA do not do well."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.shared.types import Scalar


def full_like(x: Any, value: int) -> Any:
    """Return an int32 scalar or array of the shape of `x`, all of one value.

    jnp.full_like of a scalar with an explicit sharding becomes a reshard, which kernels do not support.
    """
    return jnp.int32(value) if jnp.ndim(x) == 0 else jnp.full_like(x, value)


def floor_div(position: Any, size: int) -> Any:
    """Return `position // size` for int32 positions, which may be negative; kernels have no floor division.

    Args:
        position: Scalar or array of int32. Negative positions exist where a request has more queries than
            keys.
        size: Static divisor, at least 1.
    """
    if size & (size - 1) == 0:
        return lax.shift_right_arithmetic(position, full_like(position, size.bit_length() - 1))
    is_negative = lax.shift_right_arithmetic(position, full_like(position, 31))  # all bits set, or none
    return lax.div(position - (is_negative & (size - 1)), full_like(position, size))


def alternating_rounds(
    num_work_tiles: Scalar, worker: Scalar, workers: int
) -> tuple[Scalar, Callable[[Scalar], Scalar]]:
    """Return the number of work tiles of a worker, and a function from round to work tile index.

    In even rounds, workers take work tiles in ascending order, in odd rounds in descending order. This
    balances their work, because work tiles are sorted by duration.

    Args:
        num_work_tiles: Number of work tiles of all workers.
        worker: Index of the worker: a thread block, or a team of warpgroups of one.
        workers: Number of workers. Static.
    """
    num_workers = jnp.int32(workers)
    full_rounds = lax.div(num_work_tiles, num_workers)

    def work_tile_index(r: Scalar) -> Scalar:
        return r * num_workers + jnp.where(lax.rem(r, jnp.int32(2)) == 0, worker, num_workers - 1 - worker)

    rounds = full_rounds + (work_tile_index(full_rounds) < num_work_tiles).astype(jnp.int32)
    return rounds, work_tile_index


def sort_ranks(keys: Int32[Array, "sets lists"]) -> Int32[Array, "sets lists"]:
    """Return the rank of each list in its set when the set is sorted by `keys`; the sort is stable.

    Every pair is compared, which XLA compiles to one small kernel; its own sort takes several longer ones.
    """
    return sorts_before(keys).sum(axis=-1, dtype=jnp.int32)


def sorts_before(keys: Int32[Array, "sets lists"]) -> Bool[Array, "sets lists lists"]:
    """Return for each pair (i, j) of a set whether list j sorts before list i."""
    index = jnp.arange(keys.shape[1], dtype=jnp.int32)
    key_i, key_j = keys[:, :, None], keys[:, None, :]
    return (key_j < key_i) | ((key_j == key_i) & (index[None, None, :] < index[None, :, None]))
