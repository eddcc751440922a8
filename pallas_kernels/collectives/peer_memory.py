"""Memory that devices write to by remote stores, and the table of its addresses."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from pallas_kernels.architectures import GPU_PLATFORMS
from pallas_kernels.checks import require, require_int, require_one_of, require_positive, unsupported
from pallas_kernels.collectives.ipc_memory import Addresses, share_memory
from pallas_kernels.collectives.ptx.exchange import COUNTERS, EMPTY, MAX_BLOCKS, block_bytes_of, memory_bytes
from pallas_kernels.collectives.support import why_not_peer_memory

_FIX = "Use jax.lax.psum on these devices"


class PeerMemory(NamedTuple):
    """Memory of each device that the other devices write to. Create it once for all calls on a mesh.

    The caller must keep it alive while a kernel that uses it runs. Both arrays are sharded over all axes of
    the mesh: `jax.shard_map` with `in_specs=PartitionSpec(*mesh.axis_names)` passes one shard to each device.

    Attributes:
        table: One row per device: its index among the devices that sum, 0, and the addresses of the memory of
            these devices in the address space of its process. An address is two words, the low one first.
        memory: Memory of each device that the other devices write to; XLA only keeps it alive. If the GPUs
            belong to several processes, the driver allocates the memory for the lifetime of the process, and
            this is an empty array [*mesh, 0, words] whose shape gives the size.
    """

    table: Int32[Array, "*mesh entries"]
    memory: Int32[Array, "... words"]

    @property
    def devices(self) -> int:
        """Number of devices whose arrays are summed."""
        return self.table.shape[-1] // 2 - 1

    @property
    def block_bytes(self) -> int:
        """Number of bytes that one device can write to one thread block of another device in a call."""
        return (4 * self.memory.shape[-1] - COUNTERS) // (MAX_BLOCKS * 2 * self.devices)


def make_peer_memory(
    mesh: Mesh, axis_name: str | tuple[str, ...], *, max_rows: int, width: int
) -> PeerMemory:
    """Allocate peer memory on all devices of a mesh for arrays of up to `max_rows` rows.

    If the devices belong to several processes, all processes must call this at the same time. Either all
    calls succeed, or all fail.

    Args:
        mesh: GPUs of one host that can access each other's memory (NVLink), of one process or of all
            processes of `jax.distributed`; or devices other than GPUs, where XLA computes sums and the memory
            is not used.
        axis_name: Axis or axes of the mesh to sum over.
        max_rows: Maximum number of rows of an array. Each device uses 4 * max_rows * width bytes for each of
            the summing devices, with max_rows rounded up to a multiple of 128.
        width: Maximum number of columns, a multiple of 4.

    Raises:
        ValueError: If the mesh has no such axis, a size is not a positive int, or width is not a multiple of
            4.
        NotImplementedError: If the devices cannot write into each other's memory; the message says why.

    Source: vLLM `CustomAllreduce.create_shared_buffer`, whose memory the driver allocates; in one process XLA
        allocates it.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    for name in axes:
        require_one_of("axis_name", name, mesh.axis_names)
    require_int(max_rows=max_rows, width=width)
    require_positive(max_rows=max_rows, width=width)
    require(width % 4 == 0, "width", "be a multiple of 4", width)
    devices = math.prod(mesh.shape[name] for name in axes)
    reason = why_not_peer_memory(list(mesh.devices.flat), devices)
    if reason is not None:
        raise unsupported("make_peer_memory", reason, _FIX)
    words = memory_bytes(devices, block_bytes_of(max_rows, width)) // 4
    allocate = _allocate_in_processes if _has_several_processes(mesh) else _allocate_in_process
    addresses, memory = allocate(mesh, words)
    return PeerMemory(_table(mesh, axes, addresses), memory)


def _has_several_processes(mesh: Mesh) -> bool:
    """Return whether the mesh has GPUs of several processes; other platforms do not use the memory."""
    devices = list(mesh.devices.flat)
    are_gpus = any(device.platform in GPU_PLATFORMS for device in devices)
    return are_gpus and len({device.process_index for device in devices}) > 1


def _allocate_in_process(mesh: Mesh, words: int) -> tuple[Addresses, jax.Array]:
    """Allocate memory by XLA on all devices of this process, and return its addresses and the array."""
    by_device = NamedSharding(mesh, P(*mesh.axis_names))
    is_counter = jnp.arange(words) < COUNTERS // 4  # calls are counted from 1

    def empty_memory() -> jax.Array:
        shard = jnp.where(is_counter, 0, jnp.uint32(EMPTY)).view(jnp.int32)
        return jnp.broadcast_to(shard, (*mesh.devices.shape, words))

    # All memory must be empty before any device writes to it.
    memory = jax.block_until_ready(jax.jit(empty_memory, out_shardings=by_device)())
    pointers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    addresses = {
        (device.id, peer.id): pointers.get(peer, 0) for device in pointers for peer in mesh.devices.flat
    }
    return addresses, memory


def _allocate_in_processes(mesh: Mesh, words: int) -> tuple[Addresses, jax.Array]:
    """Allocate memory by the CUDA driver in all processes, and return its addresses and PeerMemory.memory."""
    counters = COUNTERS // 4
    addresses, reason = share_memory(list(mesh.devices.flat), [(0, counters), (EMPTY, words - counters)])
    if reason is not None:
        raise unsupported("make_peer_memory", reason, _FIX)
    shape, by_device = (*mesh.devices.shape, 0, words), NamedSharding(mesh, P(*mesh.axis_names))
    return addresses, jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=by_device)()


def _table(mesh: Mesh, names: tuple[str, ...], addresses: Mapping[tuple[int, int], int]) -> jax.Array:
    """Return the index of each device and the addresses of its peers' memory, see PeerMemory.table.

    Each process builds the rows of the devices that belong to it.
    """
    axes, sizes = [mesh.axis_names.index(name) for name in names], [mesh.shape[name] for name in names]

    def row(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        coordinates = [part.start or 0 for part in index[:-1]]
        peer_index: list[int | slice] = [*coordinates]
        for axis in axes:  # the devices that sum together
            peer_index[axis] = slice(None)
        peers = mesh.devices[tuple(peer_index)].transpose(np.argsort(np.argsort(axes))).flat
        device = mesh.devices[tuple(coordinates)]
        rank = np.ravel_multi_index([coordinates[axis] for axis in axes], sizes)
        pointers = np.array([addresses[device.id, peer.id] for peer in peers], np.uint64)
        entries = np.concatenate([np.array([rank, 0], np.int32), pointers.view(np.int32)])
        return entries.reshape(*(1 for _ in coordinates), -1)

    shape = (*mesh.devices.shape, 2 + 2 * math.prod(sizes))
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*mesh.axis_names)), row)
