"""Conversions between Pallas arrays in registers and the registers that a lane holds."""

from collections.abc import Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.layouts import SCALAR_LAYOUT, WGMMA_LAYOUT, require_layout
from pallas_kernels.shared.layouts import WARPGROUP_ROWS

type Fragment = list[ir.Value]
"""A lane's four f32 of an mma accumulator of 8 columns: row g, columns 2 t and 2 t + 1; then row g + 8."""


def column_fragments(array: mgpu.FragmentedArray) -> list[Fragment]:
    """Return a lane's fragment of each 8 columns of an f32 tile [64, n]."""
    require_layout(array.layout, WGMMA_LAYOUT)
    halves = array.registers.reshape(-1, 2)
    return [[_element(half, i) for half in pair for i in (0, 1)] for pair in halves]


def row_tiles(array: mgpu.FragmentedArray) -> list[list[Fragment]]:
    """Return `column_fragments` of each 64 rows of an f32 tile whose number of rows is a multiple of 64."""
    fragments, per_row_tile = column_fragments(array), array.shape[1] // 8
    return [fragments[i : i + per_row_tile] for i in range(0, len(fragments), per_row_tile)]


def tile_from_fragments(fragments: Sequence[Sequence[ir.Value]]) -> mgpu.FragmentedArray:
    """Return the f32 tile [64, n] with the given fragments; the inverse of `column_fragments`."""
    return tile_from_row_tiles([fragments])


def tile_from_row_tiles(row_tiles: Sequence[Sequence[Sequence[ir.Value]]]) -> mgpu.FragmentedArray:
    """Return the f32 tile with the given fragments of each 64 rows; the inverse of `row_tiles`."""
    pair_type = ir.VectorType.get((2,), lanes.f32())
    registers = [
        vector.from_elements(pair_type, list(fragment[i : i + 2]))
        for fragments in row_tiles
        for fragment in fragments
        for i in (0, 2)
    ]
    shape = WARPGROUP_ROWS * len(row_tiles), 8 * len(row_tiles[0])
    return array_from_registers(registers, WGMMA_LAYOUT, shape)


def array_from_registers(
    registers: Sequence[ir.Value], layout: mgpu.FragmentedLayout, shape: tuple[int, ...]
) -> mgpu.FragmentedArray:
    """Return the array with the given registers, which are in the layout's order."""
    in_order = np.asarray(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=in_order, _layout=layout, _is_signed=None)


def scalar(x: mgpu.FragmentedArray) -> ir.Value:
    """Return the register of a scalar that all threads hold."""
    require_layout(x.layout, SCALAR_LAYOUT)
    return x.registers.item()


def as_scalar(x: ir.Value) -> mgpu.FragmentedArray:
    """Return an int32 register as a scalar; warps may hold different values if no warp reads another's."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def _element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])
