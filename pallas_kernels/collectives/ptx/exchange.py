"""Exchange of words between devices that write into each other's memory: layout, sending and waiting.

Empty memory holds a word that is never sent, two negative zeros: a device that reads any other word has
received data and need not wait for anything else. After reading, it writes the empty word again. Thread block
b of a device exchanges data with thread block b of the other devices, through two buffers that are used in
turns:

device 0, block b, call n                             device 1, block b, call n
----------------------------------------------------  -------------------------
send rows ---> buffer n % 2 of device 1
                                                      send rows ---> buffer n % 2 of device 0
poll its own buffer n % 2 until all words have arrived
make it empty again, use the words
next call: n + 1

Call n + 1 may write while a device still reads the words of call n, so it uses the other buffer. Call n + 2
uses the buffer of call n: by then all devices have finished call n, because rows of their call n + 1 have
arrived.

In two shots each row has an owner among the devices. All devices send their row to the owner only; it adds
them and sends the sum to all others: 2 (n - 1) rows are sent instead of n (n - 1), at the cost of a second
wait. The owner receives a row from all others, and these receive it from the owner, so no word is written
twice in a call. Every sum contains words of all devices, so the argument about the buffers above still holds.

The empty word follows TensorRT-LLM's one-shot all-reduce (after Lamport); NCCL's low-latency protocol sends a
flag with each four bytes, so twice the bytes.

PTX registers:
    register        contents
    device, call    index of this device; number of the call, counted from 1
    piece           buffer of the call: call % 2
    row, owner      row that is processed, and the device that owns it
    offset          offset in bytes of the row in a buffer
    my, peer        address of the memory of this device; of another device
    from            address of the call's buffer of device 0's packets, in this device's memory
    from_owner      address of the call's buffer of the owner's packets, in this device's memory
    to              offset of this device's buffer in another device's memory
    j<n>            index in the row of packet n of the thread; is_packet<n>: whether the row has it
    d<2n>, d<2n+1>  packet n of the row of this device's array
    k<2n>, k<2n+1>  packet n of the sum (all_reduce)
    w<i>            words received from all devices
    is_mine<i>      whether this is device i
    place, at, x, y, z, p  temporaries
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.ptx.launch import THREADS

MAX_BLOCKS = 128
COUNTERS = (
    4 * MAX_BLOCKS
)  # bytes at the start of a device's memory: the number of each thread block's last call
PACKET = 8  # bytes that a thread writes at once: two words, four 16-bit numbers
EMPTY = 0x80008000  # never sent: two negative zeros in bfloat16 and in float16
# About 80 s per thread, because another process may still be compiling; afterwards the kernel traps.
MAX_POLLS = 1 << 27
PACKETS_PER_WAIT = 8  # packets that a thread waits for together; limited by registers


class Exchange(NamedTuple):
    """Static sizes of an exchange of rows of 16-bit numbers, or of 32-bit numbers that count as two.

    Attributes:
        rows: Number of rows of the array.
        width: Number of columns, a multiple of 4.
        devices: Number of devices.
        block_bytes: Bytes of a thread block's memory for the data that one device writes in a call.
        shots: 1, or 2 if rows have owners.
    """

    rows: int
    width: int
    devices: int
    block_bytes: int
    shots: int = 1

    @property
    def blocks(self) -> int:
        """Number of thread blocks; each processes every `blocks`-th row."""
        return max(min(self.rows, MAX_BLOCKS), 1)

    @property
    def is_one_row(self) -> bool:
        """Whether each thread block has a single row, which it loads before anything else."""
        return self.rows <= self.blocks

    @property
    def packets(self) -> int:
        """Number of packets per row."""
        return self.width // 4

    @property
    def bytes_needed(self) -> int:
        """Minimum value of block_bytes."""
        return -(-self.rows // self.blocks) * self.packets * PACKET

    @property
    def thread_packets(self) -> range:
        """Indices of the packets of a row that a thread processes."""
        return range(-(-self.packets // THREADS))

    def groups(self, senders: int) -> Iterator[range]:
        """Yield groups of a thread's packets that it waits for together, from `senders` devices each."""
        packets_per_device = max(PACKETS_PER_WAIT // senders, 1)
        for first in range(0, len(self.thread_packets), packets_per_device):
            yield self.thread_packets[first : first + packets_per_device]


def memory_bytes(devices: int, block_bytes: int) -> int:
    """Return the number of bytes per device that the other devices write to."""
    return COUNTERS + MAX_BLOCKS * 2 * devices * block_bytes


def block_bytes_of(rows: int, width: int) -> int:
    """Return the `Exchange.block_bytes` for calls of up to `rows` rows."""
    return -(-rows // MAX_BLOCKS) * width // 4 * PACKET


def declare_registers(exchange: Exchange) -> Iterator[str]:
    """Yield declarations of the registers that the module docstring lists."""
    yield ".reg .b64 at, to, peer, my, counter, offset, place, table, from, from_owner;"
    yield ".reg .b32 device, call, piece, row, owner, x, y, z, polls, pending;"
    yield f".reg .b32 w<{2 * max(PACKETS_PER_WAIT, exchange.devices)}>;"
    yield f".reg .b32 j<{len(exchange.thread_packets)}>, d<{2 * len(exchange.thread_packets)}>;"
    yield f".reg .pred p, is_mine<{exchange.devices}>, is_packet<{len(exchange.thread_packets)}>;"


def emit_first_loads(
    exchange: Exchange, block: str, thread: str, arrays: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Yield code that finds a thread's packets of a row and, if its block has one row, loads them.

    These loads overlap with three dependent loads, of the call number and the addresses.

    Args:
        exchange: Static sizes.
        block: Operand with the index of the thread block.
        thread: Operand with the index of the thread.
        arrays: Pairs of an operand with an array's address and a prefix of the registers to load it into.
    """
    for n in exchange.thread_packets:
        yield f"add.u32 j{n}, {thread}, {n * THREADS}; setp.lt.u32 is_packet{n}, j{n}, {exchange.packets};"
        yield f"mov.b32 d{2 * n}, 0; mov.b32 d{2 * n + 1}, 0;"
    if exchange.is_one_row:
        yield f"mov.b32 row, {block};"
        yield from (
            emit_load_packet(exchange, array, packet_registers(name, n), n)
            for array, name in arrays
            for n in exchange.thread_packets
        )


def emit_buffer_addresses(exchange: Exchange, table: str, block: str) -> Iterator[str]:
    """Yield code that computes the addresses of the call's buffers, on this device and on the other devices.

    Args:
        exchange: Static sizes.
        table: Operand with the address of PeerMemory.table: this device's index, 0, all devices' addresses.
        block: Operand with the index of the thread block.
    """
    yield f"ld.global.b32 device, [{table}];"
    yield f"mul.wide.u32 place, device, 8; add.s64 place, place, {table}; ld.global.b64 my, [place + 8];"
    yield f"mul.wide.u32 counter, {block}, 4; add.s64 counter, counter, my;"
    yield "ld.global.b32 call, [counter]; add.u32 call, call, 1; and.b32 piece, call, 1;"
    # Buffers are ordered by thread block, piece (one of two, used in turns) and sending device.
    yield f"mad.lo.u32 x, {block}, 2, piece; mul.lo.u32 x, x, {exchange.devices};"
    yield (
        f"mul.wide.u32 from, x, {exchange.block_bytes}; add.s64 from, from, my; "
        f"add.s64 from, from, {COUNTERS};"
    )
    yield f"add.u32 y, x, device; mul.wide.u32 to, y, {exchange.block_bytes}; mov.b64 table, {table};"
    for n in range(exchange.devices):
        yield f"setp.eq.u32 is_mine{n}, device, {n};"


def emit_row_loop(
    exchange: Exchange, block: str, label: str, body: Sequence[str], *, rows: str = "all"
) -> Iterator[str]:
    """Yield code that runs `body` for each row of the thread block, with registers row and offset.

    Args:
        exchange: Static sizes; in two shots there is a register owner, too, the row's owner.
        block: Operand with the index of the thread block.
        label: Unique label of the loop.
        body: Code of one row.
        rows: "all" rows; "own": only rows that this device owns; "others": only rows of other devices.
    """
    yield f"mov.b32 row, {block}; mov.b64 offset, 0;"
    if exchange.shots == 2:
        yield f"rem.u32 owner, {block}, {exchange.devices};"
    yield f"{label}:"
    if rows != "all":
        yield f"setp.{'ne' if rows == 'own' else 'eq'}.u32 p, owner, device; @p bra {label}_NEXT;"
    yield from body
    if rows != "all":
        yield f"{label}_NEXT:"
    if exchange.is_one_row:
        return
    yield f"add.s64 offset, offset, {exchange.packets * PACKET}; add.u32 row, row, {exchange.blocks};"
    if exchange.shots == 2:
        yield f"add.u32 owner, owner, 1; setp.eq.u32 p, owner, {exchange.devices}; @p mov.b32 owner, 0;"
    yield f"setp.lt.u32 p, row, {exchange.rows}; @p bra {label};"


def packet_registers(name: str, n: int) -> str:
    """Return the operand of packet n's two registers."""
    return f"{{{name}{2 * n}, {name}{2 * n + 1}}}"


def emit_load_packet(exchange: Exchange, array: str, pair: str, n: int) -> str:
    """Return code that loads the row's packet n of an array [rows, width] into two registers."""
    return f"{_in_row(exchange, array, n)} @is_packet{n} ld.global.v2.b32 {pair}, [at];"


def emit_store_packet(exchange: Exchange, array: str, pair: str, n: int) -> str:
    """Return code that stores two registers to the row's packet n of an array [rows, width]."""
    return f"{_in_row(exchange, array, n)} @is_packet{n} st.global.v2.b32 [at], {pair};"


def _in_row(exchange: Exchange, array: str, n: int) -> str:
    return (
        f"mul.wide.u32 at, row, {2 * exchange.width}; add.s64 at, at, {array}; "
        f"mul.wide.u32 place, j{n}, 8; add.s64 at, at, place;"
    )


def emit_load_own_packets(exchange: Exchange, array: str) -> Iterator[str]:
    """Yield code that loads the row's packets into d; an empty word becomes two zeros, as when sent."""
    yield from emit_load_packets_unless_loaded(exchange, array, "d")
    yield from (
        emit_replace_empty_word(f"d{2 * n + half}") for n in exchange.thread_packets for half in (0, 1)
    )


def emit_load_packets_unless_loaded(exchange: Exchange, array: str, name: str) -> Iterator[str]:
    """Yield code that loads the row's packets of an array unless `packets` has loaded them."""
    if not exchange.is_one_row:
        yield from (
            emit_load_packet(exchange, array, packet_registers(name, n), n) for n in exchange.thread_packets
        )


def emit_replace_empty_word(name: str) -> str:
    """Return code that replaces an empty word in a register by two zeros, before it is sent."""
    return f"setp.eq.u32 p, {name}, {EMPTY}; @p mov.b32 {name}, 0;"


def emit_send_row(exchange: Exchange, array: str) -> Iterator[str]:
    """Yield code that sends the row to all other devices, or in two shots to its owner."""
    yield from emit_load_own_packets(exchange, array)
    for n in exchange.thread_packets:
        yield from emit_send_packet(exchange, n, packet_registers("d", n), to_owner=exchange.shots == 2)


def emit_send_packet(exchange: Exchange, n: int, pair: str, *, to_owner: bool) -> Iterator[str]:
    """Yield code that sends packet n, in two registers, to the row's owner or to all other devices.

    The addresses are loaded each time, because eight of them would occupy 16 registers.
    """
    yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 place, place, offset; add.s64 place, place, to;"
    if to_owner:
        yield "mul.wide.u32 at, owner, 8; add.s64 at, at, table; ld.global.b64 peer, [at + 8];"
        yield f"add.s64 peer, peer, place; {_emit_send(pair, f'is_packet{n}')}"
        return
    for peer in range(exchange.devices):
        yield f"ld.global.b64 peer, [table + {8 + 8 * peer}]; add.s64 peer, peer, place;"
        yield f"not.pred p, is_mine{peer}; and.pred p, p, is_packet{n}; {_emit_send(pair, 'p')}"


def _emit_send(pair: str, predicate: str) -> str:
    return f"@{predicate} st.relaxed.sys.global.v2.b32 [peer + {COUNTERS}], {pair};"


class Awaited(NamedTuple):
    """A packet that a thread waits for, and the registers that it uses.

    Attributes:
        packet: Index of the packet in the row.
        words: The two registers that it is loaded into.
        source: Register with an address in this device's memory, to which `source_offset` is added.
        source_offset: Bytes from `source` to the sender's buffer.
        own_words: Registers with the packet if this device is the sender; None if it never is.
        is_own: Predicate register that says whether this device is the sender.
    """

    packet: int
    words: tuple[str, str]
    source: str
    source_offset: int = 0
    own_words: tuple[str, str] | None = None
    is_own: str = ""


def packets_of_all(exchange: Exchange, group: range) -> list[Awaited]:
    """Return all devices' packets of a group, which are loaded into w; this device's packets are in d."""

    def pair(name: str, index: int) -> tuple[str, str]:
        return f"{name}{2 * index}", f"{name}{2 * index + 1}"

    return [
        Awaited(n, pair("w", i), "from", device * exchange.block_bytes, pair("d", n), f"is_mine{device}")
        for i, (n, device) in enumerate(itertools.product(group, range(exchange.devices)))
    ]


def packets_of_owner(group: range) -> list[Awaited]:
    """Return the owner's packets of a group, to be loaded into k, after `owner_address`."""
    return [Awaited(n, (f"k{2 * n}", f"k{2 * n + 1}"), "from_owner") for n in group]


def emit_owner_address(exchange: Exchange) -> Iterator[str]:
    """Yield code that sets register from_owner to the address of the owner's buffer."""
    yield f"mul.wide.u32 from_owner, owner, {exchange.block_bytes}; add.s64 from_owner, from_owner, from;"


def emit_wait_for_packets(packets: Sequence[Awaited], label: str) -> Iterator[str]:
    """Yield code that polls until all packets have arrived, then makes their memory empty again."""
    for packet in packets:
        first = packet.own_words or ("0", "0")
        yield from (f"mov.b32 {w}, {x};" for w, x in zip(packet.words, first, strict=True))
    yield "mov.b32 polls, 0;"
    yield f"{label}:"
    for packet in packets:
        words = f"{{{', '.join(packet.words)}}}"
        yield _emit_packet_access(
            packet, f"ld.relaxed.sys.global.v2.b32 {words}, [at + {packet.source_offset}];"
        )
    yield "mov.b32 pending, 0;"
    for packet in packets:
        for w in packet.words:
            yield f"setp.eq.u32 p, {w}, {EMPTY}; @p mov.b32 pending, 1;"
    yield f"add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MAX_POLLS}; @p trap;"
    yield f"setp.ne.u32 p, pending, 0; @p bra {label};"
    yield f"mov.b32 x, {EMPTY};"
    for packet in packets:
        yield _emit_packet_access(
            packet, f"st.relaxed.sys.global.v2.b32 [at + {packet.source_offset}], {{x, x}};"
        )


def _emit_packet_access(packet: Awaited, instruction: str) -> str:
    """Return code that runs `instruction` in the threads that have the packet, if another device sends it."""
    n, has_packet = packet.packet, f"is_packet{packet.packet}"
    at = f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 at, {packet.source}, place; add.s64 at, at, offset;"
    if packet.own_words is None:
        return f"{at} @{has_packet} {instruction}"
    return f"{at} not.pred p, {packet.is_own}; and.pred p, p, {has_packet}; @p {instruction}"


def emit_end_of_call(thread: str) -> str:
    """Return code that stores the call number; all threads must have read the previous one."""
    return f"setp.eq.u32 p, {thread}, 0; @p st.global.b32 [counter], call;"
