"""Sums of the rows of a tile in two steps: of the columns that a lane holds, and later of the lanes."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW_LAYOUT, require_layout
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.types import Rows, Tile


@with_fallback(lambda x: x.sum(axis=1))
def sum_lane_columns(x: Tile) -> Rows:
    """Return the sum of the columns that a lane holds of each row, f32 [rows]; add them with `add_lanes`.

    The four lanes of a row hold different sums, unlike those of other vectors in this layout. Such vectors
    may be added and multiplied. A fallback returns the whole sums.

    Args:
        x: f32 [rows, columns].
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=ROW)
    )
    def add(_ctx: mgpu.LaunchContext, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        sums = []
        for columns in fragments.row_tiles(x):
            for half in (0, 2):
                # Two sums at first, because an addition waits for the previous one on its register.
                first, second = columns[0][half : half + 2]
                for fragment in columns[1:]:
                    first, second = arith.addf(first, fragment[half]), arith.addf(second, fragment[half + 1])
                sums.append(arith.addf(first, second))
        return _rows_from_registers(sums)

    return add(x)


@with_fallback(lambda x: x)
def add_lanes(x: Rows) -> Rows:
    """Return the sum over the four lanes of each row, f32 [rows], from sums of `sum_lane_columns`."""

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=ROW))
    def add(_ctx: mgpu.LaunchContext, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        require_layout(x.layout, ROW_LAYOUT)
        sums = [vector.extract(y, dynamic_position=[], static_position=[0]) for y in x.registers.flat]
        for distance in (1, 2):
            sums = [arith.addf(y, lanes.shuffle(y, "bfly", lanes.const(distance))) for y in sums]
        return _rows_from_registers(sums)

    return add(x)


def _rows_from_registers(registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """Return the f32 vector whose rows g and g + 8 of each 64 rows are the registers."""
    vector_type = ir.VectorType.get((1,), lanes.f32())
    vectors = [vector.from_elements(vector_type, [register]) for register in registers]
    return fragments.array_from_registers(vectors, ROW_LAYOUT, (32 * len(registers),))
