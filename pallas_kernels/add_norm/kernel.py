"""The kernel of add_norm: one thread block per row, which loads and stores the row once.

x[row], sublayer_out[row], weight ---> x + sublayer_out ---> sums[row]
                                    |
                        mean square over all threads
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

BYTES_AT_ONCE = 16  # bytes that one load of a thread reads


class AddNormRefs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        x: Residual stream, [rows, width].
        sublayer_out: Rows to add, [rows, width], or None.
        weight: Weight of the norm, [width].
    """

    x: Ref
    sublayer_out: Ref | None
    weight: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Static options of the RMS norm.

    Attributes:
        eps: Number added to the mean square.
        is_offset: Whether the factor is 1 + weight; see apply_norm_weight.
    """

    eps: float
    is_offset: bool


def add_and_norm(
    refs: AddNormRefs, options: NormOptions, *, interpret: Interpret = None
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel and return the sum x + sublayer_out (or x) and its RMS norm."""
    rows, _ = refs.x.shape
    like_x = jax.ShapeDtypeStruct(refs.x.shape, refs.x.dtype)
    body = functools.partial(_add_norm_body if refs.sublayer_out is not None else _norm_body, options=options)
    outs = plgpu.kernel(
        body,
        out_type=like_x if refs.sublayer_out is None else (like_x, like_x),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="add_norm",
    )(refs)
    return (refs.x, outs) if refs.sublayer_out is None else outs


def _add_norm_body(refs: AddNormRefs, sums: Ref, normed: Ref, *, options: NormOptions) -> None:
    row = lax.axis_index("row")
    assert refs.sublayer_out is not None
    # Issue all loads before the first use, so that their latencies overlap.
    x, sublayer_out, weight = _load(refs.x.at[row]), _load(refs.sublayer_out.at[row]), _load(refs.weight)
    # Round the sum first: the norm is that of the residual stream as it is stored.
    x = (x.astype(jnp.float32) + sublayer_out.astype(jnp.float32)).astype(x.dtype)
    store_unoptimized(sums.at[row], x)
    store_unoptimized(normed.at[row], _rms_norm(x, weight, options))


def _norm_body(refs: AddNormRefs, normed: Ref, *, options: NormOptions) -> None:
    row = lax.axis_index("row")
    x, weight = _load(refs.x.at[row]), _load(refs.weight)
    store_unoptimized(normed.at[row], _rms_norm(x, weight, options))


def _load(ref: Ref) -> Tile:
    (width,) = ref.shape
    vec_size = math.gcd(width // THREADS, BYTES_AT_ONCE // ref.dtype.itemsize)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vec_size)
    return plgpu.load(ref, layout=layout, optimized=False)


def _rms_norm(x: Tile, weight: Tile, options: NormOptions) -> Tile:
    x_f32, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    # The sum is over all threads of the warpgroup, which synchronize for it.
    factor = lax.rsqrt(jnp.sum(x_f32 * x_f32) / x.shape[0] + options.eps)
    return apply_norm_weight(x_f32 * factor, weight, x.dtype, is_offset=options.is_offset)


def apply_norm_weight(normed: Tile, weight: Tile, dtype: DTypeLike, *, is_offset: bool) -> Tile:
    """Multiply normalized rows by the weight of an RMS norm and round as the model family does.

    Args:
        normed: Rows divided by their root mean square, f32.
        weight: Weight of the norm, f32.
        dtype: Dtype of the result.
        is_offset: Whether the factor is 1 + weight and only the product is rounded (Gemma). Otherwise the
            rows are also rounded before the multiplication (Llama).
    """
    if is_offset:
        return (normed * (1.0 + weight)).astype(dtype)
    return (normed.astype(dtype).astype(jnp.float32) * weight).astype(dtype)
