"""Lookups of single elements of arrays in global memory, at an index per element of an array in registers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.shared.types import Layout, Ref


@with_fallback(lambda table, index, *, layout: table[...][index])
def look_up(table: Ref, index: jax.Array, *, layout: Layout) -> jax.Array:
    """Return `table[index]` for each element of `index`; every thread loads the elements that it holds.

    Args:
        table: Vector of f32 or int32 in global memory.
        index: Indices within the table, int32.
        layout: Layout of the indices and of the result.
    """
    is_signed = True if table.dtype == jnp.int32 else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, table.dtype, layout=layout),
    )
    def load(_ctx: mgpu.LaunchContext, table: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        element_type = lanes.f32() if is_signed is None else lanes.i32()
        registers = np.empty_like(index.registers)
        for position, register in np.ndenumerate(index.registers):
            (num,) = ir.VectorType(register.type).shape
            elements = [
                vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(num)
            ]
            loaded = [lanes.load(table, element, element_type) for element in elements]
            registers[position] = vector.from_elements(ir.VectorType.get((num,), element_type), loaded)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=is_signed)

    return load(table, plgpu.layout_cast(index, layout))
