"""Kernels whose PTX shows which barriers JAX uses."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.cumulative_units import cumulative_units
from pallas_kernels.ptx.launch import WARPGROUPS


def warpgroup_kernel(x):
    """Run a kernel in which every warpgroup of a full thread block waits for its own warps."""

    def body(x_g, out_g, x_s):
        wg = jax.lax.axis_index("wg")
        x_s[wg] = plgpu.load(x_g.at[wg], layout=plgpu.Layout.WG_STRIDED((128,), 1), optimized=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s.at[wg], out_g.at[wg])
        plgpu.wait_smem_to_gmem(0)

    shape = (WARPGROUPS, 128)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[plgpu.SMEM(shape, jnp.float32)],
        num_threads=WARPGROUPS,
        thread_name="wg",
    )(x)


def aot_cases():
    """Return each case's function and abstract arguments by name."""
    shape = jax.ShapeDtypeStruct
    units = lambda counts: cumulative_units.by_platform(counts, listed=16, unit=64)
    return {
        "program": (units, (shape((512,), jnp.int32),)),
        "warpgroups": (warpgroup_kernel, (shape((WARPGROUPS, 128), jnp.float32),)),
    }
