"""Tensor-core instructions of one warp: ldmatrix, 8-bit to f16 conversion, mma.sync m16n8k16.

Fragments are laid out as in "Matrix Fragments" of the PTX ISA: lane 4 g + t holds rows g and g + 8, columns 2
t and 2 t + 1 of an accumulator.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.checks import require_one_of
from pallas_kernels.ptx import lanes
from pallas_kernels.ptx.layouts import require_tiles

PTX_TYPES = {"bfloat16": "bf16", "float16": "f16"}


class LdmatrixTile:
    """16 rows at a time of a swizzled tile in shared memory, as TMA writes it, which ldmatrix loads.

    The tile consists of `num_chunks` tiles [rows, width]. One ldmatrix reads four 8 x 8 matrices of 16-bit
    units: rows 0-7 and 8-15 of 16 bytes, then of the next 16 bytes; or with `units_first` rows 0-7 of both 16
    bytes, then rows 8-15.

    Attributes:
        steps: Number of 32-byte steps in a row of a chunk.
    """

    def __init__(
        self,
        ref: ir.Value,
        *,
        rows: int,
        row_bytes: int,
        swizzle: int,
        by_warp: bool = True,
        units_first: bool = False,
        keeps_addresses: bool = True,
    ):
        """Create the tile.

        Args:
            ref: Tile in shared memory, [chunks, rows, width].
            rows: Number of rows of the tile.
            row_bytes: Bytes of a row of a chunk.
            swizzle: Bytes of a row of a swizzle atom.
            by_warp: Whether each warp loads its own rows, from 16 times its index on.
            units_first: The order of the four matrices. Operands of mma.sync must be in adjacent registers:
                without this order ptxas moves each register of a B operand whose columns are the rows here.
            keeps_addresses: Whether the compiler may keep the addresses of all steps in registers throughout
                a loop. Otherwise each load computes its address.
        """
        require_tiles(ir.MemRefType(ref.type), rows=rows, row_bytes=row_bytes, swizzle=swizzle)
        self.steps = row_bytes // 32
        self.swizzle, self.columns, self.keeps_addresses = swizzle, row_bytes // swizzle, keeps_addresses
        self.chunk_bytes = rows * row_bytes
        lane, warp = lanes.lane_and_warp()
        # Lanes 0-7, 8-15, 16-23 and 24-31 give the row addresses of the four matrices.
        row = arith.andi(lane, lanes.const(7))
        first_tile = lanes.times(warp, 2) if by_warp else lanes.const(0)
        # Bits 3 and 4 of the lane say which of the two rows, and which of the two units.
        row_bit, unit_bit = (4, 3) if units_first else (3, 4)
        row_tile = lanes.add(first_tile, _bit(lane, row_bit))
        # The swizzle XORs the 16-byte unit with the row (128 bytes) or with half of it (64 bytes).
        phase = row if swizzle == 128 else arith.shrui(row, lanes.const(1))
        unit = arith.xori(_bit(lane, unit_bit), phase)
        tile = lanes.times(row_tile, self.columns * 8 * swizzle)
        self.first = lanes.add(lanes.address(ref), tile, lanes.times(row, swizzle), lanes.times(unit, 16))

    def load(
        self, chunk: int, step: int, *, first_row: int = 0, transpose: bool = False
    ) -> Sequence[ir.Value]:
        """Return the four registers of a step of 32 bytes of 16 rows, in the tile's order.

        The rows are counted from `first_row` on, a multiple of 8.
        """
        start = step * 32
        unit = start % self.swizzle
        if self.keeps_addresses:
            at = arith.xori(self.first, lanes.const(unit))
        else:
            # LLVM does not move this out of loops, as if it touched memory.
            at = lanes.ptx(f"xor.b32 $0, $1, {unit};", self.first, touches_memory=True)
        tile = first_row // 8 * self.columns + start // self.swizzle
        offset = chunk * self.chunk_bytes + tile * 8 * self.swizzle
        modifier = ".trans" if transpose else ""
        code = f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return lanes.ptx_results(code, at, num_results=4, touches_memory=True)


def _bit(lane: ir.Value, position: int) -> ir.Value:
    """Return bit 3 or 4 of a lane's index, which has 5 bits."""
    shifted = arith.shrui(lane, lanes.const(position))
    return shifted if position == 4 else arith.andi(shifted, lanes.const(1))


