"""Memory that several processes of one host share by CUDA IPC handles. Either all processes open it, or none.

Each process sends its handles, and then whether it could open the handles of the other processes. A
collective of `jax.distributed` sends both messages to all processes. Therefore, all processes come to the
same result, and no process waits for one that failed.

process 0                              process 1
-------------------------------------  -------------------------------------
allocates and fills                    allocates and fills
handles, or an error         --------> <--------  handles, or an error
opens those of process 1               opens those of process 0
None, or an error            --------> <--------  None, or an error

The driver allocates the memory (cuMemAlloc), because it makes no handles for XLA's pool. Memory from
`share_memory` lives as long as the process and stays open in the other processes: a process cannot know when
the last kernel of another one that writes there has finished, and memory must not be freed before all
processes have closed it.
"""

import itertools
import json
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pallas_kernels.collectives.cuda_driver import Driver, DriverError

MAX_MESSAGE_BYTES = 8192  # the handles of 8 GPUs take 2,000
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")

type Addresses = dict[tuple[int, int], int]  # by (id of the accessing device, id of the owning device)


def share_memory(
    devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]]
) -> tuple[Addresses, str | None]:
    """Allocate memory on all devices, and return its addresses for the devices of this process.

    All processes must call this at the same time. It returns after all processes have filled their memory.

    Args:
        devices: GPUs of all processes.
        runs: Initial contents of each device's memory, as (32-bit word, count) pairs.

    Returns:
        The addresses, and None; or, if this fails in any process, no addresses and the reason, in all
        processes.
    """
    allocations: dict[jax.Device, int] = {}
    addresses: Addresses = {}
    is_shared = False
    try:
        failure = _shared(devices, runs, allocations, addresses)
        is_shared = failure is None
    finally:
        if not is_shared:  # the other processes also free their memory, whatever the error was
            _free(allocations, addresses)
    return (addresses, None) if failure is None else ({}, failure)


def why_not_shared(devices: Sequence[jax.Device]) -> str | None:
    """Return why share_memory would fail, or None, by trying it; all processes must call this together."""
    allocations: dict[jax.Device, int] = {}
    addresses: Addresses = {}
    try:
        failure = _shared(devices, [(0, 1)], allocations, addresses)
    finally:
        leak_reason = _free(allocations, addresses)
    return leak_reason if failure is None else failure


def _shared(
    devices: Sequence[jax.Device],
    runs: Sequence[tuple[int, int]],
    allocations: dict[jax.Device, int],
    addresses: Addresses,
) -> str | None:
    """Implement share_memory. `allocations` and `addresses` receive all memory to free, even on failure."""
    messages, failure = _exchange_messages(lambda: _allocate(devices, runs, allocations))
    if failure is not None:
        return failure
    hosts = {message["host"]: message["name"] for message in messages}
    if len(hosts) > 1:
        return f"the devices belong to several hosts ({', '.join(sorted(hosts.values()))})"
    handles = {int(device): handle for message in messages for device, handle in message["handles"].items()}
    _, failure = _exchange_messages(lambda: _open(devices, allocations, handles, addresses))
    return failure


def _allocate(
    devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]], allocations: dict[jax.Device, int]
) -> dict[str, Any]:
    """Allocate and fill memory on the devices of this process, and return the message with its handles."""
    driver, num_bytes, handles = Driver(), 4 * sum(count for _, count in runs), {}
    for device in devices:
        if device.process_index != jax.process_index():
            continue
        index = device.local_hardware_id
        try:
            allocations[device] = driver.allocate(index, num_bytes)
            driver.fill(index, allocations[device], runs)
            handles[device.id] = driver.uuid(index), driver.handle(index, allocations[device])
        except DriverError as error:
            message = (
                f"GPU {device.id} cannot allocate {num_bytes} bytes outside XLA's pool to share with other "
                f"processes ({error})"
            )
            raise DriverError(message) from error
    name = socket.gethostname()
    return {"host": _BOOT_ID.read_text() if _BOOT_ID.exists() else name, "name": name, "handles": handles}


def _open(
    devices: Sequence[jax.Device],
    allocations: Mapping[jax.Device, int],
    handles: Mapping[int, Any],
    addresses: Addresses,
) -> None:
    """Open the memory of all devices on the devices of this process, and add its addresses to `addresses`.

    A GPU may be invisible to this process. Then only opening its memory shows whether peer access is
    possible.
    """
    driver = Driver()
    indices = driver.indices()
    for device, peer in itertools.product(allocations, devices):
        index = device.local_hardware_id
        uuid, handle = handles[peer.id]
        peer_index = indices.get(uuid)
        if device != peer and peer_index is not None and not driver.can_access_peer(index, peer_index):
            raise DriverError(f"GPU {device.id} cannot access the memory of GPU {peer.id}")
        try:
            if peer not in allocations:
                addresses[device.id, peer.id] = driver.open(index, handle)
                continue
            if device != peer:
                driver.enable_peer_access(index, peer.local_hardware_id)
            addresses[device.id, peer.id] = allocations[peer]
        except DriverError as error:
            message = f"GPU {device.id} cannot open the memory of GPU {peer.id} ({error})"
            raise DriverError(message) from error


def _free(allocations: Mapping[jax.Device, int], addresses: Addresses) -> str | None:
    """Free the memory after all processes have closed it; return why that failed in a process, or None."""
    by_id = {device.id: device for device in allocations}

    def close() -> None:
        driver = Driver()
        for (device, peer), address in addresses.items():
            if peer not in by_id:
                driver.close(by_id[device].local_hardware_id, address)

    def free() -> None:
        driver = Driver()
        for device, address in allocations.items():
            driver.free(device.local_hardware_id, address)

    _, failure = _exchange_messages(close)
    if failure is not None:
        return failure
    _, failure = _exchange_messages(free)
    return failure


def _exchange_messages(action: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """Run an action in each process; return all results in process order, and the first failure or None.

    An exception other than DriverError is raised in the process where it occurred, after all processes have
    received the failure.
    """
    unexpected: Exception | None = None
    try:
        message = {"result": action()}
    except Exception as error:  # the others wait for a message, whatever the error was
        unexpected = None if isinstance(error, DriverError) else error
        message = {"failed": f"process {jax.process_index()}: {error}"}
    encoded = json.dumps(message).encode()
    assert len(encoded) <= MAX_MESSAGE_BYTES, len(encoded)
    words = np.zeros(MAX_MESSAGE_BYTES, np.uint8)
    words[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    messages = [
        json.loads(bytes(encoded).rstrip(b"\0")) for encoded in multihost_utils.process_allgather(words)
    ]
    if unexpected is not None:
        raise unexpected
    failure = next((message["failed"] for message in messages if "failed" in message), None)
    return [message.get("result") for message in messages], failure
