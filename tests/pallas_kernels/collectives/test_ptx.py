"""The PTX of all-reduce and all-gather, run by an emulator of several devices."""

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
    """Emulated devices with memory for each other, executed in turn."""

    def __init__(self, count, block_bytes, seed=0, shots=(1,)):
        """Set the number of shots of consecutive calls."""
        self.memory, self.count, self.block_bytes = Memory(), count, block_bytes
        self.shots = shots
        empty = np.full(memory_bytes(count, block_bytes) // 4, exchange.EMPTY, np.uint32)
        empty[: exchange.COUNTERS // 4] = 0
        self.peers = [self.memory.put(empty) for _ in range(count)]
        self.draw = random.Random(seed)

    def tables(self):
        addresses = np.array(self.peers, np.uint64).view(np.uint32)
        return [self.memory.put(np.array([d, 0, *addresses], np.uint32)) for d in range(self.count)]

    def program_of(self, device, tables, arrays, exchange, norm, dtype):
        """Return a device's thread blocks as a generator, as on a GPU with room for one at a time, and its
        results.
        """
        addresses = [self.memory.put(array) for array in arrays]
        shape, is_gathered = arrays[0].shape, dtype == F32
        shape = (self.count, *shape) if is_gathered else shape
        results = [self.memory.put(np.zeros(shape, dtype)) for _ in range(1 if norm is None else 2)]
        code = all_gather.program(exchange) if is_gathered else program(exchange, norm, dtype == BF16)
        operands = [tables[device], *addresses, *results, 0]

        def run():
            for block in range(exchange.blocks):
                yield from Block(code, self.memory, [*operands, block, np.arange(THREADS)], THREADS).run()

        return run(), results

    def sums(self, calls):
        """Run consecutive calls on each device and return the results of all devices per call.

        Args:
            calls: For each call its parts [devices, rows, width], the residual stream and weight or None, and
                the norm. Float32 parts are gathered.
        """
        tables, outputs, running = self.tables(), [], []
        for device in range(self.count):
            programs = []
            for (parts, norm_arguments, norm), shots in zip(calls, itertools.cycle(self.shots)):
                _, rows, width = parts.shape
                shots = 1 if parts.dtype == F32 else shots
                exchange = Exchange(rows, width * parts.itemsize // 2, self.count, self.block_bytes, shots)
                arrays = [parts[device], *norm_arguments]
                programs.append(
                    (*self.program_of(device, tables, arrays, exchange, norm, parts.dtype), parts)
                )
            outputs.append(programs)
            running.append((step for run, _, _ in programs for step in run))
        while running:
            turn = self.draw.choice(running)
            for _ in range(self.draw.choice((1, 40))):
                if next(turn, "ended") == "ended":
                    running.remove(turn)
                    break
        shape_of = lambda parts: parts.shape[parts.dtype != F32 :]
        get = lambda address, parts: self.memory.get(address, shape_of(parts), parts.dtype)
        return [
            [[get(address, parts) for address in results] for _, results, parts in call_results]
            for call_results in zip(*outputs, strict=True)
        ]


def drawn(rng, *shape, dtype):
    return rng.normal(size=shape).astype(dtype)


def check(devices, calls, seed=0, max_rows=130, shots=(1,)):
    """Check calls given as (rows, width, norm, dtype)."""
    rng = np.random.default_rng(seed)
    call_arguments = []
    for rows, width, norm, dtype in calls:
        norm_arguments = (
            () if norm is None else (drawn(rng, rows, width, dtype=dtype), drawn(rng, width, dtype=dtype))
        )
        call_arguments.append((drawn(rng, devices, rows, width, dtype=dtype), norm_arguments, norm))
    widest = max(width for _, width, _, _ in calls)
    actual_outputs = Devices(devices, block_bytes_of(max_rows, widest), seed, shots).sums(call_arguments)
    for (parts, norm_arguments, norm), device_results in zip(call_arguments, actual_outputs, strict=True):
        expected = [reference.all_reduce(parts)]
        if norm is not None:
            expected = reference.all_reduce_rms_norm(parts, *norm_arguments, **norm._asdict())
        unit = float(ml_dtypes.finfo(parts.dtype).eps)
        for results in device_results:
            for actual, first, expected_array in zip(results, device_results[0], expected, strict=True):
                np.testing.assert_array_equal(actual.view(np.uint16), first.view(np.uint16))
                np.testing.assert_allclose(
                    actual.astype(np.float64), expected_array, rtol=2 * unit, atol=unit / 8
                )


@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA], ids=["alone", "llama", "gemma"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_two_devices_sum(norm, dtype):
    check(2, [(1, 4096, norm, dtype), (3, 100, norm, dtype)])


def test_sums_with_more_rows_than_thread_blocks_and_more_packets_than_threads(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 3)
    check(2, [(7, 8, LLAMA, BF16), (1, 5000, LLAMA, BF16)])


def test_three_devices_add_in_one_order():
    check(3, [(2, 12, None, BF16), (2, 4100, GEMMA, BF16)])


@pytest.mark.parametrize("shots", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_consecutive_calls_of_different_sizes(seed, shots):
    rng = random.Random(seed)
    calls = [(rng.choice((1, 2, 5)), rng.choice((4, 36)), None, BF16) for _ in range(12)]
    check(2 if shots == (1,) else 3, calls, seed, shots=shots)


@pytest.mark.parametrize("norm", [None, LLAMA, GEMMA], ids=["alone", "llama", "gemma"])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_sums_in_two_shots(devices, norm):
    """Each device reduces the rows of some thread blocks, and some devices have none."""
    dtype = F16 if devices == 3 else BF16
    check(devices, [(5, 100, norm, dtype), (1, 8, norm, dtype)], shots=(2,))


def test_sums_in_two_shots_with_more_rows_than_thread_blocks_and_more_packets_than_threads(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 3)
    check(2, [(7, 8, LLAMA, BF16), (1, 5000, LLAMA, BF16)], shots=(2,))
    check(4, [(14, 12, None, BF16)], shots=(2,))


@pytest.mark.parametrize("shots", [(1,), (2,)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_negative_zeros_are_sent(dtype, shots):
    """Unwritten memory holds the bits of negative zeros, so a receiver would wait for them forever."""
    zeros = np.full((2, 2, 64), -0.0, dtype)
    zeros[0, 0, ::2] = 1
    calls = [(zeros, (), None)] * 3
    for (first_device,), (second_device,) in Devices(2, block_bytes_of(2, 64), shots=shots).sums(calls):
        np.testing.assert_array_equal(first_device.view(np.uint16), second_device.view(np.uint16))
        np.testing.assert_array_equal(first_device.astype(np.float64), zeros.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize("devices", [2, 3])
def test_gathers_and_sums_alternate(devices, monkeypatch):
    """Gathers are bit-identical, including -inf and -0.0, except that the reserved word becomes 0."""
    monkeypatch.setattr(exchange, "MAX_BLOCKS", 4)
    rng, call_arguments = np.random.default_rng(0), []
    many = 9 if devices == 2 else 2  # more than there are thread blocks
    for rows, width, dtype in ((many, 6, F32), (1, 4, BF16), (1, 2050, F32), (3, 8, F32), (5, 36, F16)):
        parts = drawn(rng, devices, rows, width, dtype=dtype)
        parts[:, 0, 0] = -np.inf if dtype == F32 else 0
        if dtype == F32:
            parts[0, -1, 1], parts[1, -1, 1] = -0.0, np.uint32(exchange.EMPTY).view(F32)
        call_arguments.append((parts, (), None))
    for (parts, _, _), device_results in zip(
        call_arguments, Devices(devices, block_bytes_of(130, 4100)).sums(call_arguments), strict=True
    ):
        for (actual,) in device_results:
            if parts.dtype == F32:
                expected = parts.copy().view(np.uint32)
                expected[expected == exchange.EMPTY] = 0
                np.testing.assert_array_equal(actual.view(np.uint32), expected)
            else:
                expected = reference.all_reduce(parts)
                np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("shots", [(1,), (2, 1)])
def test_sums_with_a_single_buffer_are_wrong(shots, monkeypatch):
    """This shows that the other tests would detect the race."""
    emit_addresses = exchange.emit_buffer_addresses
    first_device = lambda *args: (
        line.replace("and.b32 piece, call, 1;", "mov.b32 piece, 0;") for line in emit_addresses(*args)
    )
    monkeypatch.setattr("pallas_kernels.collectives.ptx.all_reduce.emit_buffer_addresses", first_device)
    monkeypatch.setattr(exchange, "MAX_POLLS", 2000)
    with pytest.raises((AssertionError, Trap)):
        check(2, [(1, 4, None, BF16)] * 40, shots=shots)


@pytest.mark.parametrize(("shots", "device"), [(1, 0), (2, 0), (2, 1)])
def test_missing_device_traps_the_others(shots, device, monkeypatch):
    """With two shots both the reducing device and a receiver wait for it."""
    monkeypatch.setattr(exchange, "MAX_POLLS", 50)
    devices, layout = Devices(2, block_bytes_of(1, 8)), Exchange(1, 8, 2, block_bytes_of(1, 8), shots)
    run, _ = devices.program_of(device, devices.tables(), [np.ones((1, 8), BF16)], layout, None, BF16)
    with pytest.raises(Trap):
        list(run)
