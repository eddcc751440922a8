"""Memory that devices write to behind XLA's back, and the table of where each device's lies."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from pallas_kernels.all_reduce.reasons import why_not_peers
from pallas_kernels.checks import require, require_int, require_one_of, require_positive, unsupported
from pallas_kernels.ptx.peer_words import COUNTERS, EMPTY, MAX_BLOCKS, block_bytes_of, memory_bytes


class PeerMemory(NamedTuple):
    """What `all_reduce` needs besides its array: made once for all calls of a mesh, and never changed.

    The caller holds it as long as anything that uses it runs. Both arrays are cut by all axes of the mesh:
    inside `jax.shard_map` a device has its own part, `in_specs=PartitionSpec(*mesh.axis_names)`.

    Attributes:
        table: Of each device its number along the axis that is summed over, 0, and the addresses of those
            devices' memory, low halves first.
        memory: Of each device what the others write to. XLA only holds it.
    """

    table: Int32[Array, "*mesh entries"]
    memory: Int32[Array, "*mesh words"]

    @property
    def devices(self) -> int:
        """That sum."""
        return self.table.shape[-1] // 2 - 1

    @property
    def block_bytes(self) -> int:
        """Of a thread block's memory for what one device writes in a call."""
        return (4 * self.memory.shape[-1] - COUNTERS) // (MAX_BLOCKS * 2 * self.devices)


def make_peer_memory(mesh: Mesh, axis_name: str, *, max_rows: int, width: int) -> PeerMemory:
    """Memory for sums of arrays of up to so many rows, on all devices of a mesh.

    Args:
        mesh: GPUs of this process that reach each other's memory, by NVLink; or other devices, where sums are
            XLA's and the memory is never touched.
        axis_name: Of the mesh: what is summed over.
        max_rows: Of an array; on each device 4 * max_rows * width bytes for each of the summing devices are
            taken, max_rows rounded up to thread blocks (128 rows).
        width: Of a row, at most; a multiple of 4.

    Raises:
        ValueError: The mesh has no such axis, a size is no positive int, or width no multiple of 4.
        NotImplementedError: These devices cannot write into each other's memory; the message says why.
    """
    require_one_of("axis_name", axis_name, mesh.axis_names)
    require_int(max_rows=max_rows, width=width)
    require_positive(max_rows=max_rows, width=width)
    require(width % 4 == 0, "width", "be a multiple of 4", width)
    reason = why_not_peers(list(mesh.devices.flat), mesh.shape[axis_name])
    if reason is not None:
        raise unsupported("make_peer_memory", reason, "jax.lax.psum sums there")
    words = memory_bytes(mesh.shape[axis_name], block_bytes_of(max_rows, width)) // 4
    by_device = NamedSharding(mesh, P(*mesh.axis_names))
    is_counter = jnp.arange(words) < COUNTERS // 4  # calls are counted from 1
    empty = lambda: jnp.where(is_counter, 0, jnp.uint32(EMPTY)).view(jnp.int32)
    made = jax.jit(lambda: jnp.broadcast_to(empty(), (*mesh.devices.shape, words)), out_shardings=by_device)
    memory = jax.block_until_ready(made())  # nobody writes before all is empty
    entries = _entries(_addresses(memory), mesh.axis_names.index(axis_name))
    return PeerMemory(jax.device_put(entries, by_device), memory)


def _addresses(memory: jax.Array) -> np.ndarray:
    """uint64, of each device of the mesh."""
    found = np.zeros(memory.shape[:-1], np.uint64)
    for shard in memory.addressable_shards:
        place = tuple(part.start or 0 for part in shard.index[:-1])
        found[place] = shard.data.unsafe_buffer_pointer()
    return found


def _entries(addresses: np.ndarray, axis: int) -> np.ndarray:
    """PeerMemory.table."""
    count = addresses.shape[axis]
    entries = np.zeros((*addresses.shape, 2 + 2 * count), np.int32)
    shape = [1] * addresses.ndim
    shape[axis] = count
    entries[..., 0] = np.arange(count).reshape(shape)
    of_all = np.moveaxis(addresses, axis, -1)[..., None, :]  # the same for all that sum together
    entries[..., 2:] = np.moveaxis(np.repeat(of_all, count, axis=-2), -2, axis).copy().view(np.int32)
    return entries
