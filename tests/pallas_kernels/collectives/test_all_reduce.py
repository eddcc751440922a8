"""all_reduce: sums on several devices, its memory and addresses, and refusals by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.collectives import (
    PeerMemory,
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    make_peer_memory,
    reference,
    support,
)
from pallas_kernels.collectives.cuda_driver import ctypes as ctypes_of_driver
from pallas_kernels.collectives.ptx import exchange
from pallas_kernels.collectives.ptx.all_reduce import Norm
from pallas_kernels.collectives.ptx.exchange import Exchange, block_bytes_of
from tests import aot
from tests.pallas_kernels.collectives import all_reduce_aot_cases, simulated_devices
from tests.subprocesses import run_module


def run_on(target):
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has a GPU's memory
    done = run_module("tests.pallas_kernels.collectives.run_on_devices", target, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_sums_equal_the_definition_and_are_equal_on_all_devices():
    out = run_on("cpu")
    assert "{'tp': 2, 'cp': 2}, 68 wide: right" in out
    assert "{'tp': 4, 'cp': 1}, 68 wide: right" in out


@pytest.mark.gpu
@pytest.mark.gpus
def test_gpus_sum_over_peer_memory():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    assert "4096 wide: right" in run_on("gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, Norm(1e-5), Norm(1e-6, True, True)], ids=["alone", "llama", "gemma"])
@pytest.mark.parametrize("max_blocks", [5, 16])  # 15 rows are three a thread block, or one
@pytest.mark.parametrize("count", [3, 8])
def test_simulated_devices_sum_on_one_gpu(count, max_blocks, norm, monkeypatch):
    """Calls with one shot and with two alternate."""
    monkeypatch.setattr(exchange, "MAX_BLOCKS", max_blocks)
    devices, rng = simulated_devices.Devices(count, max_rows=15, width=4096), np.random.default_rng(count)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    for call in range(24):
        rows, width = (1, 6, 15)[call % 3], (4096, 1028)[call // 2 % 2]
        parts, residual, weight = draw(count, rows, width), draw(rows, width), draw(width)
        norm_arguments = () if norm is None else (residual, weight)
        actual = devices.sums(parts, *norm_arguments, norm=norm, shots=1 + call % 2)
        expected = [reference.all_reduce(np.asarray(parts))]
        if norm is not None:
            arrays = map(np.asarray, (parts, *norm_arguments))
            expected = reference.all_reduce_rms_norm(*arrays, **norm._asdict())
        for actual_array, expected_array in zip(map(np.asarray, actual), expected, strict=True):
            bits = actual_array.view(np.uint16)
            np.testing.assert_array_equal(bits, np.broadcast_to(bits[:1], bits.shape))
            np.testing.assert_allclose(
                actual_array[0].astype(np.float64), expected_array, rtol=2**-6, atol=2**-6
            )


@pytest.mark.parametrize("gpu", ["9.0", pytest.param("10.0", marks=pytest.mark.slow)])
def test_every_shape_compiles_without_spills(gpu):
    aot.require_plugin()
    shapes, gathered = all_reduce_aot_cases.SHAPES, all_reduce_aot_cases.GATHERED
    reports = aot.compile_all(all_reduce_aot_cases.__name__, [*shapes, *gathered], gpu)
    for name, kernels in reports.items():
        spilled_bytes = [(kernel.name, kernel.spilled_bytes) for kernel in kernels]
        assert spilled_bytes == [
            (f"all_{'gather' if name in gathered else 'reduce'}_mosaic_gpu_kernel", 0)
        ], name


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 256, 300])
def test_rows_of_a_thread_block_fit_its_memory(rows):
    layout = Exchange(rows, 64, 2, block_bytes_of(300, 64))
    assert layout.bytes_needed <= layout.block_bytes
    per_block = [len(range(block, rows, layout.blocks)) for block in range(layout.blocks)]
    assert max(per_block) * layout.packets * exchange.PACKET == layout.bytes_needed


# --------------------------------------------------------------------------------- addresses, errors
def one_device(axes=("tp",)):
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)


def test_table_has_the_addresses_of_the_memory():
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
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), check_vma=False)
    return sharded(x, peers)


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def test_empty_input_returns_an_empty_result():
    assert called(zeros(0, 64)).shape == (0, 64)
    assert called(zeros(0, 32, dtype=jnp.float32), function=all_gather).shape == (1, 0, 32)


class TestRefusals:
    @pytest.mark.parametrize(
        ("named", "message"),
        [
            ({"axis_name": "cp"}, "axis_name must be one of 'tp', got 'cp'"),
            ({"max_rows": 0}, "max_rows must be positive, got 0"),
            ({"max_rows": 1.5}, "max_rows must be an int, got 1.5"),
            ({"width": 6}, "width must be a multiple of 4, got 6"),
        ],
    )
    def test_invalid_memory_sizes_are_rejected(self, named, message, types_unchecked):
        named = {"axis_name": "tp", "max_rows": 1, "width": 8, **named}
        with pytest.raises(ValueError, match=message):
            make_peer_memory(one_device(), named.pop("axis_name"), **named)

    def test_too_many_devices_are_rejected(self):
        mesh = Mesh(np.array(jax.devices()[:1] * 9), ("tp",))
        with pytest.raises(
            NotImplementedError, match=r"9 devices would sum together \(at most 8 are supported\)"
        ):
            make_peer_memory(mesh, "tp", max_rows=1, width=8)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"process_index": 1}, None),  # of a CPU: their sums are XLA's
            ({"platform": "cuda", "compute_capability": "8.0"}, "9.0, 10.0, 10.3, and this GPU has 8.0"),
            ({"platform": "cuda", "compute_capability": "9.0"}, None),
        ],
    )
    def test_unsupported_devices_are_rejected(self, change, reason, types_unchecked):
        class Other:
            process_index, platform = 0, "cpu"

        unsupported = Other()
        for name, value in change.items():
            setattr(unsupported, name, value)
        actual_reason = support.why_not_peer_memory([jax.devices()[0], unsupported], 2)
        assert actual_reason is None if reason is None else actual_reason.endswith(reason)

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (1, None),
            (0, "GPU 0 cannot access the memory of GPU 1"),
            (None, "there is no CUDA driver"),
        ],
    )
    def test_gpus_without_peer_access_are_rejected(self, answer, reason, monkeypatch, types_unchecked):
        class GPU:
            process_index, platform, compute_capability = 0, "cuda", "9.0"

            def __init__(self, number):
                self.local_hardware_id = number

        class Driver:
            def __init__(self, name):
                if answer is None:
                    raise OSError(name)

            def cuDeviceGet(self, number, ordinal):
                number._obj.value = ordinal.value

            def cuDeviceCanAccessPeer(self, can, device, peer):
                can._obj.value = answer if device.value != peer.value else 1
                return 0

        monkeypatch.setattr(ctypes_of_driver, "CDLL", Driver)
        actual_reason = support.why_not_peer_memory([GPU(0), GPU(1)], 2)
        assert actual_reason is None if reason is None else actual_reason.startswith(reason)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (zeros(1, 64, dtype=jnp.float32), r"no kernel for float32 \(bfloat16, float16 have one\)"),
            (zeros(1, 62), "no kernel for rows of 62 numbers"),
            (zeros(129, 64), r"256 bytes per thread block \(peers has 128\)"),
        ],
    )
    def test_unsupported_sums_are_rejected(self, x, message):
        with pytest.raises(NotImplementedError, match=message):
            called(x)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (zeros(1, 32), r"all_gather: there is no kernel for bfloat16 \(float32 has one\)"),
            (zeros(1, 31, dtype=jnp.float32), "no kernel for rows of 31 numbers"),
            (zeros(129, 32, dtype=jnp.float32), r"256 bytes per thread block \(peers has 128\)"),
        ],
    )
    def test_unsupported_gathers_are_rejected(self, x, message):
        with pytest.raises(NotImplementedError, match=message):
            called(x, function=all_gather)

    def test_peers_of_another_mesh_are_rejected(self):
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
    def test_inconsistent_norm_arguments_are_rejected(self, change, message, types_unchecked):
        named = {"residual": zeros(1, 64), "weight": zeros(64), "eps": 1e-6, **change}

        def normed(x, peers, *, axis_name):
            rest = {"eps": named["eps"], "axis_name": axis_name}
            return all_reduce_rms_norm(x, named["residual"], named["weight"], peers, **rest)

        with pytest.raises(ValueError, match=message):
            called(zeros(1, 64), function=normed)
