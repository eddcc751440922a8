"""Code of one lane: its index, constants, arithmetic, memory access and exchanges within its warp.

Pallas describes what a warpgroup does; here each warp works alone. These functions build code inside
`plgpu.inline_mgpu`; their arguments and results are 32-bit registers unless stated otherwise.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def i32() -> ir.Type:
    """Return the type of a 32-bit register."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """Return the type of a 64-bit register."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """Return the type of an f32 register."""
    return ir.F32Type.get()


def const(value: int) -> ir.Value:
    """Return an integer constant; values from 2**31 on are taken as bit patterns."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, i32())


def const_f32(value: float) -> ir.Value:
    """Return an f32 constant."""
    return mgpu.c(value, f32())


def ptx(
    code: str, *args: ir.Value, result_type: ir.Type | None = None, touches_memory: bool = False
) -> ir.Value:
    """Emit PTX instructions with one result and return it; the type is int32 unless given."""
    (result,) = ptx_results(
        code, *args, num_results=1, result_type=result_type, touches_memory=touches_memory
    )
    return result


def ptx_results(
    code: str,
    *args: ir.Value,
    num_results: int,
    result_type: ir.Type | None = None,
    touches_memory: bool = False,
) -> list[ir.Value]:
    """Emit PTX instructions with several results of one type and return them."""
    types = [i32() if result_type is None else result_type] * num_results
    return list(
        utils.inline_ptx(code, *args, result_types=types, has_side_effects=touches_memory, convergent=True)
    )


def run(code: str, *args: ir.Value, predicate: ir.Value | None = None, convergent: bool = False) -> None:
    """Emit PTX instructions that change memory and have no result."""
    utils.inline_ptx(code, *args, predicate=predicate, has_side_effects=True, convergent=convergent)


def lane_and_warp(*, reread: bool = False, num_warps: int = 4) -> tuple[ir.Value, ir.Value]:
    """Return the lane's index in its warp, and the warp's in its warpgroup, as JAX's layouts number them.

    With `reread` the thread index is read here anew, so that values derived from it occupy no registers in
    earlier loops. With `num_warps`, the warp's index is that among this number of warps, a power of two.
    """
    thread = ptx("mov.b32 $0, %tid.x;", touches_memory=True) if reread else mgpu.thread_idx()
    return arith.andi(thread, const(31)), arith.andi(arith.shrui(thread, const(5)), const(num_warps - 1))


def lane_row_and_pair() -> tuple[ir.Value, ir.Value]:
    """Return g and t of lane 4 g + t."""
    lane, _ = lane_and_warp()
    return arith.shrui(lane, const(2)), arith.andi(lane, const(3))


def pointer(ref: ir.Value) -> ir.Value:
    """Return a reference's generic 64-bit address."""
    return utils.memref_ptr(ref)


def address(ref: ir.Value) -> ir.Value:
    """Return a shared-memory reference's 32-bit address."""
    return ptx("mov.b32 $0, $1;", pointer(ref))


def element_pointer(ref: ir.Value, index: ir.Value, itemsize: int) -> ir.Value:
    """Return the 64-bit address of an element of global memory."""
    return ptx(f"mad.wide.u32 $0, $2, {itemsize}, $1;", pointer(ref), index, result_type=i64())


def advance(pointer: ir.Value, index: ir.Value, stride: int, offset: ir.Value) -> ir.Value:
    """Return pointer + index * stride + offset in 64 bits; `pointer` has 64 bits, `stride` is in bytes."""
    assert stride < 1 << 31
    code = f"{{ .reg .b64 x; mad.wide.s32 x, $2, {stride}, $1; cvt.s64.s32 $0, $3; add.s64 $0, $0, x; }}"
    return ptx(code, pointer, index, offset, result_type=i64())


def add(*terms: ir.Value | int) -> ir.Value:
    """Return the sum of registers and Python ints."""
    result, *addends = (const(term) if isinstance(term, int) else term for term in terms)
    for term in addends:
        result = arith.addi(result, term)
    return result


def times(x: ir.Value, factor: int) -> ir.Value:
    """Return the product of a register and a Python int."""
    return arith.muli(x, const(factor))


def is_below(x: ir.Value, limit: int) -> ir.Value:
    """Return whether a signed register is less than a Python int."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, const(limit))


def bitcast(x: ir.Value, dtype: ir.Type) -> ir.Value:
    """Return the same bits as another type."""
    return utils.bitcast(x, dtype)


def shuffle(x: ir.Value, mode: str, lane: ir.Value) -> ir.Value:
    """Return another lane's register; `mode` is "bfly" (lane XOR `lane`) or "idx" (lane number `lane`)."""
    return ptx(f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;", x, lane, result_type=x.type)


def load(ref: ir.Value, index: ir.Value, result_type: ir.Type | None = None) -> ir.Value:
    """Load a 32-bit element of a vector in global memory."""
    code = "{ .reg .b64 at; mad.wide.u32 at, $2, 4, $1; ld.global.b32 $0, [at]; }"
    return ptx(code, pointer(ref), index, result_type=result_type, touches_memory=True)
