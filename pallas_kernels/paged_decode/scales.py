"""Scales of stored keys and values. They touch neither: a key's multiplies its row of S^T, a value's of P^T.

A static one, of a tensor, a head or a channel, multiplies all of S^T, or O^T.
"""

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import has_token_scales
from pallas_kernels.paged_decode.segments import Segment
from pallas_kernels.shared.types import Ref, Scalar, Tile

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
