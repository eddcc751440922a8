"""Words that devices write into each other's memory: where they are, how they are sent and waited for.

Memory that nobody has written to holds a word that is never sent, two zeros with a minus: who reads another
one has what was sent, and nothing else has to be waited for. Who has read it puts that word there again.
Thread block b of a device deals with thread block b of the others, and has memory of its own there, twice:

device 0, block b, call n                             device 1, block b, call n
----------------------------------------------------  -------------------------
its rows ---> memory n % 2 of device 1
                                                      its rows ---> memory n % 2 of device 0
read its own memory n % 2 until all of it was sent
make it empty again, use what came
next call: n + 1

Call n + 1 writes while a device may still read what call n brought, so to other memory. Call n + 2 writes
where call n did: by then all devices have ended call n, for they began call n + 1, whose rows are there.

In two shots a row has an owner among the devices. All send their row to it alone; it adds, and sends the sum
to all others: of each row 2 (n - 1) are sent in all, not n (n - 1), for one wait more. A row's words come to
its owner from all others, and to these from the owner, so no place is written to twice in a call. And every
device's sum of a row has words of all devices in it, so who has ended call n + 1 knows what is said above.

The idea of a word that is never sent is that of TensorRT-LLM's one-shot all-reduce, after Lamport; NCCL's
low-latency words have a number beside each four bytes, and so twice the bytes to send.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.ptx.launch import THREADS

MAX_BLOCKS = 128
COUNTERS = 4 * MAX_BLOCKS  # bytes at the beginning of a device's memory: each thread block's last call
PACKET = 8  # bytes of memory that a thread writes at once: two words, 4 numbers of the array
EMPTY = 0x80008000  # a word that is never sent: two zeros with a minus, in bfloat16 and in float16
# Of a thread, about 80 s, for another process may still compile; then that has ended, and so does this one.
MAX_POLLS = 1 << 27
AT_ONCE = 8  # packets that a thread waits for together: registers


class Exchange(NamedTuple):
    """What is static about rows of 16-bit numbers, or of halves of 32-bit ones, that devices send each other.

    Attributes:
        rows: Of the array.
        width: Of a row; a multiple of 4.
        devices: That send; each to all others.
        block_bytes: Of a thread block's memory for what one device writes in a call.
        shots: 1, or 2 where rows have owners.
    """

    rows: int
    width: int
    devices: int
    block_bytes: int
    shots: int = 1

    @property
    def blocks(self) -> int:
        """Thread blocks; each has every so many-th row."""
        return max(min(self.rows, MAX_BLOCKS), 1)

    @property
    def is_one_row(self) -> bool:
        """Whether no thread block has more: it is loaded before anything else."""
        return self.rows <= self.blocks

    @property
    def packets(self) -> int:
        """Of a row."""
        return self.width // 4

    @property
    def bytes_needed(self) -> int:
        """What block_bytes must be at least."""
        return -(-self.rows // self.blocks) * self.packets * PACKET

    @property
    def each(self) -> range:
        """Packets of a row that a thread has, at most."""
        return range(-(-self.packets // THREADS))

    def groups(self, senders: int) -> Iterator[range]:
        """The same, a few at a time: those of so many devices that a thread waits for together."""
        at_once = max(AT_ONCE // senders, 1)
        for first in range(0, len(self.each), at_once):
            yield self.each[first : first + at_once]


def memory_bytes(devices: int, block_bytes: int) -> int:
    """Of a device's memory that the others write to."""
    return COUNTERS + MAX_BLOCKS * 2 * devices * block_bytes


