"""What the per-lane code assumes about JAX's layouts and barriers, and the error if JAX differs."""

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
from pallas_kernels.shared.layouts import ROW, WGMMA
from tests import aot
from tests.pallas_kernels.ptx.cases import tile_of


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (WGMMA, layouts.WGMMA_LAYOUT),
        (ROW, layouts.ROW_LAYOUT),
        (layouts.SCALAR, layouts.SCALAR_LAYOUT),
        (tile_of(8, 64, "bfloat16", "bfloat16").query_layout, layouts.MMA_RHS_LAYOUT),
        (tile_of(8, 64, "float16", "float16").query_layout, layouts.MMA_RHS_LAYOUT),
    ],
)
def test_jax_describes_the_layouts_as_expected(layout, expected):
    layouts.require_layout(layout.to_mgpu(), expected)


def element_indices(layout, shape):
    """Return the flat index of the element at each [warp, lane, register, vector], by JAX's description."""
    numbered = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:  # each splits the last dimensions into tiles and positions in a tile
        outer, inner = (
            numbered.shape[: numbered.ndim - len(tile)],
            numbered.shape[numbered.ndim - len(tile) :],
        )
        split = [size for n, t in zip(inner, tile, strict=True) for size in (n // t, t)]
        axes = range(len(outer), len(outer) + len(split))
        numbered = numbered.reshape(*outer, *split).transpose(*range(len(outer)), *axes[::2], *axes[1::2])
    axes_of = lambda dims: [d + numbered.ndim for d in dims if not isinstance(d, Replicated)]
    warps, lanes, vector = (
        axes_of(layout.warp_dims),
        axes_of(layout.lane_dims),
        [layout.vector_dim + numbered.ndim],
    )
    registers = [i for i in range(numbered.ndim) if i not in (*warps, *lanes, *vector)]
    sizes = [int(np.prod([numbered.shape[i] for i in dims])) for dims in (warps, lanes, registers, vector)]
    return numbered.transpose(*warps, *lanes, *registers, *vector).reshape(sizes)


def test_a_lane_of_a_tile_holds_two_adjacent_columns_of_two_rows_in_each_8_columns():
    indices = element_indices(layouts.WGMMA_LAYOUT, (128, 16))
    expected = [
        [
            [
                [(64 * m + 16 * warp + lane // 4 + 8 * half) * 16 + 8 * n + lane % 4 * 2 + i for i in (0, 1)]
                for m, n, half in itertools.product(range(2), range(2), range(2))
            ]
            for lane in range(32)
        ]
        for warp in range(4)
    ]
    np.testing.assert_array_equal(indices, expected)


def test_a_lane_of_row_values_holds_the_rows_of_its_part_of_a_tile():
    indices = element_indices(layouts.ROW_LAYOUT, (64,))
    assert indices.shape == (4, 8, 2, 1)  # the four lanes of a row hold the same value
    expected = [[[16 * warp + g, 16 * warp + g + 8] for g in range(8)] for warp in range(4)]
    np.testing.assert_array_equal(indices[..., 0], expected)


def test_a_lane_of_a_b_operand_holds_adjacent_rows_of_one_column():
    (indices,) = element_indices(layouts.MMA_RHS_LAYOUT, (32, 16))
    expected = [
        [
            [(16 * k + 8 * half + lane % 4 * 2 + i) * 16 + 8 * n + lane // 4 for i in (0, 1)]
            for k, n, half in itertools.product(range(2), range(2), range(2))
        ]
        for lane in range(32)
    ]
    np.testing.assert_array_equal(indices, expected)


def test_an_unexpected_register_layout_is_an_error():
    def body(x_g, out_g):
        x = plgpu.load(x_g, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_TRANSPOSED,), return_type=())
        def read(_, x):
            fragments.column_fragments(x)

        read(x)

    run = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    with pytest.raises(AssertionError, match=r"JAX .* lays an array out as .* pallas_kernels/ptx expects"):
        jax.jit(run).trace(jnp.zeros((64, 64))).lower(lowering_platforms=("cuda",))


@pytest.fixture
def memory():
    """Return the type of a memory ref from MLIR's notation."""
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        yield lambda text: ir.MemRefType(ir.Type.parse(f"memref<{text}>"))


def test_a_tile_of_shared_memory_must_consist_of_pieces_of_8_rows(memory):
    sizes = {"rows": 64, "row_bytes": 256, "swizzle": 128}
    layouts.require_tiles(memory("3x8x2x8x64xbf16"), **sizes)
    layouts.require_tiles(memory("1x8x2x8x64xbf16, strided<[77, 1024, 512, 64, 1], offset: ?>"), **sizes)
    unexpected = ["3x64x128xbf16", "3x2x8x8x64xbf16", "3x8x2x8x64xbf16, strided<[8192, 512, 4096, 64, 1]>"]
    for text in unexpected:
        with pytest.raises(
            AssertionError, match=r"JAX .* stores a tile .* expects contiguous pieces \[8, 2, 8, 64\]"
        ):
            layouts.require_tiles(memory(text), **sizes)


def test_all_threads_hold_a_scalar():
    assert isinstance(layouts.SCALAR_LAYOUT, mgpu.WGSplatFragLayout)


def test_jax_does_not_use_the_ptx_programs_barrier():
    """JAX uses barrier 0 for a thread block and 1 + n for warpgroup n."""
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