# The dtypes that `dequantize_to_f16x2` has code for; it would return wrong numbers for any other.
EIGHT_BIT_NAMES = ("int8", "float8_e5m2", "float8_e4m3fn")

# The two bytes of a register that become the halves of the first result, and those of the second.
ADJACENT_BYTES = ((0, 1), (2, 3))
ALTERNATING_BYTES = ((0, 2), (1, 3))


def dequantize_to_f16x2(
    x: ir.Value,
    dtype: DTypeLike,
    pairs: tuple[tuple[int, int], tuple[int, int]],
    *,
    has_fp8_conversion: bool = True,
) -> tuple[ir.Value, ir.Value]:
    """Convert four 8-bit numbers of a register to two registers of two f16 each, exactly.

    An int8 becomes the low bits of an f16 between 1024 and 2048, whose spacing is 1; then 1024 and the sign
    offset are subtracted. The bits of a float8_e4m3fn without the sign, shifted into the exponent and
    mantissa of an f16, are the number times 2 ** -8, also if it is subnormal; a NaN gets all exponent bits.

    Args:
        x: Register of four 8-bit numbers.
        dtype: One of EIGHT_BIT_NAMES.
        pairs: ADJACENT_BYTES or ALTERNATING_BYTES.
        has_fp8_conversion: Whether the GPU has an instruction that converts float8_e4m3fn.

    Raises:
        ValueError: If there is no code for the dtype.
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
    if not has_fp8_conversion:
        out = []
        # Bit 7 of each byte of is_nan: the magnitude is 0x7F.
        is_nan = arith.andi(
            lanes.add(arith.andi(x, lanes.const(0x7F7F7F7F)), 0x01010101), lanes.const(0x80808080)
        )
        for a, b in pairs:
            # The bytes as the upper halves of two 16-bit numbers, 0 below.
            wide, nan = (
                lanes.ptx(f"prmt.b32 $0, $1, $2, 0x{b}4{a}4;", y, lanes.const(0)) for y in (x, is_nan)
            )
            magnitude = arith.shrui(arith.andi(wide, lanes.const(0x7F007F00)), lanes.const(1))
            sign = arith.andi(wide, lanes.const(0x80008000))
            scaled = lanes.ptx(
                "mul.rn.f16x2 $0, $1, $2;", arith.ori(magnitude, sign), lanes.const(0x5C005C00)
            )
            # 0x8000 - 0x0200 has all exponent bits and one of the mantissa.
            out.append(arith.ori(scaled, arith.subi(nan, arith.shrui(nan, lanes.const(6)))))
        return out[0], out[1]
    if pairs != ADJACENT_BYTES:
        (a, b), (c, d) = pairs
        x = lanes.ptx(f"prmt.b32 $0, $1, $2, 0x{d}{c}{b}{a};", x, lanes.const(0))
    low, high = lanes.ptx_results(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        x,
        num_results=2,
    )
    return low, high


def mma_m16n8k16(
    acc: Sequence[ir.Value], a: Sequence[ir.Value], b: Sequence[ir.Value], dtype: DTypeLike
) -> Sequence[ir.Value]:
    """Return acc + a @ b of one warp: [16, 8] + [16, 16] @ [16, 8], with f32 accumulators."""
    ptx_type = PTX_TYPES[jnp.dtype(dtype).name]
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{ptx_type}.{ptx_type}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return lanes.ptx_results(code, *a, *b, *acc, num_results=4, result_type=lanes.f32())


def transpose_8x8(x: ir.Value) -> ir.Value:
    """Return the transpose of an 8 x 8 matrix of 16-bit elements, one register per lane."""
    return lanes.ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x)


def pack_16bit(low: ir.Value, high: ir.Value, dtype: DTypeLike) -> ir.Value:
    """Round two f32 to a 16-bit dtype and pack them into one register."""
    ptx_type = PTX_TYPES[jnp.dtype(dtype).name]
    return lanes.ptx(f"cvt.rn.{ptx_type}x2.f32 $0, $1, $2;", high, low)
