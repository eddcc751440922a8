"""Kernels that consist of one PTX program, and building blocks for programs of 1,024 threads.

The building blocks use these PTX registers of the program:

    register  contents
    --------  ------------------------------------------------------------------
    lane      index of the lane in its warp
    warp      index of the warp in the thread block
    own       value of this thread (input of block_exclusive_sum)
    before    sum of `own` over all earlier threads (output)
    top       sum of `own` over the warp
    sum       sum over all earlier warps
    is_first  predicate: whether the lane is lane 0 of its warp
    x, p      temporary values
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.layouts import SCALAR
from pallas_kernels.shared.types import Ref

WARPGROUPS = 8
THREADS = 128 * WARPGROUPS  # threads of a thread block
WARPS = THREADS // 32
# JAX uses barrier 0 for a thread block and 1 + n for warpgroup n; a test checks this in compiled code.
BARRIER = WARPGROUPS + 1


def launch_ptx(
    code: str,
    arrays: Sequence[jax.Array],
    *,
    name: str,
    out_type: Sequence[jax.ShapeDtypeStruct],
    words: int,
    grid: tuple[int, ...] = (1,),
    warpgroups: int = WARPGROUPS,
) -> tuple[jax.Array, ...]:
    """Launch a kernel that consists of a PTX program and return its results.

    Args:
        code: PTX code that each thread executes. Its operands, from $0 on, are the addresses of `arrays`, of
            the results and of shared memory, the thread block's index in each dimension of the grid, and the
            thread's index.
        arrays: Arguments in global memory.
        name: Name of the kernel.
        out_type: Shapes and dtypes of the results.
        words: Number of 32-bit words of shared memory.
        grid: Number of thread blocks in each dimension.
        warpgroups: Number of warpgroups of a thread block.
    """
    axes = [f"axis{n}" for n in range(len(grid))]

    def body(*refs: Ref) -> None:
        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs), [SCALAR] * len(grid)), return_type=())
        def run(_ctx: mgpu.LaunchContext, refs: list[ir.Value], block: list[mgpu.FragmentedArray]) -> None:
            *global_refs, shared = refs
            pointers = [*map(lanes.pointer, global_refs), lanes.address(shared)]
            block_indices = map(fragments.scalar, block)
            lanes.run(code, *pointers, *block_indices, mgpu.thread_idx(), convergent=True)

        run(list(refs), [lax.axis_index(axis) for axis in axes])

    kernel = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=[plgpu.SMEM((words,), jnp.int32)],
        grid=grid,
        grid_names=tuple(axes),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
    )
    return kernel(*arrays)


def block_barrier() -> Iterator[str]:
    """Yield code that synchronizes all threads of the thread block."""
    yield f"bar.sync {BARRIER}, {THREADS};"


def block_exclusive_sum(memory: str, offset: int) -> Iterator[str]:
    """Yield code that sets register `before` to the sum of register `own` over all earlier threads.

    Args:
        memory: Register with a shared-memory address.
        offset: Offset in bytes from that address to WARPS 32-bit words that the code may overwrite.
    """

    def warp_inclusive_sum(register: str) -> Iterator[str]:
        for n in range(5):
            yield f"shfl.sync.up.b32 x|p, {register}, {1 << n}, 0, -1; @p add.u32 {register}, {register}, x;"

    # Sum within the warp; the last lane has the warp's total.
    yield "mov.b32 before, own;"
    yield from warp_inclusive_sum("before")
    yield "shfl.sync.idx.b32 top, before, 31, 31, -1; sub.u32 before, before, own;"
    # Publish the warps' totals, which are complete after the barrier.
    yield f"mad.lo.u32 x, warp, 4, {memory}; @is_first st.shared.b32 [x + {offset}], top;"
    yield from block_barrier()
    # Each warp sums all totals itself and adds those of the warps before it.
    yield f"mad.lo.u32 x, lane, 4, {memory}; ld.shared.b32 sum, [x + {offset}];"
    yield from warp_inclusive_sum("sum")
    yield "sub.u32 x, warp, 1; shfl.sync.idx.b32 sum, sum, x, 31, -1; setp.ne.u32 p, warp, 0;"
    yield "@p add.u32 before, before, sum;"
