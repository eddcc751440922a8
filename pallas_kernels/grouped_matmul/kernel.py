"""The kernel of grouped_matmul: a thread block multiplies a tile of rows by some columns of a group's matrix.

warpgroup 2                        shared memory              warpgroups 0, 1: 64 rows each
------------------------------     ----------------------     -----------------------------
TMA: rows, weights ------------->  stages of rows, weights -> wgmma: sums in registers
into each stage that is free       results <----------------  16-bit results
                                               ----------->   TMA: results to global memory

Without wgmma, a thread block is one warpgroup. It fills the stages by cp.async, multiplies the rows by
mma.sync, a quarter of each 64 rows per warp, and stores the results from registers.

A thread block whose tile has no group exits at once. The sizes are chosen for few bytes of both operands per
product and no spilled registers, not by measurement yet; `python -m benchmarks experts` measures them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.architectures import ARCHITECTURES, Architecture
from pallas_kernels.ptx.cp_async import commit_copies, copy_rows, wait_for_warpgroup
from pallas_kernels.ptx.tile_mma import multiply_tiles as multiply_by_mma
from pallas_kernels.shared.layouts import WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.memory import PANEL, store_unoptimized, swizzle_transforms, swizzled_smem
from pallas_kernels.shared.types import Interpret, Ref, Scalar, Slice, Tile, f32

TILE_ROWS = 2 * WARPGROUP_ROWS  # rows per thread block, which has two compute warpgroups
TILE_INPUTS = PANEL  # inputs per stage of both operands: one row of the swizzle
TILES_OUTPUTS = (256, 192, 128, 64)  # columns per thread block: the largest that divides the outputs
SHARED_MEMORY = 225 * 1024  # bytes of shared memory per thread block
# The same for mma.sync, estimated: two thread blocks per SM if shared memory has two stages for each.
MMA_TILES_OUTPUTS = (128, 64)
MMA_STAGES = range(2, 5)
RESERVED_BYTES, ALIGNMENT_BYTES = 1024, 1024  # per thread block: by the GPU, and at most for alignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulDims:
    """Static sizes of one call.

    Attributes:
        inputs: Number of elements of a row of `x`; products are summed over them.
        outputs: Number of columns of the result.
        outputs_first: Whether the matrices are [outputs, inputs] instead of [inputs, outputs].
        gpu: Compute capability that the kernel is built for, one of architectures.ARCHITECTURES.
    """

    inputs: int
    outputs: int
    outputs_first: bool
    gpu: str = "9.0"

    @property
    def architecture(self) -> Architecture:
        """Architecture that the kernel is built for."""
        return ARCHITECTURES[self.gpu]

    @property
    def tile(self) -> int:
        """Number of columns of the result per thread block."""
        return tile_outputs(self.outputs, TILES_OUTPUTS if self.architecture.has_wgmma else MMA_TILES_OUTPUTS)

    @property
    def column_tiles(self) -> int:
        """Number of thread blocks per tile of rows."""
        return self.outputs // self.tile


class GroupedMatmulSmem(NamedTuple):
    """Shared memory of a thread block. The pipeline of wgmma allocates its stages itself.

    Attributes:
        results: With wgmma, the results of each compute warpgroup in 16 bits, [2, WARPGROUP_ROWS, tile].
        rows: With mma.sync, rows of each stage, [stages, TILE_ROWS, TILE_INPUTS].
        matrix: With mma.sync, a part of the matrix of each stage, [stages, TILE_INPUTS, tile] or [stages,
            tile, TILE_INPUTS].
    """

    results: Ref = None
    rows: Ref = None
    matrix: Ref = None


class OutputTile(NamedTuple):
    """The place of a thread block's results, and what one of its warpgroups computes of them.

    Attributes:
        first_row: First row of the tile in `x` and in the result.
        columns: Columns of the result.
        wg: Index of the warpgroup.
        wg_rows: Rows of the tile that the warpgroup multiplies.
    """

    first_row: Scalar
    columns: Slice
    wg: Scalar
    wg_rows: Slice


def tile_outputs(outputs: int, tiles: tuple[int, ...] = TILES_OUTPUTS) -> int:
    """Return the number of columns of the result per thread block."""
    return next(tile for tile in tiles if outputs % tile == 0)


def num_stages(outputs_per_tile: int, inputs: int) -> int:
    """Return the number of stages that fit in shared memory together with the result tile."""
    stage, results = 2 * (TILE_ROWS + outputs_per_tile) * TILE_INPUTS, 2 * TILE_ROWS * outputs_per_tile
    return min((SHARED_MEMORY - results) // stage, inputs // TILE_INPUTS)


def num_mma_stages(outputs_per_tile: int, smem_bytes: int) -> int:
    """Return the number of stages with mma.sync.

    Args:
        outputs_per_tile: Number of columns of the result per thread block.
        smem_bytes: Maximum shared memory per thread block of the GPU.
    """
    stage = 2 * (TILE_ROWS + outputs_per_tile) * TILE_INPUTS
    half = (smem_bytes + RESERVED_BYTES) // 2 - RESERVED_BYTES
    fitting = [(available - ALIGNMENT_BYTES) // stage for available in (half, smem_bytes)]
    return min(next(stages for stages in fitting if stages >= MMA_STAGES.start), MMA_STAGES[-1])


def multiply_tiles(
    x: jax.Array,
    weights: jax.Array,
    group_of_tile: jax.Array,
    *,
    dims: GroupedMatmulDims,
    interpret: Interpret = None,
) -> jax.Array:
    """Run the kernel and return [rows, outputs] in x.dtype; rows of tiles without a group are undefined."""
    has_wgmma = dims.architecture.has_wgmma
    if has_wgmma:
        smem = GroupedMatmulSmem(results=swizzled_smem((2, WARPGROUP_ROWS, dims.tile), x.dtype))
    else:
        stages = num_mma_stages(dims.tile, dims.architecture.smem_bytes)
        matrix = (dims.tile, TILE_INPUTS) if dims.outputs_first else (TILE_INPUTS, dims.tile)
        smem = GroupedMatmulSmem(
            rows=swizzled_smem((stages, TILE_ROWS, TILE_INPUTS), x.dtype),
            matrix=swizzled_smem((stages, *matrix), x.dtype),
        )
    return plgpu.kernel(
        functools.partial(multiply_body, dims=dims, is_interpreted=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((len(x), dims.outputs), x.dtype),
        scratch_types=[smem],
        grid=(len(x) // TILE_ROWS * dims.column_tiles,),
        grid_names=("work_tile",),
        num_threads=3 if has_wgmma else 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="grouped_matmul",
        interpret=interpret,
    )(x, weights, group_of_tile)


def multiply_body(
    x: Ref,
    weights: Ref,
    group_of_tile: Ref,
    out: Ref,
    smem: GroupedMatmulSmem,
    *,
    dims: GroupedMatmulDims,
    is_interpreted: bool,
) -> None:
    """Compute one tile of the result."""
    work_tile, column_tiles = lax.axis_index("work_tile"), jnp.int32(dims.column_tiles)
    tile, column = lax.div(work_tile, column_tiles), lax.rem(work_tile, column_tiles)
    group, wg = group_of_tile[tile], lax.axis_index("wg")
    first_row = pl.multiple_of(tile * TILE_ROWS, TILE_ROWS)
    columns = pl.ds(pl.multiple_of(column * dims.tile, dims.tile), dims.tile)
    wg_rows = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

    @pl.when(group >= 0)
    def multiply() -> None:
        matrix = weights.at[group]
        matrix = matrix.at[columns] if dims.outputs_first else matrix.at[:, columns]
        rows = x.at[pl.ds(first_row, TILE_ROWS)]
        if dims.architecture.has_wgmma:
            place = OutputTile(first_row, columns, wg, wg_rows)
            multiply_by_wgmma(rows, matrix, out, smem.results, place, dims=dims)
        else:
            target = out.at[pl.ds(first_row, TILE_ROWS), columns]
            accumulator = accumulate_by_mma(rows, matrix, smem, dims=dims, is_interpreted=is_interpreted)
            store_unoptimized(target, accumulator.astype(out.dtype))


def accumulate_by_mma(
    rows_g: Ref, matrix_g: Ref, smem: GroupedMatmulSmem, *, dims: GroupedMatmulDims, is_interpreted: bool
) -> Tile:
    """Return `rows_g @ matrix_g`, f32 [TILE_ROWS, tile].

    Each step is a group of copies, also past the last step, where the groups are empty. So when a step waits,
    `stages - 2` groups are younger than its own.
    """
    stages, steps = smem.rows.shape[0], dims.inputs // TILE_INPUTS

    def load(step: Scalar) -> None:
        @pl.when(step < steps)
        def _() -> None:
            stage = lax.rem(step, jnp.int32(stages))
            inputs = pl.ds(pl.multiple_of(step * TILE_INPUTS, TILE_INPUTS), TILE_INPUTS)
            copy_rows(smem.rows.at[stage], rows_g.at[:, inputs], is_interpreted=is_interpreted)
            part = matrix_g.at[:, inputs] if dims.outputs_first else matrix_g.at[inputs]
            copy_rows(smem.matrix.at[stage], part, is_interpreted=is_interpreted)

        commit_copies(is_interpreted=is_interpreted)

    def accumulate(step: Scalar, acc: Tile) -> Tile:
        # Wait until the step's copies of all threads are complete. All warps have then read the stage of the
        # step before, which the next load overwrites.
        wait_for_warpgroup(num_pending=stages - 2, is_interpreted=is_interpreted)
        load(step + (stages - 1))
        stage = lax.rem(step, jnp.int32(stages))
        operands = smem.rows.at[stage], smem.matrix.at[stage]
        return multiply_by_mma(
            acc, *operands, is_transposed=dims.outputs_first, is_interpreted=is_interpreted
        )

    for step in range(stages - 1):
        load(jnp.int32(step))
    zeros = plgpu.layout_cast(jnp.zeros((TILE_ROWS, dims.tile), f32), WGMMA)
    return lax.fori_loop(0, steps, accumulate, zeros)


def multiply_by_wgmma(
    rows_g: Ref, matrix_g: Ref, out: Ref, results_s: Ref, place: OutputTile, *, dims: GroupedMatmulDims
) -> None:
    """Store `rows_g @ matrix_g` to its place in `out`."""
    first_row, columns, wg, wg_rows = place
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

    transforms = swizzle_transforms(out.dtype.itemsize)
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

    pipeline(rows_g, matrix_g)
