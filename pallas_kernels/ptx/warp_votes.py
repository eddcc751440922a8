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

VOTE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def _needs_rescale(y: Tile, row_max: Rows) -> Scalar:
    return jnp.any(y >= 0) | jnp.any(row_max == -jnp.inf)


@with_fallback(_needs_rescale)
def needs_rescale(y: Tile, row_max: Rows) -> Scalar:
    """Return whether any of the warp's rows must raise its row maximum (lazy rescale).

    That is, whether an element of y is not negative or a row maximum is -inf. The test takes half an
    instruction per element, where a maximum takes one and shuffles.

    Args:
        y: Scores minus the row maximum in use, which has headroom above the scores: a tile, f32.
        row_max: Current maximum of each row, f32.
    """

    @plgpu.inline_mgpu(arg_types=(TILE, ROW), return_type=VOTE)
    def vote(
        _ctx: mgpu.LaunchContext, y: mgpu.FragmentedArray, row_max: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        require_layout(row_max.layout, ROW_LAYOUT)
        pairs = _register_pairs(y)
        # The AND of all elements has its sign bit set only if all are negative.
        both = "".join(f"and.b64 s, s, ${n}; " for n in range(2, len(pairs) + 1))
        lowest = " ".join(f"setp.eq.or.b32 p, ${len(pairs) + 1 + n}, 0xff800000, p;" for n in range(2))
        return _vote_any(
            f".reg .b64 s; .reg .b32 a, b; mov.b64 s, $1; {both}"
            f"mov.b64 {{a, b}}, s; and.b32 a, a, b; setp.ge.s32 p, a, 0; {lowest}",
            *pairs,
            *(lanes.bitcast(row, lanes.i32()) for row in row_max.registers.flat),
        )

    return vote(y, row_max) != 0


def _register_pairs(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return the tile's registers as 64-bit pairs of adjacent columns."""
    require_layout(array.layout, TILE_LAYOUT)
    return [lanes.bitcast(pair, lanes.i64()) for pair in array.registers.flat]


def _vote_any(code: str, *operands: ir.Value) -> mgpu.FragmentedArray:
    """Return whether predicate p, which `code` sets, is true in any lane of the warp."""
    text = f"{{ .reg .pred p; {code} vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }}"
    return fragments.as_scalar(lanes.ptx(text, *operands, touches_memory=True))
