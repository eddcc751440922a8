"""The last steps of an online softmax in base 2: adding up split outputs, and the normalization."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Columns, Index, Ref, Rows, Scalar, Tile

SPLITS_AT_ONCE = 4  # split outputs whose loads are in flight together: 32 registers each for tiles of 64 x 64
STRIP = 64  # columns of a head that a thread block of a combine kernel computes
LOG2E = math.log2(math.e)  # scores times LOG2E are exponents of 2


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


def add_splits(
    splits: SplitOutputs, first: Scalar, num: Scalar, tile: Scalar, *, queries: Index, strip: Index, axis: int
) -> tuple[Tile, Rows | Columns, Rows | Columns]:
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
    layout = plgpu.Layout.WGMMA
    load = functools.partial(plgpu.load, optimized=False)
    load_stats = functools.partial(load, layout=layout.reduce(1 - axis))

    def over_tile(x: Rows | Columns, like: Tile) -> Tile:
        return lax.broadcast_in_dim(x, like.shape, [axis])

    def add(
        i: Scalar, carry: tuple[Tile, Rows | Columns, Rows | Columns]
    ) -> tuple[Tile, Rows | Columns, Rows | Columns]:
        acc, row_max, row_sum = carry
        indices = [i * SPLITS_AT_ONCE + j for j in range(SPLITS_AT_ONCE)]
        outputs = [(first + jnp.minimum(n, num - 1), tile) for n in indices]
        # Issue all loads of a round before their first use, so that their latencies overlap.
        maxima = [load_stats(splits.row_max.at[(*output, *queries)]) for output in outputs]
        sums = [load_stats(splits.row_sum.at[(*output, *queries)]) for output in outputs]
        outs = [load(splits.out.at[(*output, *strip)], layout=layout) for output in outputs]
        # Splits past the last one get weight 0.
        maxima = [x + jnp.where(n < num, 0.0, -jnp.inf) for n, x in zip(indices, maxima, strict=True)]
        new_max = functools.reduce(jnp.maximum, maxima, row_max)
        base = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        alpha = jnp.exp2(row_max - base)
        acc, row_sum = acc * over_tile(alpha, acc), row_sum * alpha
        for split_max, split_sum, out in zip(maxima, sums, outs, strict=True):
            weight = jnp.exp2(split_max - base)
            acc, row_sum = acc + out * over_tile(weight, out), row_sum + split_sum * weight
        return acc, new_max, row_sum

    shape = splits.out.at[(first, tile, *strip)].shape
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

    def full(value: float) -> Rows | Columns:
        return plgpu.layout_cast(jnp.full((shape[axis],), value, jnp.float32), layout.reduce(1 - axis))

    rounds = lax.div(num + (SPLITS_AT_ONCE - 1), jnp.int32(SPLITS_AT_ONCE))
    return lax.fori_loop(0, rounds, add, (zeros, full(-jnp.inf), full(0.0)))
