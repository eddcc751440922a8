"""What a lane says: registers, constants, arithmetic, memory, and what it asks the other lanes of its warp.

Pallas speaks of warpgroups; here a warp works alone. These functions build code inside `plgpu.inline_mgpu`,
and take and give 32-bit registers.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def i32() -> ir.Type:
    """The type of a register."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """The type of two registers."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """The type of a number."""
    return ir.F32Type.get()


def const(value: int) -> ir.Value:
    """A constant register."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def number(value: float) -> ir.Value:
    """A constant f32."""
    return mgpu.c(value, f32())


def ptx(code: str, *args: ir.Value, of: ir.Type | None = None, touches_memory: bool = False) -> ir.Value:
    """One or more instructions; a register comes back."""
    (got,) = several(code, *args, results=1, of=of, touches_memory=touches_memory)
    return got


def several(
    code: str, *args: ir.Value, results: int, of: ir.Type | None = None, touches_memory: bool = False
) -> list[ir.Value]:
    """The same with so many registers."""
    types = [i32() if of is None else of] * results
    return list(
        utils.inline_ptx(code, *args, result_types=types, has_side_effects=touches_memory, convergent=True)
    )


def run(code: str, *args: ir.Value, predicate: ir.Value | None = None, convergent: bool = False) -> None:
    """Instructions that change memory; nothing comes back."""
    utils.inline_ptx(code, *args, predicate=predicate, has_side_effects=True, convergent=convergent)


def lane_and_warp(*, anew: bool = False) -> tuple[ir.Value, ir.Value]:
    """The lane in its warp, and the warp in its warpgroup, as JAX numbers them in its layouts.

    With `anew` they are asked for here: what is made of them takes no registers in the loops before.
    """
    thread = ptx("mov.b32 $0, %tid.x;", touches_memory=True) if anew else mgpu.thread_idx()
    return arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(3))


def lane_row_and_pair() -> tuple[ir.Value, ir.Value]:
    """G and t of lane 4 g + t."""
    lane, _ = lane_and_warp()
    return arith.shrui(lane, const(2)), arith.andi(lane, const(3))


def pointer(ref: ir.Value) -> ir.Value:
    """Of memory, in 64 bits."""
    return utils.memref_ptr(ref)


def address(ref: ir.Value) -> ir.Value:
    """Of shared memory."""
    return ptx("mov.b32 $0, $1;", pointer(ref))


def element(ref: ir.Value, index: ir.Value, itemsize: int) -> ir.Value:
    """Where an element of global memory is, in 64 bits."""
    return ptx(f"mad.wide.u32 $0, $2, {itemsize}, $1;", pointer(ref), index, of=i64())


def add(*terms: ir.Value | int) -> ir.Value:
    """Sum of registers and ints."""
    total, *others = (const(term) if isinstance(term, int) else term for term in terms)
    for term in others:
        total = arith.addi(total, term)
    return total


def times(x: ir.Value, factor: int) -> ir.Value:
    """Product with an int."""
    return arith.muli(x, const(factor))


def is_below(x: ir.Value, limit: int) -> ir.Value:
    """Whether a signed register is less than an int."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, const(limit))


def bits(x: ir.Value, kind: ir.Type) -> ir.Value:
    """The same bits as another type."""
    return utils.bitcast(x, kind)


def shuffled(x: ir.Value, mode: str, lane: ir.Value) -> ir.Value:
    """Another lane's register: `mode` bfly (lane ^ n) or idx."""
    return ptx(f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;", x, lane, of=x.type)


def reduced(x: ir.Value, how: str) -> ir.Value:
    """Of all lanes' int32: `how` add, min or max."""
    return ptx(f"redux.sync.{how}.s32 $0, $1, -1;", x)


def loaded(ref: ir.Value, index: ir.Value, of: ir.Type | None = None) -> ir.Value:
    """A 32-bit element of a vector in global memory."""
    code = "{ .reg .b64 at; mad.wide.u32 at, $2, 4, $1; ld.global.b32 $0, [at]; }"
    return ptx(code, pointer(ref), index, of=of, touches_memory=True)
