"""Sending for memory before it is read."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.assumptions import SCALAR
from pallas_kernels.ptx.twins import with_twin


@with_twin(lambda ref, index: None)
def prefetch(ref: Any, index: Any) -> None:
    """Has the line of an array's 32-bit element brought from memory into L2, and its page's translation.

    Args:
        ref: Contiguous, in global memory.
        index: Of the element, row after row.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=())
    def send_for(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> None:
        code = "{ .reg .b64 at; mad.wide.u32 at, $1, 4, $0; prefetch.global.L2 [at]; }"
        lanes.run(code, lanes.pointer(ref), fragments.scalar(index))

    send_for(ref, index)
