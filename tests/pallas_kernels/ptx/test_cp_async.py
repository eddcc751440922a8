"""The addresses of cp.async copies, computed lane by lane: every byte goes where TMA would write it."""

import functools
import operator
import re
import types

import numpy as np
import pytest

from pallas_kernels.ptx import cp_async, cp_async_paged
from pallas_kernels.shared.memory import HeadChunks, head_chunks

pytestmark = pytest.mark.usefixtures("types_unchecked")

GMEM = 1 << 40  # address of the arrays in global memory


class Array:
    """A contiguous array in place of a memory reference."""

    def __init__(self, array):
        self.type, self.shape, self.element_type, self.array = self, array.shape, array.dtype, array
        self.strides = [stride // array.itemsize for stride in array.strides]

    def get_strides_and_offset(self):
        return self.strides, 0


class Machine:
    """One lane after another, whose registers are Python ints; shared memory starts as 0xEE."""

    def __init__(self, gmem: bytes, num_bytes: int):
        self.gmem, self.smem = gmem, np.full(num_bytes, 0xEE, np.uint8)
        self.lane = self.warp = 0

    def ptx(self, code, *args, result_type=None):
        assert code == "{ .reg .b64 x; cvt.u64.u32 x, $2; add.s64 $0, $1, x; }"
        return sum(args)

    def run(self, code, target, source, num_bytes=None, *, predicate=True):
        """Copy by cp.async; the last number of bytes that are copied may be 0, which fills with zeros."""
        places = r"\[\$0(?: \+ (\d+))?\], \[\$1(?: \+ (\d+))?\]"
        found = re.fullmatch(rf"cp\.async\.c[ag]\.shared\.global {places}, (\d+)(?:, \$2)?;", code)
        target_offset, source_offset, size = found.groups(default="0")
        target, source, size = target + int(target_offset), source + int(source_offset) - GMEM, int(size)
        if not predicate:
            return
        copied = size if num_bytes is None else num_bytes
        assert target % size == source % size == 0
        assert 0 <= target <= len(self.smem) - size
        assert not copied or 0 <= source <= len(self.gmem) - copied
        self.smem[target : target + size] = 0
        self.smem[target : target + copied] = np.frombuffer(self.gmem, np.uint8)[source : source + copied]

    def patch(self, patch):
        """Replace the functions that emit code by functions that execute it."""
        add = lambda *terms: sum(terms)
        lanes = types.SimpleNamespace(
            lane_and_warp=lambda **_: (self.lane, self.warp), const=int, times=lambda x, n: x * n, add=add,
            is_below=lambda x, n: x < n, address=lambda ref: 0, pointer=lambda ref: GMEM, ptx=self.ptx,
            run=self.run, i64=lambda: None, advance=lambda pointer, i, stride, at: pointer + i * stride + at,
            i32=lambda: None, load=lambda ref, i, _: int(ref.array[i]),
        )  # fmt: skip
        arith = types.SimpleNamespace(
            andi=lambda a, b: a & b, xori=lambda a, b: a ^ b, shrui=lambda a, b: a >> b, minsi=min, maxsi=max,
            select=lambda condition, a, b: a if condition else b, cmpi=lambda compare, a, b: compare(a, b),
            CmpIPredicate=types.SimpleNamespace(sge=operator.ge, slt=operator.lt), subi=lambda a, b: a - b,
        )  # fmt: skip
        bytewidth = lambda dtype: dtype.itemsize
        mgpu = types.SimpleNamespace(bytewidth=bytewidth, warpgroup_barrier=lambda: None)
        ir = types.SimpleNamespace(MemRefType=lambda ref: ref)
        fragments = types.SimpleNamespace(scalar=int)
        for name, replacement in (
            ("lanes", lanes), ("arith", arith), ("mgpu", mgpu), ("ir", ir), ("fragments", fragments),
            ("require_tiles", lambda *_, **__: None),
        ):  # fmt: skip
            for module in (cp_async, cp_async_paged):
                patch.setattr(module, name, replacement, raising=False)

    def run_warpgroup(self, function, *args, num_warps=4, **static):
        for self.warp in range(num_warps):
            for self.lane in range(32):
                function(None, *args, **static)


def in_swizzled_memory(tile, swizzle):
    """Return the bytes of a tile [chunks, rows, width] in swizzle atoms of 8 rows."""
    chunks, rows, _ = tile.shape
    units = tile.view(np.uint8).reshape(chunks, rows // 8, 8, -1, swizzle // 16, 16).swapaxes(2, 3)
    result = np.empty_like(units)
    for row in range(8):
        for unit in range(swizzle // 16):
            phase = row if swizzle == 128 else row // 2
            result[..., row, unit ^ phase, :] = units[..., row, unit, :]
    return result.reshape(-1)


def random_bytes(shape, dtype, seed=0):
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = np.random.default_rng(seed).integers(256, size=array.view(np.uint8).shape)
    return array


@pytest.mark.parametrize(("first_token", "rows_per_head"), [(8, 64), (-3, 16), (90, 32)])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_each_token_goes_to_its_row(monkeypatch, first_token, rows_per_head, num_warps, head_dim):
    head, num_heads = head_chunks(head_dim), 64 // rows_per_head
    array = np.asarray(head.split(random_bytes((100, 6, head_dim), np.dtype(np.uint16))))
    tokens = np.clip(first_token + np.arange(rows_per_head), 0, 99)
    rows = array[tokens, 1 : 1 + num_heads].swapaxes(0, 1).reshape(64, head.num_chunks, head.chunk_dim)
    tile = np.zeros((head.num_chunks, 64, head.width), np.uint16)
    tile[:, :, : head.chunk_dim] = rows.swapaxes(0, 1)
    machine = Machine(array.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    machine.run_warpgroup(
        functools.partial(cp_async._copy_token_rows_by_lanes, num_warps=num_warps), Array(tile), Array(array),
        first_token, 1, num_rows=64, head=head, rows_per_head=rows_per_head, num_warps=num_warps,
    )  # fmt: skip
    np.testing.assert_array_equal(machine.smem, in_swizzled_memory(tile, 128))


@pytest.mark.parametrize(("rows", "tile_q"), [(1, 8), (8, 8), (5, 16), (16, 16), (24, 24), (32, 32)])
@pytest.mark.parametrize("head_dim", [64, 80, 120, 128, 256])
def test_queries_past_the_last_row_are_zero(monkeypatch, rows, tile_q, head_dim):
    head = head_chunks(head_dim)
    query = np.asarray(head.split(random_bytes((rows, head_dim), np.dtype(np.uint16))))
    tile = np.zeros((head.num_chunks, tile_q, head.width), np.uint16)
    found = query.reshape(rows, head.num_chunks, head.chunk_dim).swapaxes(0, 1)
    tile[:, :rows, : head.chunk_dim] = found
    machine = Machine(query.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    machine.run_warpgroup(cp_async._copy_rows_by_lanes, Array(tile), Array(query), num_rows=tile_q, head=head)
    np.testing.assert_array_equal(machine.smem, in_swizzled_memory(tile, 128))


@pytest.mark.parametrize(("rows", "width"), [(128, 64), (64, 128), (64, 64)])
def test_a_window_of_a_matrix_is_copied_as_tma_would_write_it(monkeypatch, rows, width):
    matrix = random_bytes((rows, 320), np.dtype(np.uint16))
    window, tile = matrix[:, :width], np.zeros((rows, width), np.uint16)
    machine = Machine(matrix.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    head = HeadChunks(1, width, width, width, is_padded=False)
    static = {"num_rows": rows, "head": head, "has_barrier": False}
    machine.run_warpgroup(cp_async._copy_rows_by_lanes, Array(tile), Array(window), **static)
    np.testing.assert_array_equal(machine.smem, in_swizzled_memory(window.copy()[None], 128))
