"""One of two processes whose devices sum: a GPU each, or two of a CPU each. Run by test_peer_processes.py.

PORT RANK WHERE, which is "cpu"; "gpu", each process seeing its own GPU alone; "gpus", each seeing both.
"""

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

from pallas_kernels.all_reduce import driver, make_peer_memory, memory, processes, reasons  # noqa: E402
from tests.pallas_kernels import sums_on_devices  # noqa: E402
from tests.pallas_kernels.cuda_of_processes import SEEN_AT, Cuda  # noqa: E402

if WHERE == "cpu":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK, **LOCAL)


def check_table() -> None:
    """Each process has its own memory where it is, and the other's where it found that."""
    mesh = sums_on_devices.mesh_of(2, 2)  # tp goes from process to process
    peers = make_peer_memory(mesh, "tp", max_rows=3, width=8)
    shards = peers.memory.addressable_shards
    addresses = {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in shards}
    words = np.array(list(addresses.items()), np.uint64).view(np.uint32)  # JAX has no 64 bits here
    both = multihost_utils.process_allgather(words).copy().view(np.uint64)
    everywhere = dict(both.reshape(-1, 2).tolist())
    for shard in peers.table.addressable_shards:
        number, zero, *halves = np.asarray(shard.data).ravel()
        _, cp = (part.start or 0 for part in shard.index[:-1])
        along = mesh.devices[:, cp]
        wanted = [everywhere[one.id] + SEEN_AT * (1 + one.process_index) for one in along]
        wanted[number] = addresses[shard.device.id]
        assert (number, zero) == (RANK, 0)
        assert np.array(halves, np.int32).view(np.uint64).tolist() == wanted


def refused(**of_one: object) -> str:
    """What both are told where the driver of process 1 is as it is said."""
    try:
        use(Cuda(RANK, num_own=2, **(of_one if RANK == 1 else {})))
        make_peer_memory(sums_on_devices.mesh_of(4), "tp", max_rows=1, width=8)
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("it was made")


def use(cuda: Cuda) -> None:
    driver.ctypes.CDLL = cuda


def check_agreement() -> None:
    """One cannot, so none does; each prints what it is told."""
    for failing in ("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuDevicePrimaryCtxRetain"):
        print(refused(failing=failing), flush=True)
    print(refused(reaches=False), flush=True)
    use(Cuda(RANK, num_own=2, hides_others=True, reaches=False))  # which nobody can ask then
    assert reasons.why_not_peers(jax.devices(), 4) is None
    memory.open_memory, opens = lambda *_: "it is too late", memory.open_memory
    print(refused(), flush=True)
    memory.open_memory = opens
    processes._BOOT_ID = processes.pathlib.Path("no/such/file")
    socket.gethostname = lambda: f"host{RANK}"
    print(refused(), flush=True)


def main() -> None:
    if WHERE == "cpu":
        memory.GPU_PLATFORMS = reasons.GPU_PLATFORMS = ("cpu",)
        reasons.why_not_device = lambda device: None
        cuda = Cuda(RANK, num_own=2)
        use(cuda)
        check_table()
        assert not cuda.context
        assert len(cuda.open) >= 2  # memory of both GPUs of the other process
    sums_on_devices.main(WHERE)
    if WHERE == "cpu":
        check_agreement()


if __name__ == "__main__":
    main()
