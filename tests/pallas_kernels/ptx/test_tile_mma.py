"""The products of tiles by mma.sync, computed warp by warp with ldmatrix and mma.sync as PTX defines them."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ptx import mma, tile_mma
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from tests.pallas_kernels.ptx.test_cp_async import Array, in_swizzled_memory

pytestmark = pytest.mark.usefixtures("types_unchecked")
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


class Warp:
    """A warp whose registers are arrays with one element per lane: addresses, or pairs of 16-bit numbers."""

    def __init__(self, smem):
        self.smem, self.index = smem, 0

    def ldmatrix(self, code, address, **_):
        """Return the four registers of `ldmatrix.x4`: lane 8 i + r has the address of row r of matrix i."""
        pattern = r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16 \{.*\}, \[\$4 \+ (\d+)\];"
        is_transposed, offset = re.fullmatch(pattern, code).groups()
        starts = (address + int(offset)).reshape(4, 8)
        assert np.all(starts % 16 == 0)
        matrices = self.smem[starts[..., None] + np.arange(16)].view(np.float16).astype(np.float32)
        if is_transposed:
            matrices = matrices.swapaxes(1, 2)
        return [np.stack([matrix[G, 2 * T], matrix[G, 2 * T + 1]], axis=1) for matrix in matrices]

    def patch(self, patch):
        """Replace the functions that emit code by functions that execute it."""
        lanes = types.SimpleNamespace(
            lane_and_warp=lambda: (LANES, self.index), const=int, times=lambda x, n: x * n,
            add=lambda *terms: sum(terms), address=lambda ref: ref.address, ptx_results=self.ldmatrix,
            ptx=lambda code, x, **_: x ^ int(re.fullmatch(r"xor\.b32 \$0, \$1, (\d+);", code)[1]),
        )  # fmt: skip
        arith = types.SimpleNamespace(
            andi=lambda a, b: a & b, xori=lambda a, b: a ^ b, shrui=lambda a, b: a >> b
        )
        for name, replacement in (
            ("lanes", lanes),
            ("arith", arith),
            ("require_tiles", lambda *_, **__: None),
        ):
            patch.setattr(mma, name, replacement)
        patch.setattr(mma, "ir", types.SimpleNamespace(MemRefType=lambda ref: ref))
        unchanged = lambda x: x
        fragments = types.SimpleNamespace(row_tiles=unchanged, tile_from_row_tiles=unchanged)
        patch.setattr(tile_mma, "fragments", fragments)
        patch.setattr(tile_mma, "mma_m16n8k16", multiply)
        pack = lambda low, high, dtype: np.stack([low, high], axis=1).astype(dtype)
        patch.setattr(tile_mma, "pack_16bit", pack)


def multiply(acc, a, b, dtype):
    """Return acc + a @ b, with fragments as in "Matrix Fragments" of the PTX ISA."""
    left, right, out = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, register in enumerate(a):
        left[G + 8 * (i % 2), 2 * T + 8 * (i // 2)] = register[:, 0]
        left[G + 8 * (i % 2), 2 * T + 8 * (i // 2) + 1] = register[:, 1]
    for i, register in enumerate(b):
        right[2 * T + 8 * i, G], right[2 * T + 8 * i + 1, G] = register[:, 0], register[:, 1]
    out = left @ right
    return [x + out[G + 8 * (i // 2), 2 * T + i % 2] for i, x in enumerate(acc)]


@pytest.mark.parametrize(
    ("row_tiles", "n", "k", "is_transposed"),
    [(2, 64, 64, False), (1, 192, 128, False), (1, 8, 64, True), (2, 128, 64, True), (1, 40, 256, True)],
)
def test_each_warp_multiplies_its_rows_by_all_columns(monkeypatch, row_tiles, n, k, is_transposed):
    rng, rows = np.random.default_rng(0), WARPGROUP_ROWS * row_tiles
    a, b = (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((rows, k), (k, n)))
    stored = b.T.copy() if is_transposed else b
    parts = [in_swizzled_memory(x[None], 128) for x in (a, stored)]
    warp = Warp(np.concatenate([*parts, np.full(8 * 2 * k, 0xEE, np.uint8)]))
    warp.patch(monkeypatch)
    a_s, b_s = Array(a), Array(stored)
    a_s.address, b_s.address = 0, parts[0].size
    start = rng.integers(-8, 9, (row_tiles, n // 8, 4, 32)).astype(np.float64)
    for warp.index in range(4):
        options = {"sizes": (rows, n, k), "dtype": jnp.float16, "is_transposed": is_transposed}
        results = tile_mma._multiply_by_lanes(None, start, a_s, b_s, **options)
        product = a.astype(np.float64) @ b.astype(np.float64)
        for i, columns in enumerate(results):
            for column, fragment in enumerate(columns):
                for half, register in enumerate(fragment):
                    row = 64 * i + 16 * warp.index + G + 8 * (half // 2)
                    expected = product[row, 8 * column + 2 * T + half % 2]
                    np.testing.assert_array_equal(register, start[i, column, half] + expected)


@pytest.mark.parametrize(("row_tiles", "n", "k"), [(1, 64, 128), (1, 256, 64), (2, 128, 64)])
def test_a_left_operand_may_be_in_the_registers_of_an_accumulator(monkeypatch, row_tiles, n, k):
    rng, rows = np.random.default_rng(0), WARPGROUP_ROWS * row_tiles
    a, acc = (rng.integers(-8, 9, (rows, size)).astype(np.float64) for size in (k, n))
    b = rng.integers(-8, 9, (k, n)).astype(np.float16)
    warp = Warp(in_swizzled_memory(b[None], 128))
    warp.patch(monkeypatch)
    b_s = Array(b)
    b_s.address = 0
    for warp.index in range(4):
        operands = fragments_of(acc, warp.index), fragments_of(a, warp.index)
        results = tile_mma._multiply_registers_by_lanes(
            None, *operands, b_s, shape=b.shape, dtype=jnp.float16
        )
        np.testing.assert_array_equal(results, fragments_of(acc + a @ b, warp.index))


def fragments_of(tile, warp):
    """Return a warp's registers for each 64 rows and 8 columns of a tile, [row tiles, columns, 4, lanes]."""
    rows = [16 * warp + G + 8 * (half // 2) for half in range(4)]
    columns = range(0, tile.shape[1], 8)
    return np.array(
        [
            [[tile[first + rows[i], n + 2 * T + i % 2] for i in range(4)] for n in columns]
            for first in range(0, tile.shape[0], 64)
        ]
    )
