"""What a lane of a warp does, in PTX: matrices out of shared memory, 8 bits into 16, one warp's product.

Pallas speaks of warpgroups; here a warp works alone. These functions build code inside `plgpu.inline_mgpu`,
and take and give 32-bit registers. A fragment is what mma.m16n8k16 calls one (PTX ISA, "Matrix Fragments"):
lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of an accumulator.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

ELEMENTS_16 = {"bfloat16": "bf16", "float16": "f16"}


def i32() -> Any:
    """The type of a register."""
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    """The type of two registers."""
    return ir.IntegerType.get_signless(64)


def f32() -> Any:
    """The type of a number."""
    return ir.F32Type.get()


def const(value: int) -> Any:
    """A constant register."""
    return utils.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def number(value: float) -> Any:
    """A constant f32."""
    return utils.c(value, f32())


def ptx(code: str, *args: Any, results: int = 1, of: Any = None, touches_memory: bool = False) -> Any:
    """One or more instructions; `results` registers come back."""
    types = [i32() if of is None else of] * results
    got = utils.inline_ptx(code, *args, result_types=types, has_side_effects=touches_memory, convergent=True)
    return got if results > 1 else got[0]


def lane_and_warp() -> tuple[Any, Any]:
    """The lane in its warp, and the warp in its warpgroup."""
    thread = utils.thread_idx()
    return arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(3))


def lane_row_and_pair() -> tuple[Any, Any]:
    """G and t of a fragment."""
    lane, _ = lane_and_warp()
    return arith.shrui(lane, const(2)), arith.andi(lane, const(3))


def address(ref: Any) -> Any:
    """Of shared memory."""
    return ptx("mov.b32 $0, $1;", utils.memref_ptr(ref))


def add(*terms: Any) -> Any:
    """Sum of registers and ints."""
    total = None
    for term in terms:
        term = const(term) if isinstance(term, int) else term
        total = term if total is None else arith.addi(total, term)
    return total


def times(x: Any, factor: int) -> Any:
    """Product with an int."""
    return arith.muli(x, const(factor))


class Matrices:
    """Where a warp's 16 rows of a swizzled tile lie: `chunks` tiles of [rows, width], as TMA fills them.

    ldmatrix reads four 8x8 matrices of 16-bit units: rows 0-7 and 8-15 of 16 bytes, then of the next 16.
    """

    def __init__(self, ref: Any, *, rows: int, row_bytes: int, swizzle: int):
        self.steps = row_bytes // 32  # of 32 bytes of each row
        self.swizzle, self.columns = swizzle, row_bytes // swizzle
        self.chunk_bytes = rows * row_bytes
        lane, warp = lane_and_warp()
        row = arith.andi(lane, const(7))
        row_tile = add(times(warp, 2), arith.andi(arith.shrui(lane, const(3)), const(1)))
        phase = row if swizzle == 128 else arith.shrui(row, const(1))
        unit = arith.xori(arith.shrui(lane, const(4)), phase)
        tile = times(row_tile, self.columns * 8 * swizzle)
        self.first = add(address(ref), tile, times(row, swizzle), times(unit, 16))

    def load(self, chunk: int, step: int, *, transpose: bool = False) -> Sequence[Any]:
        """Four registers: rows 0-7 and 8-15 of the first 16 bytes of a step, then of the second."""
        start = step * 32
        at = arith.xori(self.first, const(start % self.swizzle))
        offset = chunk * self.chunk_bytes + start // self.swizzle * 8 * self.swizzle
        kind = ".trans" if transpose else ""
        code = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return ptx(code, at, results=4, touches_memory=True)


# Which two bytes of a register become the two halves of another.
NEIGHBOURS = ((0, 1), (2, 3))
EVERY_OTHER = ((0, 2), (1, 3))


def widen(x: Any, dtype: Any, pairs: tuple[tuple[int, int], tuple[int, int]]) -> tuple[Any, Any]:
    """Four 8-bit numbers as two registers of two f16 each, exactly.

    An int8 goes in as the low bits of a number between 1024 and 2048, whose spacing is 1 (an old trick).
    """
    if dtype == jnp.int8:
        x = arith.xori(x, const(0x80808080))
        out = []
        for a, b in pairs:
            picked = ptx(f"prmt.b32 $0, $1, $2, 0x4{b}4{a};", x, const(0x64646464))
            out.append(ptx("sub.rn.f16x2 $0, $1, $2;", picked, const(0x64806480)))
        return out[0], out[1]
    if dtype == jnp.float8_e5m2:  # the upper half of an f16
        return tuple(ptx(f"prmt.b32 $0, $1, $2, 0x{b}4{a}4;", x, const(0)) for a, b in pairs)
    if pairs != NEIGHBOURS:
        (a, b), (c, d) = pairs
        x = ptx(f"prmt.b32 $0, $1, $2, 0x{d}{c}{b}{a};", x, const(0))
    return ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        x,
        results=2,
    )


def product(acc: Sequence[Any], a: Sequence[Any], b: Sequence[Any], dtype: Any) -> Sequence[Any]:
    """Acc + a @ b: [16, 8] += [16, 16] @ [16, 8] by one warp, f32 accumulators."""
    kind = ELEMENTS_16[jnp.dtype(dtype).name]
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return ptx(code, *a, *b, *acc, results=4, of=f32())


def transposed(x: Any) -> Any:
    """An 8x8 matrix of 16-bit elements, one register a lane."""
    return ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x)


def rounded(low: Any, high: Any, dtype: Any) -> Any:
    """Two f32 as one register of 16-bit numbers."""
    return ptx(f"cvt.rn.{ELEMENTS_16[jnp.dtype(dtype).name]}x2.f32 $0, $1, $2;", high, low)


def shuffled(x: Any, mode: str, lane: Any) -> Any:
    """Another lane's register: `mode` bfly (lane ^ n) or idx."""
    return ptx(f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;", x, lane, of=x.type)


def reduced(x: Any, how: str) -> Any:
    """Of all lanes' int32: `how` add, min or max."""
    return ptx(f"redux.sync.{how}.s32 $0, $1, -1;", x)


def loaded(ref: Any, index: Any, of: Any = None) -> Any:
    """A 32-bit element of a vector in global memory."""
    code = "{ .reg .b64 at; mad.wide.u32 at, $2, 4, $1; ld.global.b32 $0, [at]; }"
    return ptx(code, utils.memref_ptr(ref), index, of=of, touches_memory=True)


def prefetch(ref: Any, index: Any) -> None:
    """Has the line of a vector's 32-bit element brought from memory into L2, and its page's translation."""
    code = "{ .reg .b64 at; mad.wide.u32 at, $1, 4, $0; prefetch.global.L2 [at]; }"
    utils.inline_ptx(code, utils.memref_ptr(ref), index, has_side_effects=True)


def numbers(array: Any) -> list[list[Any]]:
    """f32 of an accumulator's layout, [64, n]: for each 8 columns what mma takes, four numbers."""
    halves = array.registers.reshape(-1, 2)
    pick = lambda x, i: vector.extract(x, dynamic_position=[], static_position=[i])
    return [[pick(half, i) for half in pair for i in (0, 1)] for pair in halves]


def tiles(array: Any) -> list[list[list[Any]]]:
    """`numbers` of every 64 rows of a taller accumulator."""
    rows, columns = array.shape
    found = numbers(array)
    return [found[i : i + columns // 8] for i in range(0, rows // 64 * (columns // 8), columns // 8)]


def array_of(columns: Sequence[Sequence[Any]], layout: Any) -> Any:
    """The inverse of `numbers`."""
    kind = ir.VectorType.get((2,), f32())
    registers = [vector.from_elements(kind, list(four[i : i + 2])) for four in columns for i in (0, 2)]
    return shaped(registers, layout, (64, 8 * len(columns)))


def shaped(registers: Sequence[Any], layout: Any, shape: tuple[int, ...]) -> Any:
    """Registers, in the layout's order, as an array."""
    in_order = np.asarray(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=in_order, _layout=layout, _is_signed=None)
