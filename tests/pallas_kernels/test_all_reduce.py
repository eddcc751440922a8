"""all_reduce: the definition's sums on several devices, memory that nobody overwrites early, errors."""

import functools
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import support
from pallas_kernels.all_reduce import PeerMemory, all_reduce, all_reduce_rms_norm, make_peer_memory
from pallas_kernels.ptx import peer_words
from pallas_kernels.ptx.peer_words import Exchange, block_bytes_of
from tests import aot
from tests.pallas_kernels import all_reduce_aot_cases

ROOT = pathlib.Path(__file__).parents[2]


def run_on(where):
    command = [sys.executable, "-m", "tests.pallas_kernels.sums_on_devices", where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_sums_are_the_definition_s_and_the_same_on_all_devices():
    out = run_on("cpu")
    assert "{'tp': 2, 'cp': 2}, 68 wide: right" in out
    assert "{'tp': 4, 'cp': 1}, 68 wide: right" in out


@pytest.mark.gpu
def test_gpus_that_write_into_each_other_s_memory_sum():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    assert "4096 wide: right" in run_on("gpu")


def test_every_shape_compiles_without_spills():
    aot.require_plugin()
    reports = aot.compile_all(all_reduce_aot_cases.__name__, list(all_reduce_aot_cases.SHAPES))
    for name, kernels in reports.items():
        assert [(kernel.name, kernel.spilled_bytes) for kernel in kernels] == [
            ("all_reduce_mosaic_gpu_kernel", 0)
        ], name


# ------------------------------------------------------------------------- who may write when
class Device:
    """One thread block of one device: what it sends, and what it has read, call by call."""

    def __init__(self, number, memories, slots):
        self.number, self.memories, self.slots = number, memories, slots
        self.read = []

    def run(self, calls):
        """Yields wherever another device may come first."""
        count = len(self.memories)
        for call in range(1, calls + 1):
            slot = call % self.slots
            for other in range(count):
                for packet in range(3):
                    yield
                    self.memories[other][slot, self.number, packet] = (call, (call, self.number, packet))
            got = []
            for sender in range(count):
                for packet in range(3):
                    while self.memories[self.number].get((slot, sender, packet), (0, None))[0] != call:
                        yield
                    got.append(self.memories[self.number][slot, sender, packet][1])
                    yield
            self.read.append(got)


def read_by_turns(devices, slots, calls, seed):
    """What each device reads where it is random who goes on; None where they wait for each other for ever."""
    memories = [{} for _ in range(devices)]
    blocks = [Device(number, memories, slots) for number in range(devices)]
    running = [block.run(calls) for block in blocks]
    draw = random.Random(seed)
    for _ in range(20_000):
        if not running:
            return [block.read for block in blocks]
        turn = draw.choices(running, weights=[draw.choice((1, 50)) for _ in running])[0]
        if next(turn, "ended") == "ended":
            running.remove(turn)
    return None


@pytest.mark.parametrize("devices", [2, 3])
def test_two_slots_lose_nothing_whoever_is_first(devices):
    calls = 6
    every = [
        [(call, s, packet) for s in range(devices) for packet in range(3)] for call in range(1, calls + 1)
    ]
    for seed in range(150):
        assert read_by_turns(devices, 2, calls, seed) == [every] * devices


def test_one_slot_would_lose_words():
    assert any(read_by_turns(2, 1, 6, seed) is None for seed in range(150))


def test_the_program_takes_the_slots_of_that_model():
    """Of the memory of thread block 1 on device 1: by slot, by the device that writes."""
    of = Exchange(rows=2, width=4096, devices=2, block_bytes=block_bytes_of(2, 4096))
    code = " ".join(peer_words.places(of, "$0", "$1", "$2"))
    assert "and.b32 slot, call, 1;" in code
    assert "mad.lo.u32 x, $1, 2, slot; mul.lo.u32 x, x, 2;" in code
    assert of.bytes_needed == of.block_bytes == 16384


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 256, 300])
def test_a_thread_block_s_rows_fit_its_memory(rows):
    of = Exchange(rows, 64, 2, block_bytes_of(300, 64))
    assert of.bytes_needed <= of.block_bytes
    per_block = [len(range(block, rows, of.blocks)) for block in range(of.blocks)]
    assert max(per_block) * of.packets * peer_words.PACKET == of.bytes_needed


