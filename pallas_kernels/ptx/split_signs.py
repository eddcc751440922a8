"""Numbers of shared memory in two: the negative and the positive ones."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import is_contiguous
from pallas_kernels.ptx.mma import ELEMENTS_16
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Ref


def _by_comparing(x_s: Ref) -> None:
    x = x_s[0]
    x_s[0], x_s[1] = jnp.minimum(x, 0), jnp.maximum(x, 0)


@with_fallback(_by_comparing)
def split_signs(x_s: Ref) -> None:
    """From x in x_s[0] min(x, 0) there and max(x, 0) in x_s[1].

    Args:
        x_s: [2, rows, columns] in swizzled SMEM, 16 bits; 256 divides a half's elements.
    """
    _, rows, columns = x_s.shape
    kind = ELEMENTS_16[jnp.dtype(x_s.dtype).name]
    half = rows * columns * 2  # bytes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle_transforms(2)),), return_type=())
    def split(_ctx: mgpu.LaunchContext, x_s: ir.Value) -> None:
        assert is_contiguous(ir.MemRefType(x_s.type))
        lane, warp = lanes.lane_and_warp()
        first = lanes.add(lanes.address(x_s), lanes.times(warp, 128), lanes.times(lane, 4))
        for at in range(0, half, 512):  # the same elements stand at the same place, however swizzled
            code = (
                f"{{ .reg .b32 x, y; ld.shared.b32 x, [$0 + {at}]; "
                f"min.{kind}x2 y, x, $1; max.{kind}x2 x, x, $1; "
                f"st.shared.b32 [$0 + {at}], y; st.shared.b32 [$0 + {at + half}], x; }}"
            )
            lanes.run(code, first, lanes.const(0))

    split(x_s)
