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
    declare_registers,
    emit_buffer_addresses,
    emit_end_of_call,
    emit_first_loads,
    emit_load_own_packets,
    emit_load_packets_unless_loaded,
    emit_owner_address,
    emit_replace_empty_word,
    emit_row_loop,
    emit_send_packet,
    emit_send_row,
    emit_store_packet,
    emit_wait_for_packets,
    packet_registers,
    packets_of_all,
    packets_of_owner,
)
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.launch import WARPS, block_barrier, launch_ptx


class Norm(NamedTuple):
    """RMS norm of the sum plus a residual.

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
    *residual_and_weight: jax.Array,
    exchange: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    del table, exchange
    parts = lax.all_gather(x, axis_name).astype(jnp.float32)
    total = round_to(sum(parts[1:], parts[0]), x.dtype)
    if norm is None:
        return (total.astype(x.dtype),)
    residual, weight = residual_and_weight
    residual_out = round_to(total + residual.astype(jnp.float32), x.dtype)
    normalized = residual_out * lax.rsqrt(
        jnp.mean(residual_out * residual_out, axis=-1, keepdims=True) + norm.eps
    )
    factor = weight.astype(jnp.float32) + (1.0 if norm.is_offset else 0.0)
    normed = (normalized if norm.rounds_once else round_to(normalized, x.dtype)) * factor[None]
    return residual_out.astype(x.dtype), normed.astype(x.dtype)


@with_fallback(_by_xla)
def all_reduce_kernel(
    table: jax.Array,
    x: jax.Array,
    *residual_and_weight: jax.Array,
    exchange: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """Return the sum; or, with a norm, the residual plus the sum, and its RMS norm.

    Args:
        table: int32 [2 + 2 * devices]: this device's index, 0, and the addresses of all devices' memory.
        x: Array to sum, [rows, width], 16-bit.
        residual_and_weight: With a norm: the residual, like x, and the weight [width], in x's dtype.
        exchange: Static sizes.
        norm: Static: the norm, or None.
        axis_name: Static: the axes of shard_map to sum over, for the fallback.
    """
    del axis_name
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_ptx(
        program(exchange, norm, x.dtype == jnp.bfloat16),
        (table, x, *residual_and_weight),
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
    conversion = PairConversion(is_bfloat16)
    each = len(exchange.thread_packets)
    lines = [
        *declare_registers(exchange),
        f".reg .b32 s<{2 * each}>, v<{2 * each}>, k<{2 * each}>, lane, warp, turn, both_turns;",
        ".reg .f32 f, g, total, factor, low, high; .reg .b16 first, second;",
        *emit_first_loads(exchange, at.block, at.thread, _first_loads(at, norm)),
        *emit_buffer_addresses(exchange, at.table, at.block),
        f"and.b32 lane, {at.thread}, 31; shr.u32 warp, {at.thread}, 5;",
        f"mov.b32 turn, {at.shared}; mad.lo.u32 both_turns, {at.shared}, 2, {4 * WARPS};",
        *_emit_rows(exchange, at, norm, conversion),
        *block_barrier(),  # all threads have read the call number
        emit_end_of_call(at.thread),
    ]
    return "{ " + "\n".join(lines) + " }"


def _first_loads(at: _Operands, norm: Norm | None) -> list[tuple[str, str]]:
    """Return the arrays that a thread block of one row loads first, with their registers."""
    return [(at.x, "d")] + ([] if norm is None else [(at.residual, "s")])


class PairConversion(NamedTuple):
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
        """Return code that rounds two f32 to the nearest 16-bit conversion."""
        return f"cvt.rn.{'bf16' if self.is_bfloat16 else 'f16'}x2.f32 {pair}, {high}, {low};"


def _emit_rows(
    exchange: Exchange, at: _Operands, norm: Norm | None, conversion: PairConversion
) -> Iterator[str]:
    """Yield code that sends and sums all rows; in two shots the owner of a row sends its sum."""
    send, add = [*emit_send_row(exchange, at.x)], [*_emit_sum_rows(exchange, at, norm, conversion)]
    if exchange.shots == 1:
        yield from emit_row_loop(exchange, at.block, "SEND", send)
        yield from emit_row_loop(exchange, at.block, "SUM", add)
        return
    yield from emit_row_loop(exchange, at.block, "SEND", send, rows="others")
    yield from emit_row_loop(exchange, at.block, "SUM", add, rows="own")
    yield from emit_row_loop(
        exchange, at.block, "TAKE", [*_emit_receive_sums(exchange, at, norm, conversion)], rows="others"
    )


def _emit_sum_rows(
    exchange: Exchange, at: _Operands, norm: Norm | None, conversion: PairConversion
) -> Iterator[str]:
    """Yield code that receives a row of all devices, adds (in two shots sends), stores and norms it."""
    yield from emit_load_own_packets(exchange, at.x)
    yield from _emit_norm_loads(exchange, at, norm)
    for group in exchange.groups(exchange.devices):
        awaited = packets_of_all(exchange, group)
        yield from emit_wait_for_packets(awaited, f"WAIT{group.start}")
        for i, n in enumerate(group):
            of_packet = awaited[i * exchange.devices : (i + 1) * exchange.devices]
            for half in (0, 1):
                yield from _emit_add_packets(of_packet, n, half, conversion)
            if exchange.shots == 2:
                yield from (emit_replace_empty_word(f"k{2 * n + half}") for half in (0, 1))
                yield from emit_send_packet(exchange, n, packet_registers("k", n), to_owner=False)
            yield from _emit_add_residual(n, norm, conversion)
    yield from _emit_epilogue(exchange, at, norm, conversion)


def _emit_receive_sums(
    exchange: Exchange, at: _Operands, norm: Norm | None, conversion: PairConversion
) -> Iterator[str]:
    """Yield code that waits for a row's sum from its owner, stores and norms it."""
    yield from emit_owner_address(exchange)
    yield from _emit_norm_loads(exchange, at, norm)
    for group in exchange.groups(1):
        yield from emit_wait_for_packets(packets_of_owner(group), f"WAIT_FOR_SUM{group.start}")
        for n in group:
            yield from _emit_add_residual(n, norm, conversion)
    yield from _emit_epilogue(exchange, at, norm, conversion)


