"""Votes of the lanes of a warp over a tile in registers: conditions that may differ between warps.

A warp may branch on its vote if the branch contains no code that the whole warpgroup must execute together. A
fallback returns one vote for the whole warpgroup, which is true if the vote of any warp is true.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW_LAYOUT, SCALAR, WGMMA_LAYOUT, require_layout
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.types import Rows, Scalar, Tile

VOTE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def _needs_rescale(y: Tile, row_max: Rows) -> Scalar:
    return jnp.any(y >= 0) | jnp.any(row_max == -jnp.inf)


@with_fallback(_needs_rescale)
def needs_rescale(y: Tile, row_max: Rows) -> Scalar:
    """Return whether any row of the warp has a score that reaches its row_max, or a row_max of -inf.

    Testing the signs takes half an instruction per element. A maximum would take one instruction per element
    and several shuffles.

    Args:
        y: Scores minus row_max, f32 tile. A value of at least 0 means that the score reaches row_max.
        row_max: Number that is subtracted from the scores of each row, f32; see LazyRescale.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, ROW), return_type=VOTE)
    def vote(
        _ctx: mgpu.LaunchContext, y: mgpu.FragmentedArray, row_max: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        require_layout(row_max.layout, ROW_LAYOUT)
        pairs = _register_pairs(y)
        # The AND of all elements has its sign bit set only if all are negative.
        both = "".join(f"and.b64 s, s, ${n}; " for n in range(2, len(pairs) + 1))
        lowest = " ".join(
            f"setp.eq.or.b32 p, ${len(pairs) + 1 + n}, 0xff800000, p;" for n in range(row_max.registers.size)
        )
        return _vote_any(
            f".reg .b64 s; .reg .b32 a, b; mov.b64 s, $1; {both}"
            f"mov.b64 {{a, b}}, s; and.b32 a, a, b; setp.ge.s32 p, a, 0; {lowest}",
            *pairs,
            *(lanes.bitcast(row, lanes.i32()) for row in row_max.registers.flat),
        )

    return vote(y, row_max) != 0


def _register_pairs(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return the registers of a lane as 64-bit values, each with two adjacent columns of the tile."""
    require_layout(array.layout, WGMMA_LAYOUT)
    return [lanes.bitcast(pair, lanes.i64()) for pair in array.registers.flat]


def _vote_any(code: str, *operands: ir.Value) -> mgpu.FragmentedArray:
    """Return whether `code` sets the predicate p in any lane of the warp."""
    text = f"{{ .reg .pred p; {code} vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }}"
    return fragments.as_scalar(lanes.ptx(text, *operands, touches_memory=True))
