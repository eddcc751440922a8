"""tile_rows: positions of rows, and rows of masked-out tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared import tile_rows
from pallas_kernels.shared.layouts import WGMMA

scalar = lambda x: jnp.asarray(x, jnp.int32)


def test_positions_of_a_run_are_consecutive():
    rows = jnp.arange(8, dtype=jnp.int32)
    positions = rows + tile_rows.run_offsets(rows, [scalar(40), scalar(4)], 4)
    np.testing.assert_array_equal(positions, [40, 41, 42, 43, 4, 5, 6, 7])


def cleared(values, low, high):
    """Return keys of a tile whose lower half is not checked and whose upper half is numbered from 100."""

    def body(value_g, ends_g, out_g, tile_s, loaded):
        plgpu.copy_gmem_to_smem(value_g, tile_s, loaded)
        plgpu.barrier_wait(loaded)
        upper = pl.ds(64, 64)
        keys = lambda shape: plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + 100
        tile_rows.clear_masked_out(tile_s, upper, keys, ends_g[0], ends_g[1])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(values.shape, values.dtype),
        scratch_types=[plgpu.SMEM(values.shape, values.dtype), plgpu.Barrier()],
        grid=(1,),
        grid_names=("cta",),
        interpret=plgpu.InterpretGPUParams(),
    )(values, jnp.asarray([low, high], jnp.int32))


@pytest.mark.parametrize(("low", "high"), [(0, 500), (110, 500), (0, 130), (110, 130), (300, 500)])
def test_masked_out_values_become_zero_even_if_nan(low, high):
    values = np.random.default_rng(0).standard_normal((2, 128, 64), np.float32)
    keys = np.arange(100, 164)
    is_unseen = (keys < low) | (keys >= high)
    expected, poisoned = values.copy(), values.copy()
    expected[:, 64:][:, is_unseen], poisoned[:, 64:][:, is_unseen] = 0, np.nan
    np.testing.assert_array_equal(cleared(jnp.asarray(poisoned), low, high), expected)


def test_masked_out_rows_take_the_fill_value():
    x, keys = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([4, 5, 6])
    actual = tile_rows.where_visible(x, keys, scalar(5), scalar(6), 7.0)
    np.testing.assert_array_equal(actual, [7.0, 2.0, 7.0])