def _emit_norm_loads(exchange: Exchange, at: _Operands, norm: Norm | None) -> Iterator[str]:
    """Yield code that loads the residual and the weight before the row's words have arrived."""
    if norm is not None:
        yield from emit_load_packets_unless_loaded(exchange, at.residual, "s")
        if exchange.is_one_row:
            yield from _emit_load_weights(exchange, at)
    yield "mov.f32 total, 0f00000000;"


def _emit_epilogue(
    exchange: Exchange, at: _Operands, norm: Norm | None, conversion: PairConversion
) -> Iterator[str]:
    """Yield code that stores the row in k, and its norm."""
    yield from (
        emit_store_packet(exchange, at.out, packet_registers("k", n), n) for n in exchange.thread_packets
    )
    if norm is not None:
        yield from _emit_norm(exchange, at, norm, conversion)


def _emit_add_packets(
    packets: Sequence[Awaited], n: int, half: int, conversion: PairConversion
) -> Iterator[str]:
    """Yield code that adds all devices' words into k, in the devices' order: all get the same bits."""
    for device, packet in enumerate(packets):
        pair = packet.words[half]
        if device == 0:
            yield conversion.to_f32(pair, "low", "high")
        else:
            yield conversion.to_f32(pair, "f", "g") + " add.f32 low, low, f; add.f32 high, high, g;"
    yield conversion.rounded(f"k{2 * n + half}", "low", "high")


def _emit_add_residual(n: int, norm: Norm | None, conversion: PairConversion) -> Iterator[str]:
    """Yield code that adds the residual to the sum, rounds the result and accumulates its squares.

    Without a norm, there is no such code.
    """
    for half in () if norm is None else (0, 1):
        pair = f"k{2 * n + half}"
        yield conversion.to_f32(pair, "low", "high") + " " + conversion.to_f32(f"s{2 * n + half}", "f", "g")
        yield f"add.f32 low, low, f; add.f32 high, high, g; {conversion.rounded(pair, 'low', 'high')}"
        yield conversion.to_f32(pair, "low", "high")
        yield "".join(f"@is_packet{n} fma.rn.f32 total, {x}, {x}, total; " for x in ("low", "high"))


def _emit_norm(exchange: Exchange, at: _Operands, norm: Norm, conversion: PairConversion) -> Iterator[str]:
    """Yield code that divides the row by its root mean square and multiplies it by the weight."""
    if not exchange.is_one_row:  # the loads overlap with the barrier
        yield from _emit_load_weights(exchange, at)
    yield from _emit_block_sum()
    yield f"mov.f32 f, {_f32(1 / exchange.width)}; mov.f32 g, {_f32(norm.eps)};"
    yield "fma.rn.f32 factor, total, f, g; rsqrt.approx.f32 factor, factor;"
    for n in exchange.thread_packets:
        for pair, weight in ((f"k{2 * n + half}", f"v{2 * n + half}") for half in (0, 1)):
            yield conversion.to_f32(pair, "low", "high") + " " + conversion.to_f32(weight, "f", "g")
            yield "mul.f32 low, low, factor; mul.f32 high, high, factor;"
            if norm.is_offset:
                yield "add.f32 f, f, 0f3f800000; add.f32 g, g, 0f3f800000;"
            if not norm.rounds_once:
                yield conversion.rounded(pair, "low", "high") + " " + conversion.to_f32(pair, "low", "high")
            yield f"mul.f32 low, low, f; mul.f32 high, high, g; {conversion.rounded(pair, 'low', 'high')}"
        yield emit_store_packet(exchange, at.normed, packet_registers("k", n), n)


def _emit_load_weights(exchange: Exchange, at: _Operands) -> Iterator[str]:
    """Yield code that loads a thread's packets of the norm's weight into v."""
    for n in exchange.thread_packets:
        yield f"mul.wide.u32 place, j{n}, 8; add.s64 at, {at.weight}, place;"
        yield f"@is_packet{n} ld.global.v2.b32 {packet_registers('v', n)}, [at];"


def _emit_block_sum() -> Iterator[str]:
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
