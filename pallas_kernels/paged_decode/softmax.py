"""The online softmax over the tiles of a request, in base 2, and the scales of stored keys and values.

A scale per token multiplies no key or value: that of a key multiplies its row of S^T, that of a value its row
of P^T. A static scale, of a tensor, a head or a channel, multiplies all of S^T, or of O^T.
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
        v_scale: Factor of each key's value, over a tile; None without scales per token.
        row_max: Maximum score of each query so far; see `TileMma.broadcast`.
        row_sum: Sum of the exponentials so far, one per thread: it is summed over the keys once, at the end.
        mma: Matrix multiplication of the tile.

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
    """Return the number that multiplies all keys or values of a segment; None if there is no such number."""
    if scale_g is None or scale_g.ndim != 1:
        return None
    return scale_g[segment.kv_head if scale_g.shape[0] > 1 else 0]


def load_token_scales(scale_s: Ref, stage: Scalar, tile: tuple[int, int]) -> Tile:
    """Return the scales per token of a stage, each broadcast over its row of a tile."""
    scale = plgpu.load(scale_s.at[stage], layout=W.reduce(1), optimized=False)
    return lax.broadcast_in_dim(scale, tile, [0])


def scale_output(
    acc: Tile, chunk: int, segment: Segment, v_scale_g: Ref, static_scale: Scalar | None
) -> Tile:
    """Multiply a chunk of O^T by the static scale of the values.

    Args:
        acc: Chunk of O^T.
        chunk: Static index of the chunk.
        segment: Segment of the output.
        v_scale_g: Scale of the values in the form of DecodeCacheRefs, or None.
        static_scale: Result of `load_static_scale`, loaded early so that no one waits for it here.
    """
    if v_scale_g is None or has_token_scales(v_scale_g):
        return acc
    if static_scale is not None:
        return acc * static_scale
    channels = plgpu.load(v_scale_g.at[segment.kv_head, chunk], layout=W.reduce(1), optimized=False)
    return acc * lax.broadcast_in_dim(channels, acc.shape, [0])
