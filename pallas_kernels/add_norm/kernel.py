"""One thread block takes one row: it goes through registers once.

x[row], delta[row], weight ---> x + delta ---> total[row]
                                    |
                         mean of squares of all threads
                                    |
                          / rms, * weight ---> normed[row]
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.ptx.layouts import THREADS
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.types import Interpret, Ref, Tile

BYTES_AT_ONCE = 16  # that a thread loads


class Refs(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: [rows, width].
        delta: As x, or None.
        weight: [width].
    """

    x: Ref
    delta: Ref | None
    weight: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """What is static about the norm; see `add_norm`."""

    eps: float
    is_offset: bool


def add_and_norm(refs: Refs, norm: Norm, *, interpret: Interpret = None) -> tuple[jax.Array, jax.Array]:
    """(x + delta, its norm); without delta x itself is the first."""
    rows, _ = refs.x.shape
    like_x = jax.ShapeDtypeStruct(refs.x.shape, refs.x.dtype)
    body = functools.partial(_body if refs.delta is not None else _norm_body, norm=norm)
    outs = plgpu.kernel(
        body,
        out_type=like_x if refs.delta is None else (like_x, like_x),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="add_norm",
    )(refs)
    return (refs.x, outs) if refs.delta is None else outs


def _body(refs: Refs, total: Ref, normed: Ref, *, norm: Norm) -> None:
    row = lax.axis_index("row")
    assert refs.delta is not None
    x, delta, weight = _load(refs.x.at[row]), _load(refs.delta.at[row]), _load(refs.weight)
    x = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(x.dtype)
    store_unoptimized(total.at[row], x)
    store_unoptimized(normed.at[row], _normed(x, weight, norm))


def _norm_body(refs: Refs, normed: Ref, *, norm: Norm) -> None:
    row = lax.axis_index("row")
    x, weight = _load(refs.x.at[row]), _load(refs.weight)
    store_unoptimized(normed.at[row], _normed(x, weight, norm))


def _load(ref: Ref) -> Tile:
    (width,) = ref.shape
    vec_size = math.gcd(width // THREADS, BYTES_AT_ONCE // ref.dtype.itemsize)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vec_size)
    return plgpu.load(ref, layout=layout, optimized=False)


def _normed(x: Tile, weight: Tile, norm: Norm) -> Tile:
    """Divided by the root mean square in f32, rounded where Llama does, or once as Gemma."""
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(wide * wide) / x.shape[0] + norm.eps)
    return weighted(wide * factor, weight, x.dtype, is_offset=norm.is_offset)


def weighted(normed: Tile, weight: Tile, dtype: DTypeLike, *, is_offset: bool) -> Tile:
    """What was divided by its root mean square, times a weight; rounded before, too, or once.

    Args:
        normed: f32.
        weight: f32.
        dtype: Of the result.
        is_offset: Gemma's: the factor is 1 + weight, and the product is rounded once. Else Llama's.
    """
    if is_offset:
        return (normed * (1.0 + weight)).astype(dtype)
    return (normed.astype(dtype).astype(jnp.float32) * weight).astype(dtype)
