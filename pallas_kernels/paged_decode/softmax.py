"""The online softmax over a request's tiles of keys, in powers of 2."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.mma import TileMma
from pallas_kernels.paged_decode.refs import has_token_scales
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

SMALLEST_SCALE = 2.0**-60


def online_softmax(
    s: Tile, weight: Tile | None, top: Columns | Tile, total: Tile, products: TileMma
) -> tuple[Tile, Columns | Tile, Columns | Tile, Tile]:
    """Takes the scores of one more tile of keys.

    Args:
        s: Scores times log2(e): [tile_kv, tile_q].
        weight: What each key's value is to be multiplied by, or None.
        top: Largest scores so far; see TileMma.spread.
        total: Sums of the exponentials so far.
        products: Who multiplies.

    Returns:
        The probabilities, weighted; what earlier sums are to be multiplied by; the new `top` and `total`.
    """
    headroom, heavy = products.headroom, s
    if weight is not None and headroom:
        heavy = s + jnp.log2(jnp.maximum(weight, SMALLEST_SCALE))
    tile_top = products.largest(heavy)
    new_top = jnp.maximum(top, tile_top - headroom if headroom else tile_top)
    base = new_top if products.sees_a_key else jnp.where(new_top == -jnp.inf, 0.0, new_top)
    shrink = jnp.exp2(top - base)
    p = jnp.exp2(s - products.spread(base))
    total = total * products.spread(shrink) + p  # summed over the keys at the end, once
    return p if weight is None else p * weight, shrink, new_top, total


W = plgpu.Layout.WGMMA


def of_head(scale_g: Ref, segment: Segment) -> Scalar | None:
    """The number that multiplies a segment's keys or values; None where there is none, or more than one."""
    if scale_g is None or scale_g.ndim != 1:
        return None
    return scale_g[segment.kv_head if scale_g.shape[0] > 1 else 0]


def of_keys(scale_s: Ref, stage: Scalar, tile: tuple[int, int]) -> Tile:
    """A stage's scales per token, each over its row of a tile."""
    scale = plgpu.load(scale_s.at[stage], layout=W.reduce(1), optimized=False)
    return lax.broadcast_in_dim(scale, tile, [0])


def scaled_output(acc: Tile, chunk: int, segment: Segment, v_scale_g: Ref, factor: Scalar | None) -> Tile:
    """A chunk of O^T times the values' static scale; `factor` is of_head's, asked for in good time."""
    if v_scale_g is None or has_token_scales(v_scale_g):
        return acc
    if factor is not None:
        return acc * factor
    channels = plgpu.load(v_scale_g.at[segment.kv_head, chunk], layout=W.reduce(1), optimized=False)
    return acc * lax.broadcast_in_dim(channels, acc.shape, [0])
