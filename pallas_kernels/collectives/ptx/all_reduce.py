"""All-reduce kernel over devices that write into each other's memory, optionally with an RMS norm."""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collectives.ptx.exchange import (
    Awaited,
    Exchange,
    again,
    call_ends,
    each_row,
    filled,
    own,
    owner_address,
    packet_sent,
    packets,
    packets_of_all,
    packets_of_owner,
    pair_of,
    places,
    registers,
    sent,
    stored,
    waited_for,
)
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.launch import WARPS, block_barrier, launch_ptx


class Norm(NamedTuple):
    """RMS norm of a residual stream to which the sum is added.

    Attributes:
        eps: Number that is added to the mean square.
        is_offset: Whether the factor is 1 + weight.
        rounds_once: Whether only the product is rounded; else the normalized input, too.
    """

    eps: float
    is_offset: bool = False
    rounds_once: bool = False


def _by_xla(
    table: jax.Array,
    x: jax.Array,
    *stream_and_weight: jax.Array,
    exchange: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    del table, exchange
    parts = lax.all_gather(x, axis_name).astype(jnp.float32)
    total = round_to(sum(parts[1:], parts[0]), x.dtype)
    if norm is None:
        return (total.astype(x.dtype),)
    residual, weight = stream_and_weight
    stream = round_to(total + residual.astype(jnp.float32), x.dtype)
    wide = stream * lax.rsqrt(jnp.mean(stream * stream, axis=-1, keepdims=True) + norm.eps)
    factor = weight.astype(jnp.float32) + (1.0 if norm.is_offset else 0.0)
    normed = (wide if norm.rounds_once else round_to(wide, x.dtype)) * factor[None]
    return stream.astype(x.dtype), normed.astype(x.dtype)


@with_fallback(_by_xla)
def all_reduce_kernel(
    table: jax.Array,
    x: jax.Array,
    *stream_and_weight: jax.Array,
    exchange: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """Return the sum; or the residual stream plus the sum, and its RMS norm.

    Args:
        table: int32 [2 + 2 * devices]: this device's index, 0, and the addresses of all devices' memory.
        x: [rows, width], 16-bit.
        stream_and_weight: With a norm: the residual stream, like x, and the weight [width], in x's dtype.
        exchange: Static sizes.
        norm: Static: the norm, or None.
        axis_name: Static: the axes of shard_map to sum over, for the fallback.
    """
    del axis_name
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_ptx(
        program(exchange, norm, x.dtype == jnp.bfloat16),
        (table, x, *stream_and_weight),
        name="all_reduce",
        out_type=(like_x,) if norm is None else (like_x, like_x),
        words=2 * WARPS,
        grid=(exchange.blocks,),
    )


class _Operands(NamedTuple):
    """PTX operands: addresses of arrays and shared memory, indices of the thread block and the thread."""

    table: str
    x: str
    residual: str
    weight: str
    out: str
    normed: str
    shared: str
    block: str
    thread: str


def program(exchange: Exchange, norm: Norm | None, is_bfloat16: bool) -> str:
    """Return the PTX of a thread; its operands are those of `_Operands` that exist, in order."""
    names = [name for name in _Operands._fields if norm or name not in ("residual", "weight", "normed")]
    at = _Operands(**dict.fromkeys(_Operands._fields, "") | {name: f"${n}" for n, name in enumerate(names)})
    numbers = _Numbers(is_bfloat16)
    each = len(exchange.each)
    lines = [
        *registers(exchange),
        f".reg .b32 s<{2 * each}>, v<{2 * each}>, k<{2 * each}>, lane, warp, turn, both_turns;",
        ".reg .f32 f, g, total, factor, low, high; .reg .b16 first, second;",
        *packets(exchange, at.block, at.thread, _loaded_first(at, norm)),
        *places(exchange, at.table, at.block),
        f"and.b32 lane, {at.thread}, 31; shr.u32 warp, {at.thread}, 5;",
        f"mov.b32 turn, {at.shared}; mad.lo.u32 both_turns, {at.shared}, 2, {4 * WARPS};",
        *_rows(exchange, at, norm, numbers),
        *block_barrier(),  # all threads have read the call number
        call_ends(at.thread),
    ]
    return "{ " + "\n".join(lines) + " }"


def _loaded_first(at: _Operands, norm: Norm | None) -> list[tuple[str, str]]:
    """Return the arrays that a thread block of one row loads first, with their registers."""
    return [(at.x, "d")] + ([] if norm is None else [(at.residual, "s")])


class _Numbers(NamedTuple):
    """Conversions between a register of two 16-bit numbers and two f32 registers."""

    is_bfloat16: bool

    def to_f32(self, pair: str, low: str, high: str) -> str:
        """Return code that converts two 16-bit numbers to f32."""
        if self.is_bfloat16:
            return (
                f"shl.b32 z, {pair}, 16; mov.b32 {low}, z; and.b32 z, {pair}, 0xffff0000; mov.b32 {high}, z;"
            )
        return f"mov.b32 {{first, second}}, {pair}; cvt.f32.f16 {low}, first; cvt.f32.f16 {high}, second;"

    def rounded(self, pair: str, low: str, high: str) -> str:
        """Return code that rounds two f32 to the nearest 16-bit numbers."""
        return f"cvt.rn.{'bf16' if self.is_bfloat16 else 'f16'}x2.f32 {pair}, {high}, {low};"


def _rows(exchange: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """Yield code that sends and sums all rows; in two shots the owners sum and send the sums on."""
    send, add = [*sent(exchange, at.x)], [*_summed(exchange, at, norm, numbers)]
    if exchange.shots == 1:
        yield from each_row(exchange, at.block, "SEND", send)
        yield from each_row(exchange, at.block, "SUM", add)
        return
    yield from each_row(exchange, at.block, "SEND", send, rows="others")
    yield from each_row(exchange, at.block, "SUM", add, rows="own")
    yield from each_row(exchange, at.block, "TAKE", [*_taken(exchange, at, norm, numbers)], rows="others")


def _summed(exchange: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """Yield code that receives a row of all devices, adds (in two shots sends), stores and norms it."""
    yield from own(exchange, at.x)
    yield from _begun(exchange, at, norm)
    for group in exchange.groups(exchange.devices):
        awaited = packets_of_all(exchange, group)
        yield from waited_for(awaited, f"WAIT{group.start}")
        for nth, n in enumerate(group):
            of_packet = awaited[nth * exchange.devices : (nth + 1) * exchange.devices]
            for half in (0, 1):
                yield from _added(of_packet, n, half, numbers)
            if exchange.shots == 2:
                yield from (filled(f"k{2 * n + half}") for half in (0, 1))
                yield from packet_sent(exchange, n, pair_of("k", n), to_owner=False)
            yield from _added_to_stream(n, norm, numbers)
    yield from _ended(exchange, at, norm, numbers)


def _taken(exchange: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """Yield code that waits for a row's sum from its owner, stores and norms it."""
    yield from owner_address(exchange)
    yield from _begun(exchange, at, norm)
    for group in exchange.groups(1):
        yield from waited_for(packets_of_owner(group), f"WAIT_FOR_SUM{group.start}")
        for n in group:
            yield from _added_to_stream(n, norm, numbers)
    yield from _ended(exchange, at, norm, numbers)


def _begun(exchange: Exchange, at: _Operands, norm: Norm | None) -> Iterator[str]:
    """Yield code that loads what the norm needs while the row's words are under way."""
    if norm is not None:
        yield from again(exchange, at.residual, "s")
        if exchange.is_one_row:
            yield from _weights(exchange, at)
    yield "mov.f32 total, 0f00000000;"


def _ended(exchange: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """Yield code that stores the row in k, and its norm."""
    yield from (stored(exchange, at.out, pair_of("k", n), n) for n in exchange.each)
    if norm is not None:
        yield from _normed(exchange, at, norm, numbers)


def _added(packets: Sequence[Awaited], n: int, half: int, numbers: _Numbers) -> Iterator[str]:
    """Yield code that adds all devices' words into k, in the devices' order: all get the same bits."""
    for device, packet in enumerate(packets):
        pair = packet.words[half]
        if device == 0:
            yield numbers.to_f32(pair, "low", "high")
        else:
            yield numbers.to_f32(pair, "f", "g") + " add.f32 low, low, f; add.f32 high, high, g;"
    yield numbers.rounded(f"k{2 * n + half}", "low", "high")


def _added_to_stream(n: int, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """Yield code that, with a norm, adds the sum to the stream, rounds it and accumulates its squares."""
    for half in () if norm is None else (0, 1):
        pair = f"k{2 * n + half}"
        yield numbers.to_f32(pair, "low", "high") + " " + numbers.to_f32(f"s{2 * n + half}", "f", "g")
        yield f"add.f32 low, low, f; add.f32 high, high, g; {numbers.rounded(pair, 'low', 'high')}"
        yield numbers.to_f32(pair, "low", "high")
        yield "".join(f"@is_packet{n} fma.rn.f32 total, {x}, {x}, total; " for x in ("low", "high"))


def _normed(exchange: Exchange, at: _Operands, norm: Norm, numbers: _Numbers) -> Iterator[str]:
    """Yield code that divides the row by its root mean square and multiplies it by the weight."""
    if not exchange.is_one_row:  # the loads overlap with the barrier
        yield from _weights(exchange, at)
    yield from _total_of_all()
    yield f"mov.f32 f, {_f32(1 / exchange.width)}; mov.f32 g, {_f32(norm.eps)};"
    yield "fma.rn.f32 factor, total, f, g; rsqrt.approx.f32 factor, factor;"
    for n in exchange.each:
        for pair, weight in ((f"k{2 * n + half}", f"v{2 * n + half}") for half in (0, 1)):
            yield numbers.to_f32(pair, "low", "high") + " " + numbers.to_f32(weight, "f", "g")
            yield "mul.f32 low, low, factor; mul.f32 high, high, factor;"
            if norm.is_offset:
                yield "add.f32 f, f, 0f3f800000; add.f32 g, g, 0f3f800000;"
            if not norm.rounds_once:
                yield numbers.rounded(pair, "low", "high") + " " + numbers.to_f32(pair, "low", "high")
            yield f"mul.f32 low, low, f; mul.f32 high, high, g; {numbers.rounded(pair, 'low', 'high')}"
        yield stored(exchange, at.normed, pair_of("k", n), n)


def _weights(exchange: Exchange, at: _Operands) -> Iterator[str]:
    """Yield code that loads a thread's packets of the norm's weight into v."""
    for n in exchange.each:
        yield f"mul.wide.u32 place, j{n}, 8; add.s64 at, {at.weight}, place;"
        yield f"@is_packet{n} ld.global.v2.b32 {pair_of('v', n)}, [at];"


def _total_of_all() -> Iterator[str]:
    """Yield code that sums register total over all threads; rows alternate between two SMEM buffers."""
    across = [
        f"shfl.sync.bfly.b32 f, total, {1 << n}, 31, -1; add.f32 total, total, f;" for n in reversed(range(5))
    ]
    yield from across
    yield "setp.eq.u32 p, lane, 0; mad.lo.u32 x, warp, 4, turn; @p st.shared.f32 [x], total;"
    yield from block_barrier()
    yield "mad.lo.u32 x, lane, 4, turn; ld.shared.f32 total, [x];"
    yield from across
    yield "sub.u32 turn, both_turns, turn;"


def _f32(value: float) -> str:
    """Return a PTX f32 constant."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
