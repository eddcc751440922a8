"""The online softmax over the tiles of a request, in base 2, and the scales of stored keys and values.

Scales are not applied to keys and values. The scale of a key multiplies the key's row of S^T, and the scale
of a value multiplies the value's row of P^T. A scale per tensor, head or channel multiplies all of S^T or
O^T.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.mma import TileMma
from pallas_kernels.paged_decode.refs import has_token_scales
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

SMALLEST_SCALE = 2.0**-60
W = plgpu.Layout.WGMMA


def online_softmax(
    s: Tile, v_scale: Tile | None, row_max: Columns | Tile, row_sum: Tile, mma: TileMma
) -> tuple[Tile, Columns | Tile, Columns | Tile, Tile]:
    """Add the scores of one tile to the online softmax.

    Args:
        s: Scores times log2(e), [tile_kv, tile_q].
        v_scale: Scale of each key's value, broadcast to the shape of s; None without scales per token.
        row_max: Maximum score of each query so far, in the shape that `TileMma.broadcast` takes.
        row_sum: Sum of the exponentials so far, one partial sum per thread; the end of the segment adds them.
        mma: Matrix products of the kernel, which define the shape of row_max.

    Returns:
        The probabilities times `v_scale`, the factor `alpha` that rescales the earlier sums, and the new
        `row_max` and `row_sum`.
    """
    headroom, scaled = mma.log2_headroom, s
    # f16 must hold the probability times the scale, so the scale takes part in the maximum.
    if v_scale is not None and headroom:
        scaled = s + jnp.log2(jnp.maximum(v_scale, SMALLEST_SCALE))
    tile_max = mma.row_max(scaled)
    new_max = jnp.maximum(row_max, tile_max - headroom if headroom else tile_max)
    # Without a visible key so far the maximum is -inf, and subtracting it would give NaN.
    finite_max = new_max if mma.row_max_is_finite else jnp.where(new_max == -jnp.inf, 0.0, new_max)
    alpha = jnp.exp2(row_max - finite_max)
    p = jnp.exp2(s - mma.broadcast(finite_max))
    row_sum = row_sum * mma.broadcast(alpha) + p
    return p if v_scale is None else p * v_scale, alpha, new_max, row_sum


def load_static_scale(scale_g: Ref, segment: Segment) -> Scalar | None:
    """Return the scale that all keys or values of a segment share, or None if there is no such scale."""
    if scale_g is None or scale_g.ndim != 1:
        return None
    return scale_g[segment.kv_head if scale_g.shape[0] > 1 else 0]


def load_token_scales(scale_s: Ref, stage: Scalar, tile: tuple[int, int]) -> Tile:
    """Return the scale of each token of a stage, broadcast over the token's row of a tile."""
    scale = plgpu.load(scale_s.at[stage], layout=W.reduce(1), optimized=False)
    return lax.broadcast_in_dim(scale, tile, [0])


def scale_output(
    acc: Tile, chunk: int, segment: Segment, v_scale_g: Ref, static_scale: Scalar | None
) -> Tile:
    """Return a chunk of O^T times the values' scale, unless the scale is per token.

    Args:
        acc: Chunk of O^T.
        chunk: Static index of the chunk.
        segment: Segment of the output.
        v_scale_g: `DecodeCacheRefs.v_scale`.
        static_scale: Result of `load_static_scale`, which the caller loads early to hide the latency.
    """
    if v_scale_g is None or has_token_scales(v_scale_g):
        return acc
    if static_scale is not None:
        return acc * static_scale
    channels = plgpu.load(v_scale_g.at[segment.kv_head, chunk], layout=W.reduce(1), optimized=False)
    return acc * lax.broadcast_in_dim(channels, acc.shape, [0])
