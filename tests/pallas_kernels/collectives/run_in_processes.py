"""One of two processes whose devices reduce together: a GPU each, or two CPU devices each. Run by
test_ipc_memory.py.

Arguments: PORT RANK WHERE. WHERE is "cpu"; "gpu", where each process sees its own GPU; or "gpus", where each
sees both.
"""

import itertools
import os
import socket
import sys

import jax

PORT, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
LOCAL = {}
if WHERE == "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[RANK]
if WHERE == "gpus":
    LOCAL = {"local_device_ids": [RANK]}

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from pallas_kernels.collectives import cuda_driver, ipc_memory, make_peer_memory, peer_memory, support  # noqa: E402
from pallas_kernels.collectives.ptx.exchange import COUNTERS, EMPTY, block_bytes_of, memory_bytes  # noqa: E402
from tests.pallas_kernels.collectives import run_on_devices  # noqa: E402
from tests.pallas_kernels.collectives.fake_cuda_driver import SEEN_AT, Cuda  # noqa: E402

if WHERE == "cpu":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK, **LOCAL)


def check_table(cuda: Cuda) -> None:
    """Check that each process has its own addresses and the opened addresses of the other's memory."""
    mesh = run_on_devices.mesh_of(2, 2)  # tp goes from process to process
    peers = make_peer_memory(mesh, "tp", max_rows=3, width=8)
    assert (peers.devices, peers.block_bytes) == (2, block_bytes_of(3, 8))
    assert peers.memory.size == 0
    local_devices = sorted(jax.local_devices(), key=lambda device: device.local_hardware_id)
    addresses = {local_devices[context - 1].id: address for address, context in cuda.contexts.items()}
    assert sorted(addresses) == sorted(device.id for device in local_devices)  # the trial leaves nothing open
    for memory_of_one in cuda.allocated.values():
        filled = memory_of_one[: memory_bytes(2, peers.block_bytes) // 4]
        assert np.all(filled[: COUNTERS // 4] == 0)
        assert np.all(filled[COUNTERS // 4 :] == EMPTY)
    words = np.array(list(addresses.items()), np.uint64).view(np.uint32)  # JAX has no 64 bits here
    all_addresses = multihost_utils.process_allgather(words).copy().view(np.uint64)
    everywhere = dict(all_addresses.reshape(-1, 2).tolist())
    for shard in peers.table.addressable_shards:
        number, zero, *halves = np.asarray(shard.data).ravel()
        _, cp = (part.start or 0 for part in shard.index[:-1])
        along = mesh.devices[:, cp]
        expected = [everywhere[peer.id] + SEEN_AT * (1 + peer.process_index) for peer in along]
        expected[number] = addresses[shard.device.id]
        assert (number, zero) == (RANK, 0)
        assert np.array(halves, np.int32).view(np.uint64).tolist() == expected
    opened = {
        everywhere[peer.id] + SEEN_AT * (2 - RANK) for peer in jax.devices() if peer not in local_devices
    }
    assert cuda.open == dict.fromkeys(opened, 2)  # by each of this process's devices
    assert cuda.ways == {(1, 2), (2, 1)}
    assert not cuda.context


def check_trial(cuda: Cuda) -> None:
    """Check that the trial leaves nothing open, and that memory is freed only after all processes have
    closed it.
    """
    collect = multihost_utils.process_allgather

    def collect_and_note(*args: object, **named: object) -> object:
        cuda.log.append("all were told")
        return collect(*args, **named)

    multihost_utils.process_allgather, cuda.log[:] = collect_and_note, []
    assert support.why_not_peer_memory(jax.devices(), 4) is None
    multihost_utils.process_allgather = collect
    assert not cuda.allocated
    assert not cuda.open
    steps = [name for name, _ in itertools.groupby(cuda.log)]
    ends = ["cuIpcCloseMemHandle", "all were told", "cuMemFree_v2", "all were told"]
    assert steps[-6:] == ["cuIpcOpenMemHandle_v2", "all were told", *ends], steps


def refused(**driver_options: object) -> str:
    """Return the reason that both processes report if the driver of process 1 has the given options."""
    cuda = Cuda(RANK, num_own=2, **(driver_options if RANK == 1 else {}))
    use(cuda)
    try:
        make_peer_memory(run_on_devices.mesh_of(4), "tp", max_rows=1, width=8)
    except NotImplementedError as error:
        assert not cuda.allocated
        assert not cuda.open
        return str(error)
    raise AssertionError("it was made")


def use(cuda: Cuda) -> None:
    cuda_driver.ctypes.CDLL = cuda


def check_agreement() -> None:
    """Check that no process uses peer memory if one cannot; each prints the reason."""
    for failing in (
        "cuMemAlloc_v2",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuDevicePrimaryCtxRetain",
    ):
        print(refused(failing=failing), flush=True)
    print(refused(reaches=False), flush=True)
    print(refused(failing="cuCtxEnablePeerAccess"), flush=True)
    cuda = Cuda(RANK, num_own=2, failing="cuIpcOpenMemHandle_v2" if RANK == 1 else None)
    use(cuda)
    assert "cannot open" in str(
        ipc_memory.share_memory(jax.devices(), [(0, 1)])
    )  # though the trial went well
    assert not cuda.allocated
    assert not cuda.open
    cuda = Cuda(RANK, num_own=2, hides_others=True, reaches=False)  # peer access cannot be queried then
    use(cuda)
    check_trial(cuda)
    share_memory, peer_memory.share_memory = peer_memory.share_memory, lambda *_: ({}, "it is too late")
    print(refused(), flush=True)
    peer_memory.share_memory = share_memory
    ipc_memory._BOOT_ID = ipc_memory.pathlib.Path("no/such/file")
    socket.gethostname = lambda: f"host{RANK}"
    print(refused(), flush=True)


def main() -> None:
    if WHERE == "cpu":
        peer_memory.GPU_PLATFORMS = support.GPU_PLATFORMS = ("cpu",)
        support.why_not_device = lambda *_: None
        cuda = Cuda(RANK, num_own=2)
        use(cuda)
        check_table(cuda)
    run_on_devices.main(WHERE)
    if WHERE == "cpu":
        check_agreement()


if __name__ == "__main__":
    main()
