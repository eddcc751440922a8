"""What per-lane code takes for granted of JAX, one thing a test, and the sentence where JAX differs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.ptx import fragments, layouts
from pallas_kernels.ptx.launch import BARRIER, THREADS
from pallas_kernels.ptx.warp_query import mma_rhs_layout
from tests import aot


@pytest.mark.parametrize(
    ("layout", "known"),
    [
        (layouts.TILE, layouts.TILE_LAYOUT),
        (layouts.ROW, layouts.ROW_LAYOUT),
        (layouts.SCALAR, layouts.SCALAR_LAYOUT),
        (layouts.BY_THREAD, layouts.BY_THREAD_LAYOUT),
        (mma_rhs_layout(jnp.bfloat16), layouts.RIGHT_LAYOUT),
        (mma_rhs_layout(jnp.float16), layouts.RIGHT_LAYOUT),
    ],
)
def test_jax_s_layouts_are_those_that_are_known(layout, known):
    layouts.require_layout(layout.to_mgpu(), known)


def elements(layout, shape):
    """[warps, lanes, registers, vector]: which element of an array is where, by JAX's description."""
    numbered = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:  # each cuts the last dimensions into tiles and what is in them
        outer, inner = (
            numbered.shape[: numbered.ndim - len(tile)],
            numbered.shape[numbered.ndim - len(tile) :],
        )
        cut = [size for n, t in zip(inner, tile, strict=True) for size in (n // t, t)]
        places = range(len(outer), len(outer) + len(cut))
        numbered = numbered.reshape(*outer, *cut).transpose(*range(len(outer)), *places[::2], *places[1::2])
    place = lambda dims: [d + numbered.ndim for d in dims if not isinstance(d, Replicated)]
    warps, lanes, vector = (
        place(layout.warp_dims),
        place(layout.lane_dims),
        [layout.vector_dim + numbered.ndim],
    )
    rest = [i for i in range(numbered.ndim) if i not in (*warps, *lanes, *vector)]
    sizes = [int(np.prod([numbered.shape[i] for i in dims])) for dims in (warps, lanes, rest, vector)]
    return numbered.transpose(*warps, *lanes, *rest, *vector).reshape(sizes)


def test_a_lane_of_a_tile_has_two_neighbours_of_two_rows_in_each_8_columns():
    found = elements(layouts.TILE_LAYOUT, (128, 16))
    wanted = [
        [
            [
                [(64 * m + 16 * warp + lane // 4 + 8 * half) * 16 + 8 * n + lane % 4 * 2 + i for i in (0, 1)]
                for m, n, half in itertools.product(range(2), range(2), range(2))
            ]
            for lane in range(32)
        ]
        for warp in range(4)
    ]
    np.testing.assert_array_equal(found, wanted)


def test_a_lane_of_rows_has_those_of_its_part_of_a_tile():
    found = elements(layouts.ROW_LAYOUT, (64,))
    assert found.shape == (4, 8, 2, 1)  # four lanes, those of a row, have the same
    wanted = [[[16 * warp + g, 16 * warp + g + 8] for g in range(8)] for warp in range(4)]
    np.testing.assert_array_equal(found[..., 0], wanted)


def test_a_lane_of_a_right_operand_has_neighbours_of_a_column():
    (found,) = elements(layouts.RIGHT_LAYOUT, (32, 16))
    wanted = [
        [
            [(16 * k + 8 * half + lane % 4 * 2 + i) * 16 + 8 * n + lane // 4 for i in (0, 1)]
            for k, n, half in itertools.product(range(2), range(2), range(2))
        ]
        for lane in range(32)
    ]
    np.testing.assert_array_equal(found, wanted)


def test_another_layout_is_refused_with_a_sentence():
    def body(x_g, out_g):
        x = plgpu.load(x_g, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_TRANSPOSED,), return_type=())
        def read(_, x):
            fragments.numbers(x)

        read(x)

    run = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    with pytest.raises(AssertionError, match=r"JAX .* lays an array out as .* pallas_kernels/ptx knows"):
        jax.jit(run).trace(jnp.zeros((64, 64))).lower(lowering_platforms=("cuda",))


@pytest.fixture
def memory():
    """The type of memory that a kernel is handed."""
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        yield lambda text: ir.MemRefType(ir.Type.parse(f"memref<{text}>"))


def test_tiles_of_shared_memory_are_pieces_of_8_rows(memory):
    sizes = {"rows": 64, "row_bytes": 256, "swizzle": 128}
    layouts.require_tiles(memory("3x8x2x8x64xbf16"), **sizes)
    layouts.require_tiles(memory("1x8x2x8x64xbf16, strided<[77, 1024, 512, 64, 1], offset: ?>"), **sizes)
    other = ["3x64x128xbf16", "3x2x8x8x64xbf16", "3x8x2x8x64xbf16, strided<[8192, 512, 4096, 64, 1]>"]
    for text in other:
        with pytest.raises(AssertionError, match=r"JAX .* hands a tile .* knows pieces \[8, 2, 8, 64\]"):
            layouts.require_tiles(memory(text), **sizes)


def test_a_register_of_a_strided_array_is_a_thread_s(memory):
    layout = layouts.BY_THREAD_LAYOUT
    assert (layout.shape, layout.vec_size, layout.registers_shape((128,))) == ((128,), 1, (1,))
    assert layouts.THREADS == 128
    assert isinstance(layouts.SCALAR_LAYOUT, mgpu.WGSplatFragLayout)


def test_no_barrier_of_jax_has_the_number_of_ours():
    """0 is a thread block's, 1 + n warpgroup n's, with which a warpgroup waits for itself alone."""
    aot.require_plugin()
    names = "program", "warpgroups"
    program, warpgroups = aot.ptx_of("tests.pallas_kernels.ptx.barrier_aot_cases", list(names)).values()
    barriers = re.findall(r"\bbar\S*\.sync\s+([^;]+);", program)
    assert set(barriers) == {"0", f"{BARRIER}, {THREADS}"}
    assert barriers.count(f"{BARRIER}, {THREADS}") == 1
    (register,) = set(re.findall(r"\bbar\S*\.sync\s+(%r\d+), 128;", warpgroups))
    (index,) = re.findall(rf"add\.s32\s+{register}, (%r\d+), 1;", warpgroups)
    (thread,) = re.findall(rf"shr\.u32\s+{index}, (%r\d+), 7;", warpgroups)
    assert re.search(rf"mov\.u32\s+{thread}, %tid\.x;", warpgroups)
