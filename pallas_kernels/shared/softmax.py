"""The last steps of an online softmax in base 2: adding up split outputs, and the normalization."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WGMMA
from pallas_kernels.shared.types import Columns, Index, Ref, Rows, Scalar, Tile

# Split outputs whose loads are in flight together: a tile of 64 x 64 takes 32 registers for each of them.
# If a tile of fewer queries has more splits, QUERIES_AT_ONCE // queries of them are loaded at once.
# Of tiles of 128 queries fewer are loaded at once.
SPLITS_AT_ONCE, QUERIES_AT_ONCE, MAX_LOADED_QUERIES = 4, 128, 256
LOG2E = math.log2(math.e)  # scores times LOG2E are exponents of 2


def in_log2(x: jax.Array | None) -> jax.Array | None:
    """Return slopes or sinks in f32, times log2(e)."""
    return None if x is None else x.astype(jnp.float32) * LOG2E


def finalize_softmax(
    row_max: jax.Array, row_sum: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the factor that normalizes each query's accumulator, and the query's log-sum-exp (base e).

    Args:
        row_max: Number that was subtracted from each query's scores before the exponential; -inf if the query
            attends to no key.
        row_sum: Sum of each query's exponentials.
        sink: Attention sink of each query in base 2 (times LOG2E); -inf if the query has none. None = no
            sinks.
    """
    final_max = row_max if sink is None else jnp.maximum(row_max, sink)
    finite_max = jnp.where(final_max == -jnp.inf, 0.0, final_max)
    alpha = jnp.exp2(row_max - finite_max)
    row_sum = row_sum * alpha
    if sink is not None:
        row_sum = row_sum + jnp.exp2(sink - finite_max)
    factor = alpha / jnp.where(row_sum == 0.0, 1.0, row_sum)
    return factor, (finite_max + jnp.log2(row_sum)) * math.log(2)


class SplitOutputs(NamedTuple):
    """Unnormalized results of parts of the keys, f32; the spec of each kernel says which tiles there are.

    Attributes:
        out: Accumulators [split_outputs, tiles, chunks, ...]: P V [tile_q, width], or O^T [width, tile_q].
        row_max: Value in base 2 that the scores of each query were reduced by [split_outputs, tiles, tile_q].
        row_sum: Sum of the exponentials of each query, like `row_max`.
    """

    out: Ref
    row_max: Ref
    row_sum: Ref


type SplitSums = tuple[Tile, Rows | Columns, Rows | Columns]
"""Accumulator, maximum and sum of the queries of a tile."""


def add_splits(
    splits: SplitOutputs, first: Scalar, num: Scalar, tile: Scalar, *, queries: Index, strip: Index, axis: int
) -> SplitSums:
    """Return the accumulator, maximum and sum of a tile of queries over all of its split outputs.

    Args:
        splits: Split outputs in global memory.
        first: Index of the first one; the others follow.
        num: Number of split outputs, at least 1.
        tile: Tile of queries.
        queries: Index of the queries within the tile.
        strip: Index of the part of the accumulator, in the layout WGMMA.
        axis: Axis of the queries in this part: 0 or 1. Static.
    """
    load = functools.partial(plgpu.load, optimized=False)
    load_stats = functools.partial(load, layout=WGMMA.reduce(1 - axis))
    shape = splits.out.at[(first, tile, *strip)].shape
    over_tile = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=[axis])

    def add(at_once: int, i: Scalar, carry: SplitSums) -> SplitSums:
        acc, row_max, row_sum = carry
        indices = [i * at_once + j for j in range(at_once)]
        outputs = [(first + jnp.minimum(n, num - 1), tile) for n in indices]
        # Issue all loads of a round before their first use, so that their latencies overlap.
        maxima = [load_stats(splits.row_max.at[(*output, *queries)]) for output in outputs]
        sums = [load_stats(splits.row_sum.at[(*output, *queries)]) for output in outputs]
        outs = [load(splits.out.at[(*output, *strip)], layout=WGMMA) for output in outputs]
        # Splits past the last one get weight 0.
        maxima = [x + jnp.where(n < num, 0.0, -jnp.inf) for n, x in zip(indices, maxima, strict=True)]
        new_max = functools.reduce(jnp.maximum, maxima, row_max)
        base = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        alpha = jnp.exp2(row_max - base)
        acc, row_sum = acc * over_tile(alpha), row_sum * alpha
        for split_max, split_sum, out in zip(maxima, sums, outs, strict=True):
            weight = jnp.exp2(split_max - base)
            acc, row_sum = acc + out * over_tile(weight), row_sum + split_sum * weight
        return acc, new_max, row_sum

    def add_all(at_once: int) -> SplitSums:
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
        row_max, row_sum = [
            plgpu.layout_cast(jnp.full((shape[axis],), value, jnp.float32), WGMMA.reduce(1 - axis))
            for value in (-jnp.inf, 0.0)
        ]
        rounds = lax.div(num + (at_once - 1), jnp.int32(at_once))
        return lax.fori_loop(0, rounds, functools.partial(add, at_once), (zeros, row_max, row_sum))

    many_at_once = QUERIES_AT_ONCE // shape[axis]
    if many_at_once <= SPLITS_AT_ONCE:
        return add_all(min(SPLITS_AT_ONCE, MAX_LOADED_QUERIES // shape[axis]))
    return lax.cond(
        num > SPLITS_AT_ONCE,
        functools.partial(add_all, many_at_once),
        functools.partial(add_all, SPLITS_AT_ONCE),
    )
