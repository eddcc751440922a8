"""Slices of rows for kernels start at multiples of 256 bytes or are copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.batch.metadata import rows_from
from tests import aot
from tests.pallas_kernels.mixed_aot_cases import aot_cases

TABLE = np.arange(5 * 32, dtype=np.int32).reshape(5, 32)


@pytest.mark.parametrize(("first", "is_copy"), [(0, False), (1, True), (2, False), (3, True), (4, False)])
def test_unaligned_rows_are_copied(first, is_copy):
    rows = jax.make_jaxpr(lambda table: rows_from(table, first, 5))(TABLE)
    assert ("optimization_barrier" in str(rows)) == is_copy
    np.testing.assert_array_equal(jax.jit(rows_from, static_argnums=1)(TABLE, first), TABLE[first:])


def test_rows_have_a_gradient_and_numpy_rows_are_views():
    gradient = jax.grad(lambda x: (rows_from(x, 1) ** 2).sum())(jnp.asarray(TABLE, jnp.float32))
    np.testing.assert_array_equal(gradient, 2 * TABLE * (np.arange(5) > 0)[:, None])
    assert rows_from(TABLE, 1).base is not None


@pytest.mark.kernels
def test_kernels_of_a_mixed_step_read_aligned_slices_only():
    """A decode row of 32 blocks once failed with "Input buffer 3 is not 256-byte aligned"."""
    aot.require_plugin()
    offsets = aot.slices_read("tests.pallas_kernels.mixed_aot_cases", list(aot_cases()))
    assert list(offsets) == list(aot_cases())
    assert not {name: bytes_ for name, bytes_ in offsets.items() if any(first % 256 for first in bytes_)}


def test_slices_are_found_in_a_program():
    text = """HloModule m

%fused (p0: s32[3,32], p1: bf16[8]) -> bf16[8] {
  %p1 = bf16[8]{0} parameter(1)
  %p0 = s32[3,32]{1,0} parameter(0)
  %slice.1 = s32[2,32]{1,0} slice(%p0), slice={[1:3], [0:32]}
  ROOT %call = bf16[8]{0} custom-call(%p1, %slice.1), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: s32[3,32]) -> s32[2,32] {
  %a = s32[3,32]{1,0} parameter(0)
  ROOT %slice.2 = s32[2,32]{1,0} slice(%a), slice={[1:3], [0:32]}
}
"""
    assert aot.first_bytes(text) == [128]