def block_bytes_of(rows: int, width: int) -> int:
    """Exchange.block_bytes that calls of up to so many rows need."""
    return -(-rows // MAX_BLOCKS) * width // 4 * PACKET


def registers(of: Exchange) -> Iterator[str]:
    """Of these functions; d are the thread's packets of the row, in pairs."""
    yield ".reg .b64 at, to, peer, my, counter, offset, place, table, from, from_owner;"
    yield ".reg .b32 device, call, piece, row, owner, x, y, z, polls, pending;"
    yield f".reg .b32 w<{2 * max(AT_ONCE, of.devices)}>;"
    yield f".reg .b32 j<{len(of.each)}>, d<{2 * len(of.each)}>;"
    yield f".reg .pred p, is_mine<{of.devices}>, is_packet<{len(of.each)}>;"


def packets(of: Exchange, block: str, thread: str, arrays: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Which packets of a row a thread has; and where its block has one row, these of some arrays.

    Loaded before the call's number and places are known, which are three loads one behind the other.

    Args:
        of: The exchange.
        block: Number of the thread block.
        thread: Number of the thread.
        arrays: Addresses, and the registers that a row comes into.
    """
    for n in of.each:
        yield f"add.u32 j{n}, {thread}, {n * THREADS}; setp.lt.u32 is_packet{n}, j{n}, {of.packets};"
        yield f"mov.b32 d{2 * n}, 0; mov.b32 d{2 * n + 1}, 0;"
    if of.is_one_row:
        yield f"mov.b32 row, {block};"
        yield from (loaded(of, array, pair_of(name, n), n) for array, name in arrays for n in of.each)


def places(of: Exchange, table: str, block: str) -> Iterator[str]:
    """Where the call's words of each device are, here and there.

    Args:
        of: The exchange.
        table: Address of this device's number, 0, and the addresses of all devices' memory.
        block: Number of the thread block.
    """
    yield f"ld.global.b32 device, [{table}];"
    yield f"mul.wide.u32 place, device, 8; add.s64 place, place, {table}; ld.global.b64 my, [place + 8];"
    yield f"mul.wide.u32 counter, {block}, 4; add.s64 counter, counter, my;"
    yield "ld.global.b32 call, [counter]; add.u32 call, call, 1; and.b32 piece, call, 1;"
    # By thread block, piece (calls use two by turns) and the device that writes.
    yield f"mad.lo.u32 x, {block}, 2, piece; mul.lo.u32 x, x, {of.devices};"
    yield f"mul.wide.u32 from, x, {of.block_bytes}; add.s64 from, from, my; add.s64 from, from, {COUNTERS};"
    yield f"add.u32 y, x, device; mul.wide.u32 to, y, {of.block_bytes}; mov.b64 table, {table};"
    for n in range(of.devices):
        yield f"setp.eq.u32 is_mine{n}, device, {n};"


def each_row(
    of: Exchange, block: str, label: str, body: Sequence[str], *, whose: str = "all"
) -> Iterator[str]:
    """Code for each of the thread block's rows: the registers row, and offset into the call's memory.

    Args:
        of: The exchange; in two shots there is owner, too, another one for each of the rows.
        block: Number of the thread block.
        label: Of this code alone.
        body: The code.
        whose: "own": only rows that this device owns; "others'": only those that it does not.
    """
    yield f"mov.b32 row, {block}; mov.b64 offset, 0;"
    if of.shots == 2:
        yield f"rem.u32 owner, {block}, {of.devices};"
    yield f"{label}:"
    if whose != "all":
        yield f"setp.{'ne' if whose == 'own' else 'eq'}.u32 p, owner, device; @p bra {label}_NEXT;"
    yield from body
    if whose != "all":
        yield f"{label}_NEXT:"
    if of.is_one_row:
        return
    yield f"add.s64 offset, offset, {of.packets * PACKET}; add.u32 row, row, {of.blocks};"
    if of.shots == 2:
        yield f"add.u32 owner, owner, 1; setp.eq.u32 p, owner, {of.devices}; @p mov.b32 owner, 0;"
    yield f"setp.lt.u32 p, row, {of.rows}; @p bra {label};"


def pair_of(name: str, n: int) -> str:
    """The two registers of packet n."""
    return f"{{{name}{2 * n}, {name}{2 * n + 1}}}"


def loaded(of: Exchange, array: str, pair: str, n: int) -> str:
    """The row's packet n of an array [rows, width], in two registers."""
    return f"{_in_row(of, array, n)} @is_packet{n} ld.global.v2.b32 {pair}, [at];"


def stored(of: Exchange, array: str, pair: str, n: int) -> str:
    """The inverse."""
    return f"{_in_row(of, array, n)} @is_packet{n} st.global.v2.b32 [at], {pair};"


def _in_row(of: Exchange, array: str, n: int) -> str:
    return (
        f"mul.wide.u32 at, row, {2 * of.width}; add.s64 at, at, {array}; "
        f"mul.wide.u32 place, j{n}, 8; add.s64 at, at, place;"
    )


def own(of: Exchange, array: str) -> Iterator[str]:
    """The row's packets of an array, in d; an empty word as two zeros, so that all devices have the same."""
    yield from again(of, array, "d")
    yield from (filled(f"d{2 * n + half}") for n in of.each for half in (0, 1))


def again(of: Exchange, array: str, name: str) -> Iterator[str]:
    """The row's packets of an array, if they have not been loaded as the only ones."""
    if not of.is_one_row:
        yield from (loaded(of, array, pair_of(name, n), n) for n in of.each)


def filled(name: str) -> str:
    """A register whose word is to be sent: the empty one as two zeros."""
    return f"setp.eq.u32 p, {name}, {EMPTY}; @p mov.b32 {name}, 0;"


def sent(of: Exchange, array: str) -> Iterator[str]:
    """The row of an array to all other devices; in two shots to its owner, which is another."""
    yield from own(of, array)
    for n in of.each:
        yield from packet_sent(of, n, pair_of("d", n), to_owner=of.shots == 2)


def packet_sent(of: Exchange, n: int, pair: str, *, to_owner: bool) -> Iterator[str]:
    """Packet n of the row, in two registers, to the row's owner or to all other devices.

    Their addresses are read each time, for eight of them take 16 registers.
    """
    yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 place, place, offset; add.s64 place, place, to;"
    if to_owner:
        yield "mul.wide.u32 at, owner, 8; add.s64 at, at, table; ld.global.b64 peer, [at + 8];"
        yield f"add.s64 peer, peer, place; {_sent(pair, f'is_packet{n}')}"
        return
    for other in range(of.devices):
        yield f"ld.global.b64 peer, [table + {8 + 8 * other}]; add.s64 peer, peer, place;"
        yield f"not.pred p, is_mine{other}; and.pred p, p, is_packet{n}; {_sent(pair, 'p')}"


def _sent(pair: str, predicate: str) -> str:
    return f"@{predicate} st.relaxed.sys.global.v2.b32 [peer + {COUNTERS}], {pair};"


class Awaited(NamedTuple):
    """A packet that a device sends.

    Attributes:
        packet: Of the row.
        words: The registers that it comes into.
        source: The register with the address of the device's memory here, but for `behind`.
        behind: Bytes.
        unless: Registers with what takes its place on the device that would send it to itself; None where
            this device is another.
        is_own: The predicate of being the one that sends.
    """

    packet: int
    words: tuple[str, str]
    source: str
    behind: int = 0
    unless: tuple[str, str] | None = None
    is_own: str = ""


def of_all(of: Exchange, group: range) -> list[Awaited]:
    """All devices' packets of a group, in w; this device's own are those in d."""
    pair = lambda name, at: (f"{name}{2 * at}", f"{name}{2 * at + 1}")
    return [
        Awaited(n, pair("w", nth), "from", device * of.block_bytes, pair("d", n), f"is_mine{device}")
        for nth, (n, device) in enumerate(itertools.product(group, range(of.devices)))
    ]


def of_owner(group: range) -> list[Awaited]:
    """The owner's packets of a group, in k; from_owner is behind owners_place."""
    return [Awaited(n, (f"k{2 * n}", f"k{2 * n + 1}"), "from_owner") for n in group]


def owners_place(of: Exchange) -> Iterator[str]:
    """The register from_owner."""
    yield f"mul.wide.u32 from_owner, owner, {of.block_bytes}; add.s64 from_owner, from_owner, from;"


def waited_for(packets: Sequence[Awaited], label: str) -> Iterator[str]:
    """Packets of the row; whoever has read one empties its memory."""
    for packet in packets:
        first = packet.unless or ("0", "0")
        yield from (f"mov.b32 {w}, {x};" for w, x in zip(packet.words, first, strict=True))
    yield "mov.b32 polls, 0;"
    yield f"{label}:"
    for packet in packets:
        words = f"{{{', '.join(packet.words)}}}"
        yield _asked(packet, f"ld.relaxed.sys.global.v2.b32 {words}, [at + {packet.behind}];")
    yield "mov.b32 pending, 0;"
    for packet in packets:
        for w in packet.words:
            yield f"setp.eq.u32 p, {w}, {EMPTY}; @p mov.b32 pending, 1;"
    yield f"add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MAX_POLLS}; @p trap;"
    yield f"setp.ne.u32 p, pending, 0; @p bra {label};"
    yield f"mov.b32 x, {EMPTY};"
    for packet in packets:
        yield _asked(packet, f"st.relaxed.sys.global.v2.b32 [at + {packet.behind}], {{x, x}};")


def _asked(packet: Awaited, access: str) -> str:
    """A load or a store of a packet in this device's memory, by threads that have it, if another sends it."""
    n, is_asked = packet.packet, f"is_packet{packet.packet}"
    at = f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 at, {packet.source}, place; add.s64 at, at, offset;"
    if packet.unless is None:
        return f"{at} @{is_asked} {access}"
    return f"{at} not.pred p, {packet.is_own}; and.pred p, p, {is_asked}; @p {access}"


def call_ends(thread: str) -> str:
    """The next call is another; all threads must have read this one's number."""
    return f"setp.eq.u32 p, {thread}, 0; @p st.global.b32 [counter], call;"
