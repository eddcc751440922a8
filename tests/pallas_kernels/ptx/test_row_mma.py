"""The products of prefill by mma.sync, executed lane by lane: each element is where it is expected."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ptx import mma, row_mma
from pallas_kernels.shared.memory import head_chunks
from tests.pallas_kernels.ptx.test_cp_async import in_swizzled_memory

pytestmark = pytest.mark.usefixtures("types_unchecked")

LANE, WARP = np.arange(128) % 32, np.arange(128) // 32  # of each thread of a warpgroup
G, T = LANE // 4, LANE % 4


class Warpgroup:
    """The 128 threads of a warpgroup in lockstep; a register is an array with one element per thread."""

    def __init__(self, dtype, **tiles):
        self.dtype, self.smem, self.starts = jnp.dtype(dtype), np.empty(0, np.uint8), {}
        for name, tile in tiles.items():
            self.starts[name] = len(self.smem)
            self.smem = np.concatenate([self.smem, in_swizzled_memory(np.asarray(tile, dtype), 128)])

    def halves(self, register):
        """Return the two 16-bit elements of each thread's register, [128, 2]."""
        return np.ascontiguousarray(register, np.uint32).view(self.dtype).reshape(128, 2).astype(np.float32)

    def ldmatrix(self, code, at):
        offset, is_transposed = int(re.search(r"\+ (\d+)\]", code)[1]), ".trans" in code
        results = []
        for matrix in range(4):
            # The lanes 8 m to 8 m + 7 of a warp have the addresses of the rows of matrix m.
            rows = at.reshape(4, 32)[:, 8 * matrix : 8 * matrix + 8] + offset
            assert (rows % 16 == 0).all()
            matrices = self.smem[rows[..., None] + np.arange(16)].view(np.uint16)  # [warps, 8, 8]
            if is_transposed:
                matrices = matrices.swapaxes(1, 2)
            results.append(np.ascontiguousarray(matrices).view(np.uint32).reshape(128))
        return results

    def mma(self, registers):
        a, b, acc = registers[:4], registers[4:6], registers[6:]
        a_tile, b_tile = np.zeros((4, 16, 16), np.float32), np.zeros((4, 16, 8), np.float32)
        for i, register in enumerate(a):
            for j in range(2):
                a_tile[WARP, G + i % 2 * 8, 2 * T + i // 2 * 8 + j] = self.halves(register)[:, j]
        for i, register in enumerate(b):
            for j in range(2):
                b_tile[WARP, 2 * T + i * 8 + j, G] = self.halves(register)[:, j]
        product = a_tile @ b_tile
        return [acc[i] + product[WARP, G + i // 2 * 8, 2 * T + i % 2] for i in range(4)]

    def ptx_results(self, code, *registers, **_):
        return self.ldmatrix(code, *registers) if code.startswith("ldmatrix") else self.mma(registers)

    def ptx(self, code, high, low, **_):
        assert code.startswith("cvt.rn.")
        return np.stack([low, high], axis=1).astype(self.dtype).view(np.uint32)[:, 0]

    def patch(self, patch):
        """Replace the functions that emit code by functions that execute it."""
        lanes = types.SimpleNamespace(
            lane_and_warp=lambda: (LANE, WARP), const=int, times=lambda x, n: x * n, f32=lambda: None,
            const_f32=lambda x: np.full(128, x, np.float32), add=lambda *terms: sum(terms),
            address=self.starts.get, ptx=self.ptx, ptx_results=self.ptx_results,
        )  # fmt: skip
        arith = types.SimpleNamespace(andi=np.bitwise_and, xori=np.bitwise_xor, shrui=np.right_shift)
        fragments = types.SimpleNamespace(column_fragments=fragments_of, tile_from_fragments=tile_of)
        for module in (mma, row_mma):
            patch.setattr(module, "lanes", lanes)
        patch.setattr(mma, "arith", arith)
        patch.setattr(mma, "ir", types.SimpleNamespace(MemRefType=lambda ref: ref))
        patch.setattr(mma, "require_tiles", lambda *_, **__: None)
        patch.setattr(row_mma, "fragments", fragments)


class Name(str):
    """A name of a tile in place of a memory reference."""

    __slots__ = ()
    type = None


def fragments_of(tile):
    """Return each thread's elements of a tile in the layout of mma accumulators, for each 8 columns."""
    return [
        [tile[16 * WARP + G + i // 2 * 8, n + 2 * T + i % 2] for i in range(4)]
        for n in range(0, tile.shape[1], 8)
    ]


def tile_of(columns):
    """Return the tile with these fragments; the inverse of `fragments_of`."""
    tile = np.full((64, 8 * len(columns)), np.nan, np.float32)
    for n, fragment in enumerate(columns):
        for i, register in enumerate(fragment):
            tile[16 * WARP + G + i // 2 * 8, 8 * n + 2 * T + i % 2] = register
    return tile


@pytest.mark.parametrize("tile_kv", [64, 128])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (80, "bfloat16"), (256, "bfloat16")])
def test_products_of_small_integers_are_exact(monkeypatch, head_dim, dtype, tile_kv):
    head, rng = head_chunks(head_dim), np.random.default_rng(0)

    def integers(rows):
        tile = rng.integers(-3, 4, size=(head.num_chunks, rows, head.width)).astype(np.float32)
        tile[:, :, head.chunk_dim :] = 0
        return tile

    q, k, v = integers(64), integers(tile_kv), integers(tile_kv)
    warpgroup = Warpgroup(dtype, q=q, k=k, v=v)
    warpgroup.patch(monkeypatch)
    static = {"tile_kv": tile_kv, "head": head, "dtype": jnp.dtype(dtype)}
    scores = row_mma._multiply_keys_by_lanes(None, Name("q"), Name("k"), **static)
    np.testing.assert_array_equal(scores, np.einsum("cqd,ckd->qk", q, k))
    p = rng.integers(0, 5, size=(64, tile_kv)).astype(np.float32)
    accs = [rng.integers(9, size=(64, head.width)).astype(np.float32) for _ in range(head.num_chunks)]
    results = row_mma._multiply_values_by_lanes(None, accs, p, Name("v"), **static)
    np.testing.assert_array_equal(np.stack(results), np.stack(accs) + np.einsum("qk,ckd->cqd", p, v))
