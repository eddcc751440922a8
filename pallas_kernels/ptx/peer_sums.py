"""Sums over devices that write into each other's memory, one kernel a sum: the program of a thread.

Each 8 bytes that go to another device are 4 of an array and 4 that say which call they belong to, stored as one
word: who reads a word with its call's number has its numbers, too, and nothing else has to be waited for.
Thread block b of a device deals with thread block b of the others, and has memory of its own there, twice:

device 0, block b, call n                             device 1, block b, call n
----------------------------------------------------  -------------------------
its rows, with n beside them ---> memory n % 2 of device 1
                                                      its rows ---> memory n % 2 of device 0
read its own memory n % 2 until all of it says n
sum in the order of the devices, round
next call: n + 1

Call n + 1 writes while a device may still read what call n brought, but nobody reads call n - 1's any more: who
has finished call n has read all devices' rows of it, and these began call n after their call n - 1.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ptx.programs import THREADS, run_program, wait_for_all

MAX_BLOCKS = 128
COUNTERS = 4 * MAX_BLOCKS  # bytes at the beginning of a device's memory: each thread block's call number
PACKET = 16  # bytes of memory that a thread writes at once, half of them of the array
MAX_POLLS = 1 << 24  # of a thread, about 10 s: then another device's program has ended, and so does this one
AT_ONCE = 8  # packets that a thread waits for together


class Norm(NamedTuple):
    """An RMS norm, and the stream that the sum is added to before it.

    Attributes:
        eps: Added to the mean square.
        is_offset: The factor is 1 + weight.
        rounds_once: The product is rounded, not the normalised input, too.
    """

    eps: float
    is_offset: bool
    rounds_once: bool


class Shape(NamedTuple):
    """What is static about a call.

    Attributes:
        rows: Of the array.
        width: Of a row; a multiple of 4.
        devices: That sum.
        block_bytes: Of a thread block's memory for what one device writes in a call.
        is_bfloat16: Else float16.
        norm: What follows; None = nothing.
    """

    rows: int
    width: int
    devices: int
    block_bytes: int
    is_bfloat16: bool
    norm: Norm | None

    @property
    def blocks(self) -> int:
        """Thread blocks; each has every so many-th row."""
        return min(self.rows, MAX_BLOCKS)

    @property
    def packets(self) -> int:
        """Of a row."""
        return self.width // 4

    @property
    def each(self) -> int:
        """Packets of a row that a thread has, at most."""
        return -(-self.packets // THREADS)


def memory_bytes(devices: int, block_bytes: int) -> int:
    """Of a device's memory that the others write to."""
    return COUNTERS + MAX_BLOCKS * 2 * devices * block_bytes


