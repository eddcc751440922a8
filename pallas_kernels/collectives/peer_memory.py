"""Memory that devices write to behind XLA's back, and the table of where each device's lies."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from pallas_kernels.checks import require, require_int, require_one_of, require_positive, unsupported
from pallas_kernels.collectives.ipc_memory import Addresses, share_memory
from pallas_kernels.collectives.ptx.exchange import COUNTERS, EMPTY, MAX_BLOCKS, block_bytes_of, memory_bytes
from pallas_kernels.collectives.support import why_not_peer_memory
from pallas_kernels.support import GPU_PLATFORMS

_WAY_OUT = "jax.lax.psum sums there"


class PeerMemory(NamedTuple):
    """What `all_reduce` needs besides its array: made once for all calls of a mesh, and never changed.

    The caller holds it as long as anything that uses it runs. Both arrays are cut by all axes of the mesh:
    inside `jax.shard_map` a device has its own part, `in_specs=PartitionSpec(*mesh.axis_names)`.

    Attributes:
        table: Of each device its number along the axes that are summed over, 0, and the addresses of those
            devices' memory, low halves first, as the device's process has them.
        memory: Of each device what the others write to. XLA only holds it. Where GPUs are of several
            processes, what they write to is the driver's, kept as long as the process lives, and this says
            by its shape alone how large that is: [*mesh, 0, words], an array of no bytes.
    """

    table: Int32[Array, "*mesh entries"]
    memory: Int32[Array, "... words"]

    @property
    def devices(self) -> int:
        """That sum."""
        return self.table.shape[-1] // 2 - 1

    @property
    def block_bytes(self) -> int:
        """Of a thread block's memory for what one device writes in a call."""
        return (4 * self.memory.shape[-1] - COUNTERS) // (MAX_BLOCKS * 2 * self.devices)


def make_peer_memory(
    mesh: Mesh, axis_name: str | tuple[str, ...], *, max_rows: int, width: int
) -> PeerMemory:
    """Memory for sums of arrays of up to so many rows, on all devices of a mesh.

    Where the mesh's devices are of several processes, all of them call at once, and all succeed or none does.

    Args:
        mesh: GPUs of one host that reach each other's memory, by NVLink, of one process or of all that
            `jax.distributed` knows; or other devices, where sums are XLA's and the memory is never touched.
        axis_name: An axis of the mesh, or several: what is summed over.
        max_rows: Of an array; on each device 4 * max_rows * width bytes for each of the summing devices are
            taken, max_rows rounded up to thread blocks (128 rows).
        width: Of a row, at most; a multiple of 4.

    Raises:
        ValueError: The mesh has no such axis, a size is no positive int, or width no multiple of 4.
        NotImplementedError: These devices cannot write into each other's memory; the message says why.

    Source: vLLM `CustomAllreduce.create_shared_buffer`, whose memory is the driver's; XLA's in one process.
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
        raise unsupported("make_peer_memory", reason, _WAY_OUT)
    words = memory_bytes(devices, block_bytes_of(max_rows, width)) // 4
    make = _of_processes if _is_of_processes(mesh) else _of_one
    addresses, memory = make(mesh, words)
    return PeerMemory(_table(mesh, axes, addresses), memory)


def _is_of_processes(mesh: Mesh) -> bool:
    """Whether GPUs are of several; of other platforms nobody asks where their memory is."""
    devices = list(mesh.devices.flat)
    are_gpus = any(device.platform in GPU_PLATFORMS for device in devices)
    return are_gpus and len({device.process_index for device in devices}) > 1


def _of_one(mesh: Mesh, words: int) -> tuple[Addresses, jax.Array]:
    """Addresses of memory that XLA makes, and it."""
    by_device = NamedSharding(mesh, P(*mesh.axis_names))
    is_counter = jnp.arange(words) < COUNTERS // 4  # calls are counted from 1
    empty = lambda: jnp.where(is_counter, 0, jnp.uint32(EMPTY)).view(jnp.int32)
    made = jax.jit(lambda: jnp.broadcast_to(empty(), (*mesh.devices.shape, words)), out_shardings=by_device)
    memory = jax.block_until_ready(made())  # nobody writes before all is empty
    here = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    return {(one.id, other.id): here.get(other, 0) for one in here for other in mesh.devices.flat}, memory


def _of_processes(mesh: Mesh, words: int) -> tuple[Addresses, jax.Array]:
    """Addresses of memory that the driver makes, and PeerMemory.memory."""
    counters = COUNTERS // 4
    found = share_memory(list(mesh.devices.flat), [(0, counters), (EMPTY, words - counters)])
    if isinstance(found, str):
        raise unsupported("make_peer_memory", found, _WAY_OUT)
    shape, by_device = (*mesh.devices.shape, 0, words), NamedSharding(mesh, P(*mesh.axis_names))
    return found, jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=by_device)()


def _table(mesh: Mesh, names: tuple[str, ...], addresses: Mapping[tuple[int, int], int]) -> jax.Array:
    """PeerMemory.table, of which each process makes the rows of its own devices."""
    axes, sizes = [mesh.axis_names.index(name) for name in names], [mesh.shape[name] for name in names]

    def row(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        place = [part.start or 0 for part in index[:-1]]
        along: list[int | slice] = [*place]
        for axis in axes:  # those that sum together
            along[axis] = slice(None)
        others = mesh.devices[tuple(along)].transpose(np.argsort(np.argsort(axes))).flat
        device = mesh.devices[tuple(place)]
        number = np.ravel_multi_index([place[axis] for axis in axes], sizes)
        of_all = np.array([addresses[device.id, other.id] for other in others], np.uint64)
        entries = np.concatenate([np.array([number, 0], np.int32), of_all.view(np.int32)])
        return entries.reshape(*(1 for _ in place), -1)

    shape = (*mesh.devices.shape, 2 + 2 * math.prod(sizes))
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*mesh.axis_names)), row)
