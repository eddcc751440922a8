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

The idea of a word that is never sent is that of TensorRT-LLM's one-shot all-reduce, after Lamport; NCCL's
low-latency words have a number beside each four bytes, and so twice the bytes to send.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.ptx.programs import THREADS

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
    """

    rows: int
    width: int
    devices: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """Thread blocks; each has every so many-th row."""
        return max(min(self.rows, MAX_BLOCKS), 1)

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

    @property
    def groups(self) -> Iterator[range]:
        """The same, a few at a time: those that a thread waits for together."""
        at_once = max(AT_ONCE // self.devices, 1)
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
    yield ".reg .b64 at, to, my, counter, offset, place;"
    yield f".reg .b64 from<{of.devices}>, peer<{of.devices}>;"
    yield ".reg .b32 device, call, piece, row, x, y, z, polls, pending;"
    yield f".reg .b32 w<{2 * max(AT_ONCE, of.devices)}>;"
    yield f".reg .b32 j<{len(of.each)}>, d<{2 * len(of.each)}>;"
    yield f".reg .pred p, is_asked, is_mine<{of.devices}>, is_packet<{len(of.each)}>;"


def places(of: Exchange, table: str, block: str, thread: str) -> Iterator[str]:
    """Where the call's words of each device are, here and there; which packets of a row a thread has.

    Args:
        of: The exchange.
        table: Address of this device's number, 0, and the addresses of all devices' memory.
        block: Number of the thread block.
        thread: Number of the thread.
    """
    yield f"ld.global.b32 device, [{table}];"
    yield f"mul.wide.u32 place, device, 8; add.s64 place, place, {table}; ld.global.b64 my, [place + 8];"
    yield f"mul.wide.u32 counter, {block}, 4; add.s64 counter, counter, my;"
    yield "ld.global.b32 call, [counter]; add.u32 call, call, 1; and.b32 piece, call, 1;"
    # By thread block, piece (calls use two by turns) and the device that writes.
    yield f"mad.lo.u32 x, {block}, 2, piece; mul.lo.u32 x, x, {of.devices};"
    yield f"add.u32 y, x, device; mul.wide.u32 to, y, {of.block_bytes};"
    for n in range(of.devices):
        yield f"setp.eq.u32 is_mine{n}, device, {n};"
        yield f"add.u32 y, x, {n}; mul.wide.u32 place, y, {of.block_bytes};"
        yield f"add.s64 from{n}, my, place; add.s64 from{n}, from{n}, {COUNTERS};"
        yield f"ld.global.b64 peer{n}, [{table} + {8 + 8 * n}];"
        yield f"add.s64 peer{n}, peer{n}, to; add.s64 peer{n}, peer{n}, {COUNTERS};"
    for n in of.each:
        yield f"add.u32 j{n}, {thread}, {n * THREADS}; setp.lt.u32 is_packet{n}, j{n}, {of.packets};"
        yield f"mov.b32 d{2 * n}, 0; mov.b32 d{2 * n + 1}, 0;"


def each_row(of: Exchange, block: str, label: str, body: Sequence[str]) -> Iterator[str]:
    """Code for each of the thread block's rows: the registers row, and offset into the call's memory."""
    yield f"mov.b32 row, {block}; mov.b64 offset, 0;"
    yield f"{label}:"
    yield from body
    yield f"add.s64 offset, offset, {of.packets * PACKET}; add.u32 row, row, {of.blocks};"
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
    yield from (loaded(of, array, pair_of("d", n), n) for n in of.each)
    for d in (f"d{2 * n + half}" for n in of.each for half in (0, 1)):
        yield f"setp.eq.u32 p, {d}, {EMPTY}; @p mov.b32 {d}, 0;"


def sent(of: Exchange, array: str) -> Iterator[str]:
    """The row of an array to all other devices."""
    yield from own(of, array)
    for n in of.each:
        yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 place, place, offset;"
        for other in range(of.devices):
            yield f"not.pred p, is_mine{other}; and.pred p, p, is_packet{n}; add.s64 to, peer{other}, place;"
            yield f"@p st.relaxed.sys.global.v2.b32 [to], {pair_of('d', n)};"


def word(of: Exchange, group: range, n: int, device: int, half: int) -> str:
    """The register with a device's word of packet n, where those of a group have been waited for."""
    return f"w{2 * ((n - group.start) * of.devices + device) + half}"


def waited_for(of: Exchange, group: range) -> Iterator[str]:
    """All devices' words of the row's packets of a group; this device's own are those in d."""
    words = lambda n, device: [word(of, group, n, device, half) for half in (0, 1)]
    packets = [(n, device) for n in group for device in range(of.devices)]
    for n, device in packets:
        yield from (f"mov.b32 {w}, d{2 * n + half};" for half, w in enumerate(words(n, device)))
    yield "mov.b32 polls, 0;"
    yield f"WAIT{group.start}:"
    for n, device in packets:
        yield from _asked(of, n, device)
        yield f"@is_asked ld.relaxed.sys.global.v2.b32 {{{', '.join(words(n, device))}}}, [at];"
    yield "mov.b32 pending, 0;"
    for n, device in packets:
        for w in words(n, device):
            yield f"setp.eq.u32 p, {w}, {EMPTY}; @p mov.b32 pending, 1;"
    yield f"add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MAX_POLLS}; @p trap;"
    yield f"setp.ne.u32 p, pending, 0; @p bra WAIT{group.start};"
    yield f"mov.b32 x, {EMPTY};"
    for n, device in packets:
        yield from _asked(of, n, device)
        yield "@is_asked st.relaxed.sys.global.v2.b32 [at], {x, x};"


def _asked(of: Exchange, n: int, device: int) -> Iterator[str]:
    """The address of a device's packet n in this device's memory, and whether this thread looks there."""
    yield f"mul.wide.u32 place, j{n}, {PACKET}; add.s64 at, from{device}, place; add.s64 at, at, offset;"
    yield f"not.pred is_asked, is_mine{device}; and.pred is_asked, is_asked, is_packet{n};"


def call_ends(thread: str) -> str:
    """The next call is another; all threads must have read this one's number."""
    return f"setp.eq.u32 p, {thread}, 0; @p st.global.b32 [counter], call;"
