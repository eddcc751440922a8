"""A thread block multiplies a tile of rows with some columns of its group's matrix, or leaves at once.

warpgroup 2                        shared memory            warpgroups 0, 1: 64 rows each
------------------------------     --------------------     ------------------------------
TMA: rows, weights ------------->  stages of both ------->  tensor cores: sums in registers
as stages become free              results <--------------  in 16 bits
                                             ------------>  TMA: results
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzle_transforms, swizzled_smem
from pallas_kernels.shared.types import Interpret, Ref

TILE_ROWS = 128  # rows of a thread block, half of them each of its two warpgroups that multiply
TILE_INPUTS = 64  # of both operands, a stage: a row of the swizzle
TILES_OUTPUTS = (256, 192, 128, 64)  # columns of a thread block, the widest that divides the outputs
SHARED_MEMORY = 225 * 1024  # bytes a thread block may have
ROWS = TILE_ROWS // 2  # of a warpgroup
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call.

    Attributes:
        inputs: Summed over.
        outputs: Columns.
        outputs_first: The matrices are [outputs, inputs], else [inputs, outputs].
    """

    inputs: int
    outputs: int
    outputs_first: bool

    @property
    def tile(self) -> int:
        """Columns of a thread block."""
        return tile_outputs(self.outputs)

    @property
    def column_tiles(self) -> int:
        """Thread blocks that share a tile of rows."""
        return self.outputs // self.tile


def multiply_tiles(
    x: jax.Array, weights: jax.Array, group_of_tile: jax.Array, *, shape: Shape, interpret: Interpret = None
) -> jax.Array:
    """Results [rows, outputs] in x.dtype; those of tiles without a group are garbage."""
    return plgpu.kernel(
        functools.partial(multiply_body, shape=shape),
        out_type=jax.ShapeDtypeStruct((len(x), shape.outputs), x.dtype),
        scratch_types=[swizzled_smem((2, ROWS, shape.tile), x.dtype)],
        grid=(len(x) // TILE_ROWS * shape.column_tiles,),
        grid_names=("item",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="grouped_matmul",
        interpret=interpret,
    )(x, weights, group_of_tile)


def multiply_body(x: Ref, weights: Ref, group_of_tile: Ref, out: Ref, results: Ref, *, shape: Shape) -> None:
    """What a thread block does; `results` is [2, ROWS, tile] in shared memory."""
    item, column_tiles = lax.axis_index("item"), jnp.int32(shape.column_tiles)
    tile, column = lax.div(item, column_tiles), lax.rem(item, column_tiles)
    group, wg = group_of_tile[tile], lax.axis_index("wg")
    first_row = pl.multiple_of(tile * TILE_ROWS, TILE_ROWS)
    columns = pl.ds(pl.multiple_of(column * shape.tile, shape.tile), shape.tile)
    mine = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
    stages = num_stages(shape.tile, shape.inputs)
    behind = min(1, stages - 1)  # products that are in flight when the next one begins

    def multiply(_: Any, rows: Ref, matrix: Ref, acc: Ref) -> Ref:
        matrix = matrix.transpose((1, 0)) if shape.outputs_first else matrix
        plgpu.wgmma(acc, rows.at[mine], matrix)
        plgpu.wgmma_wait(behind)  # the stages before are free now
        return acc

    def compute(run: Any) -> None:
        def sums(acc: Ref) -> jax.Array:
            run(acc)
            return acc[...]

        results[wg] = pl.run_scoped(sums, plgpu.ACC((ROWS, shape.tile), f32)).astype(out.dtype)
        plgpu.commit_smem()
        to = out.at[pl.ds(pl.multiple_of(first_row + wg * ROWS, ROWS), ROWS), columns]
        plgpu.copy_smem_to_gmem(results.at[wg], to)
        plgpu.wait_smem_to_gmem(0)

    transforms = swizzle_transforms(x.dtype.itemsize)
    spec = functools.partial(plgpu.BlockSpec, transforms=transforms, delay_release=behind)
    if shape.outputs_first:
        of_matrix = spec((shape.tile, TILE_INPUTS), lambda k: (0, k))
    else:
        of_matrix = spec((TILE_INPUTS, shape.tile), lambda k: (k, 0))
    pipeline = plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(shape.inputs // TILE_INPUTS,),
        memory_registers=40,
        in_specs=[spec((TILE_ROWS, TILE_INPUTS), lambda k: (0, k)), of_matrix],
        wg_axis="wg",
        num_compute_wgs=2,
        max_concurrent_steps=stages,
        compute_context=compute,
    )

    @pl.when(group >= 0)
    def live() -> None:
        matrix = weights.at[group]
        matrix = matrix.at[columns] if shape.outputs_first else matrix.at[:, columns]
        pipeline(x.at[pl.ds(first_row, TILE_ROWS)], matrix)


def tile_outputs(outputs: int) -> int:
    """Columns of a thread block."""
    return next(tile for tile in TILES_OUTPUTS if outputs % tile == 0)


def num_stages(tile: int, inputs: int) -> int:
    """Stages of both operands beside the tile of results, no more than there is to load."""
    stage, results = 2 * (TILE_ROWS + tile) * TILE_INPUTS, 2 * TILE_ROWS * tile
    return min((SHARED_MEMORY - results) // stage, inputs // TILE_INPUTS)
