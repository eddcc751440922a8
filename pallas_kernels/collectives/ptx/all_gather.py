"""All-gather kernel over devices that write into each other's memory."""

from collections.abc import Iterator

import jax
from jax import lax

from pallas_kernels.collectives.ptx.exchange import (
    Exchange,
    declare_registers,
    emit_buffer_addresses,
    emit_end_of_call,
    emit_first_loads,
    emit_load_own_packets,
    emit_row_loop,
    emit_send_row,
    emit_store_packet,
    emit_wait_for_packets,
    packets_of_all,
)
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import WARPS, block_barrier, launch_ptx


def _by_xla(
    table: jax.Array, x: jax.Array, *, exchange: Exchange, axis_name: str | tuple[str, ...]
) -> jax.Array:
    del table, exchange
    return lax.all_gather(x, axis_name)


@with_fallback(_by_xla)
def all_gather_kernel(
    table: jax.Array, x: jax.Array, *, exchange: Exchange, axis_name: str | tuple[str, ...]
) -> jax.Array:
    """Return all devices' x: [devices, rows, width].

    Args:
        table: Table of PeerMemory; see `all_reduce_kernel`.
        x: [rows, width], 32-bit; a number whose bits are the empty word becomes 0.
        exchange: Static sizes; an f32 counts as two 16-bit numbers.
        axis_name: Static: the axes of shard_map to gather over, for the fallback.
    """
    del axis_name
    (gathered,) = launch_ptx(
        program(exchange),
        (table, x),
        name="all_gather",
        out_type=(jax.ShapeDtypeStruct((exchange.devices, *x.shape), x.dtype),),
        words=WARPS,
        grid=(exchange.blocks,),
    )
    return gathered


def program(exchange: Exchange) -> str:
    """Return the PTX of a thread.

    Operands: $0 to $2 the addresses of the table, x and the result, $3 of shared memory; $4 and $5 the
    indices of the thread block and the thread.
    """
    lines = [
        *declare_registers(exchange),
        ".reg .b64 part;",
        *emit_first_loads(exchange, "$4", "$5", [("$1", "d")]),
        *emit_buffer_addresses(exchange, "$0", "$4"),
        *emit_row_loop(exchange, "$4", "SEND", [*emit_send_row(exchange, "$1")]),
        *emit_row_loop(exchange, "$4", "KEEP", [*_store_gathered(exchange)]),
        *block_barrier(),  # all threads have read the call number
        emit_end_of_call("$5"),
    ]
    return "{ " + "\n".join(lines) + " }"


def _store_gathered(exchange: Exchange) -> Iterator[str]:
    """Yield code that waits for a row of all devices and stores it."""
    yield from emit_load_own_packets(exchange, "$1")
    for group in exchange.groups(exchange.devices):
        awaited = packets_of_all(exchange, group)
        yield from emit_wait_for_packets(awaited, f"WAIT{group.start}")
        for device in range(exchange.devices):
            yield f"add.s64 part, $2, {device * exchange.rows * exchange.width * 2};"
            for packet in awaited[device :: exchange.devices]:
                yield emit_store_packet(exchange, "part", f"{{{', '.join(packet.words)}}}", packet.packet)
