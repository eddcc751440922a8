"""One warp's matrices: out of shared memory by ldmatrix, 8 bits into 16, products by mma.sync m16n8k16.

A fragment is what mma.m16n8k16 calls one (PTX ISA, "Matrix Fragments"): lane 4 g + t holds rows g and g + 8,
columns 2 t and 2 t + 1 of an accumulator.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.checks import require_one_of
from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.layouts import require_tiles

ELEMENTS_16 = {"bfloat16": "bf16", "float16": "f16"}


class LdmatrixTile:
    """Where a warp's 16 rows of a swizzled tile lie: `chunks` tiles of [rows, width], as TMA fills them.

    ldmatrix reads four 8x8 matrices of 16-bit units: rows 0-7 and 8-15 of 16 bytes, then of the next 16.
    """

    def __init__(self, ref: ir.Value, *, rows: int, row_bytes: int, swizzle: int):
        require_tiles(ir.MemRefType(ref.type), rows=rows, row_bytes=row_bytes, swizzle=swizzle)
        self.steps = row_bytes // 32  # of 32 bytes of each row
        self.swizzle, self.columns = swizzle, row_bytes // swizzle
        self.chunk_bytes = rows * row_bytes
        lane, warp = lanes.lane_and_warp()
        row = arith.andi(lane, lanes.const(7))
        row_tile = lanes.add(
            lanes.times(warp, 2), arith.andi(arith.shrui(lane, lanes.const(3)), lanes.const(1))
        )
        phase = row if swizzle == 128 else arith.shrui(row, lanes.const(1))
        unit = arith.xori(arith.shrui(lane, lanes.const(4)), phase)
        tile = lanes.times(row_tile, self.columns * 8 * swizzle)
        self.first = lanes.add(lanes.address(ref), tile, lanes.times(row, swizzle), lanes.times(unit, 16))

    def load(self, chunk: int, step: int, *, transpose: bool = False) -> Sequence[ir.Value]:
        """Four registers: rows 0-7 and 8-15 of the first 16 bytes of a step, then of the second."""
        start = step * 32
        at = arith.xori(self.first, lanes.const(start % self.swizzle))
        offset = chunk * self.chunk_bytes + start // self.swizzle * 8 * self.swizzle
        kind = ".trans" if transpose else ""
        code = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return lanes.several(code, at, results=4, touches_memory=True)


# What `dequantize_to_f16x2` has code for. Of another type it would make wrong numbers, not none.
EIGHT_BIT_NAMES = ("int8", "float8_e5m2", "float8_e4m3fn")

# Which two bytes of a register become the two halves of another.
ADJACENT_BYTES = ((0, 1), (2, 3))
ALTERNATING_BYTES = ((0, 2), (1, 3))


def dequantize_to_f16x2(
    x: ir.Value, dtype: DTypeLike, pairs: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[ir.Value, ir.Value]:
    """Four 8-bit numbers as two registers of two f16 each, exactly.

    An int8 goes in as the low bits of a number between 1024 and 2048, whose spacing is 1 (an old trick).

    Raises:
        ValueError: There is no code for the type.
    """
    require_one_of("dtype", jnp.dtype(dtype).name, EIGHT_BIT_NAMES)
    if dtype == jnp.int8:
        x = arith.xori(x, lanes.const(0x80808080))
        out = []
        for a, b in pairs:
            picked = lanes.ptx(f"prmt.b32 $0, $1, $2, 0x4{b}4{a};", x, lanes.const(0x64646464))
            out.append(lanes.ptx("sub.rn.f16x2 $0, $1, $2;", picked, lanes.const(0x64806480)))
        return out[0], out[1]
    if dtype == jnp.float8_e5m2:  # the upper half of an f16
        low, high = (lanes.ptx(f"prmt.b32 $0, $1, $2, 0x{b}4{a}4;", x, lanes.const(0)) for a, b in pairs)
        return low, high
    if pairs != ADJACENT_BYTES:
        (a, b), (c, d) = pairs
        x = lanes.ptx(f"prmt.b32 $0, $1, $2, 0x{d}{c}{b}{a};", x, lanes.const(0))
    low, high = lanes.several(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        x,
        results=2,
    )
    return low, high


def mma_m16n8k16(
    acc: Sequence[ir.Value], a: Sequence[ir.Value], b: Sequence[ir.Value], dtype: DTypeLike
) -> Sequence[ir.Value]:
    """Acc + a @ b: [16, 8] += [16, 16] @ [16, 8] by one warp, f32 accumulators."""
    kind = ELEMENTS_16[jnp.dtype(dtype).name]
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return lanes.several(code, *a, *b, *acc, results=4, of=lanes.f32())


def transpose_8x8(x: ir.Value) -> ir.Value:
    """An 8x8 matrix of 16-bit elements, one register a lane."""
    return lanes.ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x)


def pack_16bit(low: ir.Value, high: ir.Value, dtype: DTypeLike) -> ir.Value:
    """Two f32 as one register of 16-bit numbers."""
    kind = ELEMENTS_16[jnp.dtype(dtype).name]
    return lanes.ptx(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", high, low)
