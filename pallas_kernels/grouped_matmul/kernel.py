"""The kernel of grouped_matmul: a thread block multiplies a tile of rows by some columns of a group's matrix.

warpgroup 2                        shared memory              warpgroups 0, 1: 64 rows each
------------------------------     ----------------------     -----------------------------
TMA: rows, weights ------------->  stages of rows, weights -> wgmma: sums in registers
into each stage that is free       results <----------------  16-bit results
                                               ----------->   TMA: results to global memory

A thread block whose tile has no group exits at once. The sizes are chosen for few bytes of both operands per
product and no spilled registers, not by measurement yet; `python -m benchmarks experts` measures them.
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

TILE_ROWS = 128  # rows per thread block; each of its two compute warpgroups multiplies half of them
TILE_INPUTS = 64  # inputs per stage of both operands: one row of the swizzle
TILES_OUTPUTS = (256, 192, 128, 64)  # columns per thread block: the largest that divides the outputs
SHARED_MEMORY = 225 * 1024  # bytes of shared memory per thread block
WARPGROUP_ROWS = TILE_ROWS // 2
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulDims:
    """Static sizes of one call.

    Attributes:
        inputs: Number of elements of a row of `x`; products are summed over them.
        outputs: Number of columns of the result.
        outputs_first: Whether the matrices are [outputs, inputs] instead of [inputs, outputs].
    """

    inputs: int
    outputs: int
    outputs_first: bool

    @property
    def tile(self) -> int:
        """Number of columns of the result per thread block."""
        return tile_outputs(self.outputs)

    @property
    def column_tiles(self) -> int:
        """Number of thread blocks per tile of rows."""
        return self.outputs // self.tile


def tile_outputs(outputs: int) -> int:
    """Return the number of columns of the result per thread block."""
    return next(tile for tile in TILES_OUTPUTS if outputs % tile == 0)


def num_stages(outputs_per_tile: int, inputs: int) -> int:
    """Return the number of stages that fit in shared memory together with the result tile."""
    stage, results = 2 * (TILE_ROWS + outputs_per_tile) * TILE_INPUTS, 2 * TILE_ROWS * outputs_per_tile
    return min((SHARED_MEMORY - results) // stage, inputs // TILE_INPUTS)


def multiply_tiles(
    x: jax.Array,
    weights: jax.Array,
    group_of_tile: jax.Array,
    *,
    dims: GroupedMatmulDims,
    interpret: Interpret = None,
) -> jax.Array:
    """Run the kernel and return [rows, outputs] in x.dtype; rows of tiles without a group are undefined."""
    return plgpu.kernel(
        functools.partial(multiply_body, dims=dims),
        out_type=jax.ShapeDtypeStruct((len(x), dims.outputs), x.dtype),
        scratch_types=[swizzled_smem((2, WARPGROUP_ROWS, dims.tile), x.dtype)],
        grid=(len(x) // TILE_ROWS * dims.column_tiles,),
        grid_names=("work_tile",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="grouped_matmul",
        interpret=interpret,
    )(x, weights, group_of_tile)


def multiply_body(
    x: Ref, weights: Ref, group_of_tile: Ref, out: Ref, results_s: Ref, *, dims: GroupedMatmulDims
) -> None:
    """Compute one tile of the result; `results_s` is [2, WARPGROUP_ROWS, tile] in shared memory."""
    work_tile, column_tiles = lax.axis_index("work_tile"), jnp.int32(dims.column_tiles)
    tile, column = lax.div(work_tile, column_tiles), lax.rem(work_tile, column_tiles)
    group, wg = group_of_tile[tile], lax.axis_index("wg")
    first_row = pl.multiple_of(tile * TILE_ROWS, TILE_ROWS)
    columns = pl.ds(pl.multiple_of(column * dims.tile, dims.tile), dims.tile)
    wg_rows = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
    stages = num_stages(dims.tile, dims.inputs)
    max_in_flight = min(1, stages - 1)  # wgmmas still running when the next one is issued

    def multiply(_: Any, rows_s: Ref, matrix_s: Ref, acc: Ref) -> Ref:
        matrix_s = matrix_s.transpose((1, 0)) if dims.outputs_first else matrix_s
        plgpu.wgmma(acc, rows_s.at[wg_rows], matrix_s)
        # When only `max_in_flight` wgmmas run, the earlier stages have been read, and the loader may refill
        # them.
        plgpu.wgmma_wait(max_in_flight)
        return acc

    def compute(run_pipeline: Any) -> None:
        def accumulate(acc: Ref) -> jax.Array:
            run_pipeline(acc)
            return acc[...]

        # Reading the accumulator waits for the last wgmma.
        accumulator = pl.run_scoped(accumulate, plgpu.ACC((WARPGROUP_ROWS, dims.tile), f32))
        results_s[wg] = accumulator.astype(out.dtype)
        # TMA reads the results from shared memory only after the commit, and the thread block must not exit
        # before that copy has ended.
        plgpu.commit_smem()
        out_rows = pl.ds(pl.multiple_of(first_row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
        plgpu.copy_smem_to_gmem(results_s.at[wg], out.at[out_rows, columns])
        plgpu.wait_smem_to_gmem(0)

    transforms = swizzle_transforms(x.dtype.itemsize)
    spec = functools.partial(plgpu.BlockSpec, transforms=transforms, delay_release=max_in_flight)
    if dims.outputs_first:
        matrix_spec = spec((dims.tile, TILE_INPUTS), lambda k: (0, k))
    else:
        matrix_spec = spec((TILE_INPUTS, dims.tile), lambda k: (k, 0))
    # Warpgroup 2 loads stages ahead; warpgroups 0 and 1 call `compute`, and `multiply` once per stage.
    pipeline = plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(dims.inputs // TILE_INPUTS,),
        memory_registers=40,
        in_specs=[spec((TILE_ROWS, TILE_INPUTS), lambda k: (0, k)), matrix_spec],
        wg_axis="wg",
        num_compute_wgs=2,
        max_concurrent_steps=stages,
        compute_context=compute,
    )

    @pl.when(group >= 0)
    def run_pipeline() -> None:
        matrix = weights.at[group]
        matrix = matrix.at[columns] if dims.outputs_first else matrix.at[:, columns]
        pipeline(x.at[pl.ds(first_row, TILE_ROWS)], matrix)
