"""Splits a tile of shared memory into its negative and its positive part."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import is_contiguous
from pallas_kernels.ptx.mma import PTX_TYPES
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Ref


def _split_signs(x_s: Ref) -> None:
    x = x_s[0]
    x_s[0], x_s[1] = jnp.minimum(x, 0), jnp.maximum(x, 0)


@with_fallback(_split_signs)
def split_signs(x_s: Ref) -> None:
    """Replace x in x_s[0] by min(x, 0) and write max(x, 0) to x_s[1].

    Args:
        x_s: [2, rows, columns] in swizzled SMEM, 16-bit; rows * columns is a multiple of 256.
    """
    _, rows, columns = x_s.shape
    ptx_type = PTX_TYPES[jnp.dtype(x_s.dtype).name]
    half_bytes = rows * columns * 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle_transforms(2)),), return_type=())
    def split(_ctx: mgpu.LaunchContext, x_s: ir.Value) -> None:
        assert is_contiguous(ir.MemRefType(x_s.type))
        lane, warp = lanes.lane_and_warp()
        first = lanes.add(lanes.address(x_s), lanes.times(warp, 128), lanes.times(lane, 4))
        # An element has the same offset in both halves, whatever the swizzle.
        for offset in range(0, half_bytes, 512):
            code = (
                f"{{ .reg .b32 x, y; ld.shared.b32 x, [$0 + {offset}]; "
                f"min.{ptx_type}x2 y, x, $1; max.{ptx_type}x2 x, x, $1; "
                f"st.shared.b32 [$0 + {offset}], y; st.shared.b32 [$0 + {offset + half_bytes}], x; }}"
            )
            lanes.run(code, first, lanes.const(0))

    split(x_s)
