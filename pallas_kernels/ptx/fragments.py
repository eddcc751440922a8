"""Arrays as Pallas has them, and their registers as lanes do."""

from collections.abc import Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.layouts import (
    BY_THREAD_LAYOUT,
    SCALAR_LAYOUT,
    THREADS,
    TILE_LAYOUT,
    require_layout,
)

type Four = list[ir.Value]
"""What a lane holds of 8 columns of a tile, as mma takes it: row g, columns 2 t and 2 t + 1; row g + 8."""


def numbers(array: mgpu.FragmentedArray) -> list[Four]:
    """f32 of a tile, [64, n]: what a lane has of each 8 columns."""
    require_layout(array.layout, TILE_LAYOUT)
    halves = array.registers.reshape(-1, 2)
    return [[_element(half, i) for half in pair for i in (0, 1)] for pair in halves]


def tiles(array: mgpu.FragmentedArray) -> list[list[Four]]:
    """`numbers` of every 64 rows of a taller tile."""
    rows, columns = array.shape
    found = numbers(array)
    return [found[i : i + columns // 8] for i in range(0, rows // 64 * (columns // 8), columns // 8)]


def array_of(columns: Sequence[Sequence[ir.Value]]) -> mgpu.FragmentedArray:
    """The inverse of `numbers`."""
    kind = ir.VectorType.get((2,), lanes.f32())
    registers = [vector.from_elements(kind, list(four[i : i + 2])) for four in columns for i in (0, 2)]
    return shaped(registers, TILE_LAYOUT, (64, 8 * len(columns)))


def shaped(
    registers: Sequence[ir.Value], layout: mgpu.FragmentedLayout, shape: tuple[int, ...]
) -> mgpu.FragmentedArray:
    """Registers, in the layout's order, as an array."""
    in_order = np.asarray(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=in_order, _layout=layout, _is_signed=None)


def by_thread(x: ir.Value) -> mgpu.FragmentedArray:
    """An f32 of each thread of a warpgroup as an array [THREADS]."""
    element = vector.from_elements(ir.VectorType.get((1,), lanes.f32()), [x])
    return shaped([element], BY_THREAD_LAYOUT, (THREADS,))


def of_thread(array: mgpu.FragmentedArray) -> ir.Value:
    """The inverse of by_thread."""
    require_layout(array.layout, BY_THREAD_LAYOUT)
    return _element(array.registers.item(), 0)


def scalar(x: mgpu.FragmentedArray) -> ir.Value:
    """The register of a number that all threads have."""
    require_layout(x.layout, SCALAR_LAYOUT)
    return x.registers.item()


def as_scalar(x: ir.Value) -> mgpu.FragmentedArray:
    """An int32 as a number; warps may have different ones, as long as only they ask."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def _element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=[i])
