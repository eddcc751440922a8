"""The PTX of the all-reduce and the all-gather, run by an emulator of several devices."""

import itertools
import random

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.collectives import reference
from pallas_kernels.collectives.ptx import all_gather, exchange
from pallas_kernels.collectives.ptx.all_reduce import Norm, program
from pallas_kernels.collectives.ptx.exchange import Exchange, block_bytes_of, memory_bytes
from pallas_kernels.ptx.launch import THREADS
from tests.pallas_kernels.collectives.ptx_emulator import Block, Memory, Trap

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
LLAMA, GEMMA = Norm(1e-5), Norm(1e-6, is_offset=True, rounds_once=True)


class Devices:
    """Devices with memory for each other, and whose turn it is."""

    def __init__(self, count, block_bytes, seed=0, shots=(1,)):
        """With the shots of the sums of calls, by turns."""
        self.memory, self.count, self.block_bytes = Memory(), count, block_bytes
        self.shots = shots
        empty = np.full(memory_bytes(count, block_bytes) // 4, exchange.EMPTY, np.uint32)
        empty[: exchange.COUNTERS // 4] = 0
        self.peers = [self.memory.put(empty) for _ in range(count)]
        self.draw = random.Random(seed)

    def tables(self):
        addresses = np.array(self.peers, np.uint64).view(np.uint32)
        return [self.memory.put(np.array([d, 0, *addresses], np.uint32)) for d in range(self.count)]

    def program_of(self, device, tables, arrays, of, norm, dtype):
        """The thread blocks of a device, one by one as on a GPU that has room for one; its results."""
        places = [self.memory.put(array) for array in arrays]
        shape, is_gathered = arrays[0].shape, dtype == F32
        shape = (self.count, *shape) if is_gathered else shape
        results = [self.memory.put(np.zeros(shape, dtype)) for _ in range(1 if norm is None else 2)]
        code = all_gather.program(of) if is_gathered else program(of, norm, dtype == BF16)
        operands = [tables[device], *places, *results, 0]

        def run():
            for block in range(of.blocks):
                yield from Block(code, self.memory, [*operands, block, np.arange(THREADS)], THREADS).run()

        return run(), results

    def sums(self, calls):
        """Runs calls one behind the other on each device; of each call the results of all devices.

        Args:
            calls: Of each its parts [devices, rows, width], the stream and the weight or none, and the norm.
                What is f32 is gathered.
        """
        tables, found, running = self.tables(), [], []
        for device in range(self.count):
            mine = []
            for (parts, others, norm), shots in zip(calls, itertools.cycle(self.shots)):
                _, rows, width = parts.shape
                shots = 1 if parts.dtype == F32 else shots
                of = Exchange(rows, width * parts.itemsize // 2, self.count, self.block_bytes, shots)
                arrays = [parts[device], *others]
                mine.append((*self.program_of(device, tables, arrays, of, norm, parts.dtype), parts))
            found.append(mine)
            running.append((step for run, _, _ in mine for step in run))
        while running:
            turn = self.draw.choice(running)
            for _ in range(self.draw.choice((1, 40))):
                if next(turn, "ended") == "ended":
                    running.remove(turn)
                    break
        shape_of = lambda parts: parts.shape[parts.dtype != F32 :]
        get = lambda at, parts: self.memory.get(at, shape_of(parts), parts.dtype)
        return [
            [[get(at, parts) for at in results] for _, results, parts in of_call]
            for of_call in zip(*found, strict=True)
        ]


def drawn(rng, *shape, dtype):
    return rng.normal(size=shape).astype(dtype)


def check(devices, calls, seed=0, max_rows=130, shots=(1,)):
    """Calls of (rows, width, norm, dtype)."""
    rng = np.random.default_rng(seed)
    made = []
    for rows, width, norm, dtype in calls:
        others = (
            () if norm is None else (drawn(rng, rows, width, dtype=dtype), drawn(rng, width, dtype=dtype))
        )
        made.append((drawn(rng, devices, rows, width, dtype=dtype), others, norm))
    widest = max(width for _, width, _, _ in calls)
    found = Devices(devices, block_bytes_of(max_rows, widest), seed, shots).sums(made)
    for (parts, others, norm), of_devices in zip(made, found, strict=True):
        expected = [reference.all_reduce(parts)]
        if norm is not None:
            expected = reference.all_reduce_rms_norm(parts, *others, **norm._asdict())
        unit = float(ml_dtypes.finfo(parts.dtype).eps)
        for results in of_devices:
            for actual, first, wanted in zip(results, of_devices[0], expected, strict=True):
                np.testing.assert_array_equal(actual.view(np.uint16), first.view(np.uint16))
                np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=2 * unit, atol=unit / 8)


@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA], ids=["alone", "llama", "gemma"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_sums_of_two_devices(norm, dtype):
    check(2, [(1, 4096, norm, dtype), (3, 100, norm, dtype)])


def test_more_rows_than_thread_blocks_and_more_packets_than_threads(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 3)
    check(2, [(7, 8, LLAMA, BF16), (1, 5000, LLAMA, BF16)])


def test_three_devices_add_in_one_order():
    check(3, [(2, 12, None, BF16), (2, 4100, GEMMA, BF16)])


@pytest.mark.parametrize("shots", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_calls_of_many_sizes_one_behind_the_other(seed, shots):
    rng = random.Random(seed)
    calls = [(rng.choice((1, 2, 5)), rng.choice((4, 36)), None, BF16) for _ in range(12)]
    check(2 if shots == (1,) else 3, calls, seed, shots=shots)


@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA], ids=["alone", "llama", "gemma"])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_in_two_shots(devices, norm):
    """Each device owns rows of a thread block, and some have none."""
    dtype = F16 if devices == 3 else BF16
    check(devices, [(5, 100, norm, dtype), (1, 8, norm, dtype)], shots=(2,))


def test_in_two_shots_with_more_rows_than_thread_blocks_and_more_packets_than_threads(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 3)
    check(2, [(7, 8, LLAMA, BF16), (1, 5000, LLAMA, BF16)], shots=(2,))
    check(4, [(14, 12, None, BF16)], shots=(2,))


@pytest.mark.parametrize("shots", [(1,), (2,)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_zeros_with_a_minus_are_sent_too(dtype, shots):
    """The word that memory holds which nobody has written to: waited for, it would never come."""
    zeros = np.full((2, 2, 64), -0.0, dtype)
    zeros[0, 0, ::2] = 1
    calls = [(zeros, (), None)] * 3
    for (of_one,), (of_other,) in Devices(2, block_bytes_of(2, 64), shots=shots).sums(calls):
        np.testing.assert_array_equal(of_one.view(np.uint16), of_other.view(np.uint16))
        np.testing.assert_array_equal(of_one.astype(np.float64), zeros.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize("devices", [2, 3])
def test_gathers_and_sums_by_turns(devices, monkeypatch):
    """To the bit, -inf and a zero with a minus, too; whose bits are the word never sent becomes 0."""
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 4)
    rng, made = np.random.default_rng(0), []
    many = 9 if devices == 2 else 2  # more than there are thread blocks
    for rows, width, dtype in ((many, 6, F32), (1, 4, BF16), (1, 2050, F32), (3, 8, F32), (5, 36, F16)):
        parts = drawn(rng, devices, rows, width, dtype=dtype)
        parts[:, 0, 0] = -np.inf if dtype == F32 else 0
        if dtype == F32:
            parts[0, -1, 1], parts[1, -1, 1] = -0.0, np.uint32(exchange.EMPTY).view(F32)
        made.append((parts, (), None))
    for (parts, _, _), of_devices in zip(
        made, Devices(devices, block_bytes_of(130, 4100)).sums(made), strict=True
    ):
        for (actual,) in of_devices:
            if parts.dtype == F32:
                expected = parts.copy().view(np.uint32)
                expected[expected == exchange.EMPTY] = 0
                np.testing.assert_array_equal(actual.view(np.uint32), expected)
            else:
                expected = reference.all_reduce(parts)
                np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("shots", [(1,), (2, 1)])
def test_with_one_piece_of_memory_sums_go_wrong(shots, monkeypatch):
    """So the tests above would see it."""
    emit_addresses = exchange.emit_buffer_addresses
    of_one = lambda *args: (
        line.replace("and.b32 piece, call, 1;", "mov.b32 piece, 0;") for line in emit_addresses(*args)
    )
    monkeypatch.setattr("pallas_kernels.collectives.ptx.all_reduce.emit_buffer_addresses", of_one)
    monkeypatch.setattr(exchange, "MAX_POLLS", 2000)
    with pytest.raises((AssertionError, Trap)):
        check(2, [(1, 4, None, BF16)] * 40, shots=shots)


@pytest.mark.parametrize(("shots", "device"), [(1, 0), (2, 0), (2, 1)])
def test_a_device_that_never_comes_ends_the_other(shots, device, monkeypatch):
    """In two shots an owner, and one that waits for it."""
    monkeypatch.setattr(exchange, "MAX_POLLS", 50)
    devices, of = Devices(2, block_bytes_of(1, 8)), Exchange(1, 8, 2, block_bytes_of(1, 8), shots)
    run, _ = devices.program_of(device, devices.tables(), [np.ones((1, 8), BF16)], of, None, BF16)
    with pytest.raises(Trap):
        list(run)