def block_bytes_of(rows: int, width: int) -> int:
    """Shape.block_bytes that calls of up to so many rows need."""
    return -(-rows // MAX_BLOCKS) * width // 4 * PACKET


def peer_sum(
    table: jax.Array, x: jax.Array, residual: jax.Array | None, weight: jax.Array | None, *, shape: Shape
) -> tuple[jax.Array, ...]:
    """The sum, or the stream behind it and that normalised.

    Args:
        table: int32 [2 + 2 * devices]: this device's number, 0, and the addresses of all devices' memory.
        x: [rows, width].
        residual: As x; None where there is no norm.
        weight: [width] of the norm, in x's dtype.
        shape: Static.
    """
    others = () if residual is None else (residual, weight)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return run_program(
        program(shape),
        (table, x, *others),
        name="all_reduce",
        out_type=(like_x,) if shape.norm is None else (like_x, like_x),
        words=2 * THREADS // 32,
        grid=(shape.blocks,),
    )


class _At(NamedTuple):
    """Operands: addresses of arrays, then the numbers of the thread block and the thread."""

    table: str
    x: str
    residual: str
    weight: str
    out: str
    normed: str
    shared: str
    block: str
    thread: str


def _operands(shape: Shape) -> _At:
    if shape.norm is None:
        return _At("$0", "$1", "", "", "$2", "", "$3", "$4", "$5")
    return _At(*(f"${n}" for n in range(9)))


def program(shape: Shape) -> str:
    """PTX of a thread; operands in the order of peer_sum's arrays, results, run_program's own."""
    at = _operands(shape)
    lines = [
        *_registers(shape),
        *_places(shape, at),
        f"mov.b32 row, {at.block}; mov.b64 offset, 0;",
        "PUSH:",
        *_pushed(shape, at),
        f"add.s64 offset, offset, {shape.packets * PACKET}; add.u32 row, row, {shape.blocks};",
        f"setp.lt.u32 p, row, {shape.rows}; @p bra PUSH;",
        f"mov.b32 row, {at.block}; mov.b64 offset, 0; mov.b32 turn, {at.shared};",
        f"mad.lo.u32 both_turns, {at.shared}, 2, {THREADS // 8};",
        "SUM:",
        *_summed(shape, at),
        f"add.s64 offset, offset, {shape.packets * PACKET}; add.u32 row, row, {shape.blocks};",
        f"setp.lt.u32 p, row, {shape.rows}; @p bra SUM;",
        *wait_for_all(),  # all threads have read the call's number
        f"setp.eq.u32 p, {at.thread}, 0; @p st.global.b32 [counter], call;",
    ]
    return "{ " + "\n".join(lines) + " }"


def _registers(shape: Shape) -> Iterator[str]:
    each, devices = shape.each, shape.devices
    yield ".reg .b64 at, to, my, counter, offset, place;"
    yield f".reg .b64 from<{devices}>, peer<{devices}>, w<{2 * devices * each}>;"
    yield ".reg .b32 device, call, slot, row, x, y, z, polls, pending, lane, warp, turn, both_turns;"
    yield f".reg .b32 j<{each}>, d<{2 * each}>, s<{2 * each}>, k<{2 * each}>;"
    yield ".reg .f32 f, g, h, total, factor, a<4>;"
    yield f".reg .pred p, is_mine<{devices}>, is_packet<{each}>, is_asked<{devices * each}>;"
    yield ".reg .b16 low, high;"


def _places(shape: Shape, at: _At) -> Iterator[str]:
    """Where the call's words of each device are, here and there; which packets of a row a thread has."""
    yield f"ld.global.b32 device, [{at.table}]; mul.wide.u32 place, device, 8; add.s64 place, place, {at.table};"
    yield "ld.global.b64 my, [place + 8];"
    yield f"mul.wide.u32 counter, {at.block}, 4; add.s64 counter, counter, my;"
    yield "ld.global.b32 call, [counter]; add.u32 call, call, 1; and.b32 slot, call, 1;"
    # Memory by thread block, slot, device that writes.
    yield f"mad.lo.u32 x, {at.block}, 2, slot; mul.lo.u32 x, x, {shape.devices};"
    for n in range(shape.devices):
        yield f"setp.eq.u32 is_mine{n}, device, {n};"
        yield f"add.u32 y, x, {n}; mul.wide.u32 place, y, {shape.block_bytes};"
        yield f"add.s64 from{n}, my, place; add.s64 from{n}, from{n}, {COUNTERS};"
        yield f"add.u32 y, x, device; mul.wide.u32 place, y, {shape.block_bytes};"
        yield f"ld.global.b64 peer{n}, [{at.table} + {8 + 8 * n}];"
        yield f"add.s64 peer{n}, peer{n}, place; add.s64 peer{n}, peer{n}, {COUNTERS};"
    for n in range(shape.each):
        yield f"add.u32 j{n}, {at.thread}, {n * THREADS}; setp.lt.u32 is_packet{n}, j{n}, {shape.packets};"
        yield f"mov.b32 d{2 * n}, 0; mov.b32 d{2 * n + 1}, 0;"
    yield f"and.b32 lane, {at.thread}, 31; shr.u32 warp, {at.thread}, 5;"


def _in_row(shape: Shape, array: str, n: int) -> str:
    """The register at = where packet n of the thread is in an array of rows."""
    return (
        f"mul.wide.u32 at, row, {2 * shape.width}; add.s64 at, at, {array}; "
        f"mul.wide.u32 place, j{n}, 8; add.s64 at, at, place;"
    )


def _loaded(shape: Shape, at: _At, n: int) -> str:
    """The thread's packet n of x, in d."""
    pair = f"{{d{2 * n}, d{2 * n + 1}}}"
    return f"{_in_row(shape, at.x, n)} @is_packet{n} ld.global.v2.b32 {pair}, [at];"


def _pushed(shape: Shape, at: _At) -> Iterator[str]:
    """A row to all other devices."""
    for n in range(shape.each):
        yield _loaded(shape, at, n)
    for n in range(shape.each):
        yield f"mov.b64 w0, {{d{2 * n}, call}}; mov.b64 w1, {{d{2 * n + 1}, call}};"
        yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 place, place, offset;"
        for other in range(shape.devices):
            yield f"not.pred p, is_mine{other}; and.pred p, p, is_packet{n}; add.s64 to, peer{other}, place;"
            yield "@p st.relaxed.sys.global.v2.b64 [to], {w0, w1};"


def _summed(shape: Shape, at: _At) -> Iterator[str]:
    """A row of all devices: waited for, added, stored."""
    for n in range(shape.each):
        yield _loaded(shape, at, n)
        if shape.norm is not None:
            pair = f"{{s{2 * n}, s{2 * n + 1}}}"
            yield f"{_in_row(shape, at.residual, n)} @is_packet{n} ld.global.v2.b32 {pair}, [at];"
    at_once = max(AT_ONCE // shape.devices, 1)
    for first in range(0, shape.each, at_once):
        yield from _waited_for(shape, range(first, min(first + at_once, shape.each)), f"POLL{first}")
    if shape.norm is not None:
        yield "mov.f32 total, 0f00000000;"
    for n in range(shape.each):
        for half in (0, 1):
            yield from _added(shape, n, half)
        if shape.norm is None:
            continue
        # What is normalised; a packet that is none adds nothing to the squares.
        for half in (0, 1):
            yield from _added_to_stream(shape, n, half)
    for n in range(shape.each):
        pair = f"{{k{2 * n}, k{2 * n + 1}}}"
        yield f"{_in_row(shape, at.out, n)} @is_packet{n} st.global.v2.b32 [at], {pair};"
    if shape.norm is not None:
        yield from _normed(shape, at, shape.norm)


def _waited_for(shape: Shape, packets: Sequence[int], label: str) -> Iterator[str]:
    """All devices' words of some packets, in w."""
    words = lambda n, device: tuple(f"w{2 * (n * shape.devices + device) + half}" for half in (0, 1))
    for n in packets:
        for device in range(shape.devices):
            first, second = words(n, device)
            yield f"mov.b64 {first}, {{d{2 * n}, call}}; mov.b64 {second}, {{d{2 * n + 1}, call}};"
            asked = f"is_asked{n * shape.devices + device}"
            yield f"not.pred {asked}, is_mine{device}; and.pred {asked}, {asked}, is_packet{n};"
    yield "mov.b32 polls, 0;"
    yield f"{label}:"
    for n in packets:
        yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 place, place, offset;"
        for device in range(shape.devices):
            first, second = words(n, device)
            yield f"add.s64 at, from{device}, place;"
            yield (
                f"@is_asked{n * shape.devices + device} "
                f"ld.relaxed.sys.global.v2.b64 {{{first}, {second}}}, [at];"
            )
    yield "mov.b32 pending, 0;"
    for n in packets:
        for device in range(shape.devices):
            for word in words(n, device):
                yield f"mov.b64 {{x, y}}, {word}; xor.b32 y, y, call; or.b32 pending, pending, y;"
    yield f"add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MAX_POLLS}; @p trap;"
    yield f"setp.ne.u32 p, pending, 0; @p bra {label};"


def _widened(shape: Shape, word: str, low: str, high: str) -> str:
    """Two f32 of a word."""
    if shape.is_bfloat16:
        return (
            f"shl.b32 z, {word}, 16; mov.b32 {low}, z; and.b32 z, {word}, 0xffff0000; mov.b32 {high}, z;"
        )
    return f"mov.b32 {{low, high}}, {word}; cvt.f32.f16 {low}, low; cvt.f32.f16 {high}, high;"


def _rounded(shape: Shape, word: str, low: str, high: str) -> str:
    """The inverse, to the nearest."""
    return f"cvt.rn.{'bf16' if shape.is_bfloat16 else 'f16'}x2.f32 {word}, {high}, {low};"


def _added(shape: Shape, n: int, half: int) -> Iterator[str]:
    """All devices' numbers of a word added in the devices' order, which is the same everywhere; in k."""
    for device in range(shape.devices):
        yield f"mov.b64 {{x, y}}, w{2 * (n * shape.devices + device) + half};"
        if device == 0:
            yield _widened(shape, "x", "a0", "a1")
        else:
            yield _widened(shape, "x", "f", "g") + " add.f32 a0, a0, f; add.f32 a1, a1, g;"
    yield _rounded(shape, f"k{2 * n + half}", "a0", "a1")


def _added_to_stream(shape: Shape, n: int, half: int) -> Iterator[str]:
    """A word of the sum added to the stream and rounded; its squares added up."""
    word = f"k{2 * n + half}"
    yield _widened(shape, word, "a0", "a1") + _widened(shape, f"s{2 * n + half}", "f", "g")
    yield f"add.f32 a0, a0, f; add.f32 a1, a1, g; {_rounded(shape, word, 'a0', 'a1')}"
    yield _widened(shape, word, "a0", "a1")
    yield f"@is_packet{n} fma.rn.f32 total, a0, a0, total; @is_packet{n} fma.rn.f32 total, a1, a1, total;"


def _normed(shape: Shape, at: _At, norm: Norm) -> Iterator[str]:
    """The row over its root mean square, by the weight."""
    for n in range(shape.each):  # on its way while the threads wait for each other
        pair = f"{{s{2 * n}, s{2 * n + 1}}}"
        yield f"mul.wide.u32 place, j{n}, 8; add.s64 at, {at.weight}, place;"
        yield f"@is_packet{n} ld.global.v2.b32 {pair}, [at];"
    yield from _total_of_all()
    yield f"mov.f32 f, {_f32(1 / shape.width)}; mov.f32 g, {_f32(norm.eps)};"
    yield "fma.rn.f32 factor, total, f, g; rsqrt.approx.f32 factor, factor;"
    for n in range(shape.each):
        for half in (0, 1):
            word = f"k{2 * n + half}"
            yield _widened(shape, word, "a0", "a1") + _widened(shape, f"s{2 * n + half}", "f", "g")
            yield "mul.f32 a0, a0, factor; mul.f32 a1, a1, factor;"
            if norm.is_offset:
                yield "add.f32 f, f, 0f3f800000; add.f32 g, g, 0f3f800000;"
            if not norm.rounds_once:
                yield _rounded(shape, word, "a0", "a1") + _widened(shape, word, "a0", "a1")
            yield f"mul.f32 a0, a0, f; mul.f32 a1, a1, g; {_rounded(shape, word, 'a0', 'a1')}"
        pair = f"{{k{2 * n}, k{2 * n + 1}}}"
        yield f"{_in_row(shape, at.normed, n)} @is_packet{n} st.global.v2.b32 [at], {pair};"


def _total_of_all() -> Iterator[str]:
    """The register total summed over all threads; shared memory is used by turns, row by row."""
    across = [
        f"shfl.sync.bfly.b32 f, total, {1 << n}, 31, -1; add.f32 total, total, f;" for n in reversed(range(5))
    ]
    yield from across
    yield "setp.eq.u32 p, lane, 0; mad.lo.u32 x, warp, 4, turn; @p st.shared.f32 [x], total;"
    yield from wait_for_all()
    yield "mad.lo.u32 x, lane, 4, turn; ld.shared.f32 total, [x];"
    yield from across
    yield "sub.u32 turn, both_turns, turn;"


def _f32(value: float) -> str:
    """A constant."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
