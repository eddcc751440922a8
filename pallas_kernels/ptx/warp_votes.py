"""Votes of single warps over tiles in registers: scalars that may differ between warps.

A warp may branch on its vote as long as the branch contains nothing that the whole warpgroup must execute. A
fallback votes for all warps at once and says yes if any warp would; a warp may find nothing to do then.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW, ROW_LAYOUT, SCALAR, TILE, TILE_LAYOUT, require_layout
from pallas_kernels.shared.types import Rows, Scalar, Tile

ANSWER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def _is_due(y: Tile, top: Rows) -> Scalar:
    return jnp.any(y >= 0) | jnp.any(top == -jnp.inf)


@with_fallback(_is_due)
def needs_rescale(y: Tile, top: Rows) -> Scalar:
    """Whether the warp's part of y has a value that is not negative, or that of top one of -inf.

    Half an instruction a value, where a maximum takes one and asks the neighbours, too.

    Args:
        y: A tile, f32.
        top: One value a row, f32.
    """

    @plgpu.inline_mgpu(arg_types=(TILE, ROW), return_type=ANSWER)
    def ask(
        _ctx: mgpu.LaunchContext, y: mgpu.FragmentedArray, top: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        require_layout(top.layout, ROW_LAYOUT)
        pairs = _pairs(y)
        both = "".join(f"and.b64 s, s, ${n}; " for n in range(2, len(pairs) + 1))
        lowest = " ".join(f"setp.eq.or.b32 p, ${len(pairs) + 1 + n}, 0xff800000, p;" for n in range(2))
        return _vote(
            f".reg .b64 s; .reg .b32 a, b; mov.b64 s, $1; {both}"
            f"mov.b64 {{a, b}}, s; and.b32 a, a, b; setp.ge.s32 p, a, 0; {lowest}",
            *pairs,
            *(lanes.bits(row, lanes.i32()) for row in top.registers.flat),
        )

    return ask(y, top) != 0


def _pairs(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Two neighbours at once, in 64 bits."""
    require_layout(array.layout, TILE_LAYOUT)
    return [lanes.bits(pair, lanes.i64()) for pair in array.registers.flat]


def _vote(code: str, *operands: ir.Value) -> mgpu.FragmentedArray:
    """Whether p, which `code` sets, is true in some lane."""
    text = f"{{ .reg .pred p; {code} vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }}"
    return fragments.as_scalar(lanes.ptx(text, *operands, touches_memory=True))
