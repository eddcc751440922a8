"""Sums over devices that write into each other's memory, one kernel a sum, with what follows in a decoder."""

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
    of_all,
    of_owner,
    own,
    owners_place,
    packet_sent,
    packets,
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
    """An RMS norm behind a sum that is added to a stream.

    Attributes:
        eps: Added to the mean square.
        is_offset: The factor is 1 + weight.
        rounds_once: The product is rounded; else the normalised input, too.
    """

    eps: float
    is_offset: bool = False
    rounds_once: bool = False


def _by_xla(
    table: jax.Array,
    x: jax.Array,
    *stream_and_weight: jax.Array,
    of: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    del table, of
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
    of: Exchange,
    norm: Norm | None,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """The sum; or the stream with it added, and that normalised.

    Args:
        table: int32 [2 + 2 * devices]: this device's number, 0, and the addresses of all devices' memory.
        x: [rows, width], of 16-bit numbers.
        stream_and_weight: Where there is a norm: the stream, as x, and the weight [width], in x's dtype.
        of: Static.
        norm: Static: what follows; None = nothing.
        axis_name: Static: the axes of shard_map that the devices lie along, for the fallback.
    """
    del axis_name
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_ptx(
        program(of, norm, x.dtype == jnp.bfloat16),
        (table, x, *stream_and_weight),
        name="all_reduce",
        out_type=(like_x,) if norm is None else (like_x, like_x),
        words=2 * WARPS,
        grid=(of.blocks,),
    )


class _Operands(NamedTuple):
    """Addresses of arrays, then the numbers of the thread block and the thread."""

    table: str
    x: str
    residual: str
    weight: str
    out: str
    normed: str
    shared: str
    block: str
    thread: str


def program(of: Exchange, norm: Norm | None, is_bfloat16: bool) -> str:
    """PTX of a thread; operands in the order of all_reduce_kernel's arrays, its results, launch_ptx's own."""
    names = [name for name in _Operands._fields if norm or name not in ("residual", "weight", "normed")]
    at = _Operands(**dict.fromkeys(_Operands._fields, "") | {name: f"${n}" for n, name in enumerate(names)})
    numbers = _Numbers(is_bfloat16)
    each = len(of.each)
    lines = [
        *registers(of),
        f".reg .b32 s<{2 * each}>, v<{2 * each}>, k<{2 * each}>, lane, warp, turn, both_turns;",
        ".reg .f32 f, g, total, factor, low, high; .reg .b16 first, second;",
        *packets(of, at.block, at.thread, _loaded_first(at, norm)),
        *places(of, at.table, at.block),
        f"and.b32 lane, {at.thread}, 31; shr.u32 warp, {at.thread}, 5;",
        f"mov.b32 turn, {at.shared}; mad.lo.u32 both_turns, {at.shared}, 2, {4 * WARPS};",
        *_rows(of, at, norm, numbers),
        *block_barrier(),  # all threads have read the call's number
        call_ends(at.thread),
    ]
    return "{ " + "\n".join(lines) + " }"


def _loaded_first(at: _Operands, norm: Norm | None) -> list[tuple[str, str]]:
    """What a thread block of one row loads before all else: arrays, and registers."""
    return [(at.x, "d")] + ([] if norm is None else [(at.residual, "s")])


class _Numbers(NamedTuple):
    """Two 16-bit numbers of a register, and two f32."""

    is_bfloat16: bool

    def widened(self, pair: str, low: str, high: str) -> str:
        if self.is_bfloat16:
            return (
                f"shl.b32 z, {pair}, 16; mov.b32 {low}, z; and.b32 z, {pair}, 0xffff0000; mov.b32 {high}, z;"
            )
        return f"mov.b32 {{first, second}}, {pair}; cvt.f32.f16 {low}, first; cvt.f32.f16 {high}, second;"

    def rounded(self, pair: str, low: str, high: str) -> str:
        """To the nearest."""
        return f"cvt.rn.{'bf16' if self.is_bfloat16 else 'f16'}x2.f32 {pair}, {high}, {low};"


def _rows(of: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """All rows: sent, summed; in two shots by their owners first, whose sums the others then take."""
    send, add = [*sent(of, at.x)], [*_summed(of, at, norm, numbers)]
    if of.shots == 1:
        yield from each_row(of, at.block, "SEND", send)
        yield from each_row(of, at.block, "SUM", add)
        return
    yield from each_row(of, at.block, "SEND", send, whose="others'")
    yield from each_row(of, at.block, "SUM", add, whose="own")
    yield from each_row(of, at.block, "TAKE", [*_taken(of, at, norm, numbers)], whose="others'")


def _summed(of: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """A row of all devices: waited for, added, stored; what follows. In two shots the sum is sent, too."""
    yield from own(of, at.x)
    yield from _begun(of, at, norm)
    for group in of.groups(of.devices):
        awaited = of_all(of, group)
        yield from waited_for(awaited, f"WAIT{group.start}")
        for nth, n in enumerate(group):
            of_packet = awaited[nth * of.devices : (nth + 1) * of.devices]
            for half in (0, 1):
                yield from _added(of_packet, n, half, numbers)
            if of.shots == 2:
                yield from (filled(f"k{2 * n + half}") for half in (0, 1))
                yield from packet_sent(of, n, pair_of("k", n), to_owner=False)
            yield from _added_to_stream(n, norm, numbers)
    yield from _ended(of, at, norm, numbers)


def _taken(of: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """A row's sum from its owner: waited for, stored; what follows."""
    yield from owners_place(of)
    yield from _begun(of, at, norm)
    for group in of.groups(1):
        yield from waited_for(of_owner(group), f"WAIT_FOR_SUM{group.start}")
        for n in group:
            yield from _added_to_stream(n, norm, numbers)
    yield from _ended(of, at, norm, numbers)


def _begun(of: Exchange, at: _Operands, norm: Norm | None) -> Iterator[str]:
    """What is loaded while a row is waited for."""
    if norm is not None:
        yield from again(of, at.residual, "s")
        if of.is_one_row:
            yield from _weights(of, at)
    yield "mov.f32 total, 0f00000000;"


def _ended(of: Exchange, at: _Operands, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """What is in k stored; and normalised."""
    yield from (stored(of, at.out, pair_of("k", n), n) for n in of.each)
    if norm is not None:
        yield from _normed(of, at, norm, numbers)


def _added(packets: Sequence[Awaited], n: int, half: int, numbers: _Numbers) -> Iterator[str]:
    """All devices' numbers of a word, in k: added in the devices' order, so that all have the same sum."""
    for device, packet in enumerate(packets):
        pair = packet.words[half]
        if device == 0:
            yield numbers.widened(pair, "low", "high")
        else:
            yield numbers.widened(pair, "f", "g") + " add.f32 low, low, f; add.f32 high, high, g;"
    yield numbers.rounded(f"k{2 * n + half}", "low", "high")


def _added_to_stream(n: int, norm: Norm | None, numbers: _Numbers) -> Iterator[str]:
    """With a norm: a packet of the sum added to the stream's in s, rounded; its squares added up."""
    for half in () if norm is None else (0, 1):
        pair = f"k{2 * n + half}"
        yield numbers.widened(pair, "low", "high") + " " + numbers.widened(f"s{2 * n + half}", "f", "g")
        yield f"add.f32 low, low, f; add.f32 high, high, g; {numbers.rounded(pair, 'low', 'high')}"
        yield numbers.widened(pair, "low", "high")
        yield "".join(f"@is_packet{n} fma.rn.f32 total, {x}, {x}, total; " for x in ("low", "high"))


def _normed(of: Exchange, at: _Operands, norm: Norm, numbers: _Numbers) -> Iterator[str]:
    """The row over its root mean square, by the weight."""
    if not of.is_one_row:  # on its way while the threads wait for each other
        yield from _weights(of, at)
    yield from _total_of_all()
    yield f"mov.f32 f, {_f32(1 / of.width)}; mov.f32 g, {_f32(norm.eps)};"
    yield "fma.rn.f32 factor, total, f, g; rsqrt.approx.f32 factor, factor;"
    for n in of.each:
        for pair, weight in ((f"k{2 * n + half}", f"v{2 * n + half}") for half in (0, 1)):
            yield numbers.widened(pair, "low", "high") + " " + numbers.widened(weight, "f", "g")
            yield "mul.f32 low, low, factor; mul.f32 high, high, factor;"
            if norm.is_offset:
                yield "add.f32 f, f, 0f3f800000; add.f32 g, g, 0f3f800000;"
            if not norm.rounds_once:
                yield numbers.rounded(pair, "low", "high") + " " + numbers.widened(pair, "low", "high")
            yield f"mul.f32 low, low, f; mul.f32 high, high, g; {numbers.rounded(pair, 'low', 'high')}"
        yield stored(of, at.normed, pair_of("k", n), n)


def _weights(of: Exchange, at: _Operands) -> Iterator[str]:
    """A thread's packets of the norm's weight, in v."""
    for n in of.each:
        yield f"mul.wide.u32 place, j{n}, 8; add.s64 at, {at.weight}, place;"
        yield f"@is_packet{n} ld.global.v2.b32 {pair_of('v', n)}, [at];"


def _total_of_all() -> Iterator[str]:
    """The register total, summed over all threads; rows use two pieces of shared memory by turns."""
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
    """A constant."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
