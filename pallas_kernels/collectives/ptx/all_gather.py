"""What each of several devices has, on all of them: by words that they write into each other's memory."""

from collections.abc import Iterator

import jax
from jax import lax

from pallas_kernels.collectives.ptx.exchange import (
    Exchange,
    call_ends,
    each_row,
    of_all,
    own,
    packets,
    places,
    registers,
    sent,
    stored,
    waited_for,
)
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import WARPS, block_barrier, launch_ptx


def _by_xla(table: jax.Array, x: jax.Array, *, of: Exchange, axis_name: str | tuple[str, ...]) -> jax.Array:
    del table, of
    return lax.all_gather(x, axis_name)


@with_fallback(_by_xla)
def all_gather_kernel(
    table: jax.Array, x: jax.Array, *, of: Exchange, axis_name: str | tuple[str, ...]
) -> jax.Array:
    """All devices' x: [devices, rows, width].

    Args:
        table: As all_reduce_kernel has it.
        x: [rows, width], of 32-bit numbers; one whose bits are a word that is never sent becomes 0.
        of: Static: of twice as wide rows of 16-bit numbers.
        axis_name: Static: the axes of shard_map that the devices lie along, for the fallback.
    """
    del axis_name
    (gathered,) = launch_ptx(
        program(of),
        (table, x),
        name="all_gather",
        out_type=(jax.ShapeDtypeStruct((of.devices, *x.shape), x.dtype),),
        words=WARPS,
        grid=(of.blocks,),
    )
    return gathered


def program(of: Exchange) -> str:
    """PTX of a thread.

    Operands: $0 to $2 the addresses of the table, x and the result, $3 that of shared memory; the numbers of
    the thread block and the thread.
    """
    lines = [
        *registers(of),
        ".reg .b64 part;",
        *packets(of, "$4", "$5", [("$1", "d")]),
        *places(of, "$0", "$4"),
        *each_row(of, "$4", "SEND", [*sent(of, "$1")]),
        *each_row(of, "$4", "KEEP", [*_kept(of)]),
        *block_barrier(),  # all threads have read the call's number
        call_ends("$5"),
    ]
    return "{ " + "\n".join(lines) + " }"


def _kept(of: Exchange) -> Iterator[str]:
    """A row of all devices: waited for, and stored for each."""
    yield from own(of, "$1")
    for group in of.groups(of.devices):
        awaited = of_all(of, group)
        yield from waited_for(awaited, f"WAIT{group.start}")
        for device in range(of.devices):
            yield f"add.s64 part, $2, {device * of.rows * of.width * 2};"
            for packet in awaited[device :: of.devices]:
                yield stored(of, "part", f"{{{', '.join(packet.words)}}}", packet.packet)
