"""Kernels that are one PTX program, and pieces of those whose 1,024 threads count together.

Registers that the pieces use: lane, warp, x, sum, top, the predicates p and is_first, which is set in lane 0.
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
THREADS = 128 * WARPGROUPS
WARPS = THREADS // 32
# JAX's own are 0 for a thread block and 1 + n for warpgroup n; a test reads them in what it compiles.
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
    """What a PTX program stores.

    Args:
        code: What a thread does. Its operands, from $0 on: the addresses of the arrays, those of the results,
            that of shared memory; the thread block's number in each dimension of the grid, the thread's.
        arrays: In global memory.
        name: The kernel's.
        out_type: Of the results.
        words: Of 32 bits, of shared memory.
        grid: Thread blocks.
        warpgroups: Of a thread block.
    """
    axes = [f"axis{n}" for n in range(len(grid))]

    def body(*refs: Ref) -> None:
        @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(refs), [SCALAR] * len(grid)), return_type=())
        def run(_ctx: mgpu.LaunchContext, refs: list[ir.Value], at: list[mgpu.FragmentedArray]) -> None:
            *in_global, shared = refs
            pointers = [*map(lanes.pointer, in_global), lanes.address(shared)]
            numbers = map(fragments.scalar, at)
            lanes.run(code, *pointers, *numbers, mgpu.thread_idx(), convergent=True)

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
    """All threads wait for each other."""
    yield f"bar.sync {BARRIER}, {THREADS};"


def block_exclusive_sum(memory: str, totals: int) -> Iterator[str]:
    """The register before = the sum of the register own of all threads before this one.

    Args:
        memory: Register with an address of shared memory.
        totals: Bytes behind it, where WARPS words are free.
    """
    up = lambda name: (
        f"shfl.sync.up.b32 x|p, {name}, {1 << n}, 0, -1; @p add.u32 {name}, {name}, x;" for n in range(5)
    )
    yield "mov.b32 before, own;"
    yield from up("before")
    yield "shfl.sync.idx.b32 top, before, 31, 31, -1; sub.u32 before, before, own;"
    yield f"mad.lo.u32 x, warp, 4, {memory}; @is_first st.shared.b32 [x + {totals}], top;"
    yield from block_barrier()
    yield f"mad.lo.u32 x, lane, 4, {memory}; ld.shared.b32 sum, [x + {totals}];"
    yield from up("sum")
    yield "sub.u32 x, warp, 1; shfl.sync.idx.b32 sum, sum, x, 31, -1; setp.ne.u32 p, warp, 0;"
    yield "@p add.u32 before, before, sum;"