# --------------------------------------------------------------------------------- addresses, errors
def one_device(axes=("tp",)):
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)


def test_a_table_has_the_addresses_of_the_memory():
    peers = make_peer_memory(one_device(("tp", "cp")), "tp", max_rows=3, width=8)
    number, _, *halves = np.asarray(peers.table).ravel()
    (address,) = np.array(halves, np.int32).view(np.uint64)
    assert (number, int(address)) == (0, peers.memory.addressable_shards[0].data.unsafe_buffer_pointer())
    assert peers.devices == 1
    assert peers.block_bytes == block_bytes_of(3, 8)


def called(x, function=all_reduce, peers=None, width=64, devices=1, **named):
    mesh = one_device()
    peers = make_peer_memory(mesh, "tp", max_rows=4, width=width) if peers is None else peers
    run = functools.partial(function, axis_name="tp", **named)
    each = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), check_vma=False)
    return each(x, peers)


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def test_no_rows_are_no_sum():
    assert called(zeros(0, 64)).shape == (0, 64)


class TestErrors:
    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"axis_name": "cp"}, "axis_name must be one of 'tp', got 'cp'"),
            ({"max_rows": 0}, "max_rows must be positive, got 0"),
            ({"max_rows": 1.5}, "max_rows must be an int, got 1.5"),
            ({"width": 6}, "width must be a multiple of 4, got 6"),
        ],
    )
    def test_a_memory_s_sizes(self, named, message, types_unchecked):
        named = {"axis_name": "tp", "max_rows": 1, "width": 8, **named}
        with pytest.raises(ValueError, match=message):
            make_peer_memory(one_device(), named.pop("axis_name"), **named)

    def test_more_devices_than_sum_together(self):
        mesh = Mesh(np.array(jax.devices()[:1] * 9), ("tp",))
        with pytest.raises(NotImplementedError, match=r"9 devices would sum together \(at most 8\)"):
            make_peer_memory(mesh, "tp", max_rows=1, width=8)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"process_index": 1}, "devices are of several processes, and addresses mean something in one"),
            ({"platform": "cuda", "compute_capability": "8.0"}, "capability 9.0, and this GPU has 8.0"),
            ({"platform": "cuda", "compute_capability": "9.0"}, None),
        ],
    )
    def test_devices_that_cannot(self, change, reason, types_unchecked):
        class Other:
            process_index, platform = 0, "cpu"

        other = Other()
        for name, value in change.items():
            setattr(other, name, value)
        found = support.why_not_peers([jax.devices()[0], other], 2)
        assert found is None if reason is None else found.endswith(reason)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (zeros(1, 64, dtype=jnp.float32), r"no kernel for float32 \(bfloat16, float16 have one\)"),
            (zeros(1, 62), "no kernel for rows of 62 numbers"),
            (zeros(129, 64), r"512 bytes a thread block \(peers has 256\)"),
        ],
    )
    def test_what_has_no_kernel(self, x, message):
        with pytest.raises(NotImplementedError, match=message):
            called(x)

    def test_peers_of_other_devices(self):
        peers = PeerMemory(jnp.zeros((1, 6), jnp.int32), jnp.zeros((1, 1024), jnp.int32))
        with pytest.raises(ValueError, match=r"peers must be for .*'tp' \(1\), got 2 devices"):
            called(zeros(1, 64), peers=peers)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"residual": zeros(2, 64)}, r"residual must have shape \(1, 64\).*got \(2, 64\)"),
            ({"weight": zeros(32)}, r"weight must have shape \(64,\).*got \(32,\)"),
            (
                {"weight": zeros(64, dtype=jnp.float32)},
                "weight's dtype must be bfloat16, as x, got float32",
            ),
            ({"eps": "small"}, "eps must be a number, got 'small'"),
        ],
    )
    def test_a_norm_that_does_not_fit(self, change, message, types_unchecked):
        named = {"residual": zeros(1, 64), "weight": zeros(64), "eps": 1e-6, **change}

        def normed(x, peers, *, axis_name):
            rest = {"eps": named["eps"], "axis_name": axis_name}
            return all_reduce_rms_norm(x, named["residual"], named["weight"], peers, **rest)

        with pytest.raises(ValueError, match=message):
            called(zeros(1, 64), function=normed)
