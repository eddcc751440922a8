"""Memory that several processes of one host share by CUDA IPC handles: all of them open it, or none does.

Each process announces its handles, then whether it could open the handles of the others. Both messages go to
all processes by a collective of `jax.distributed`, so that they agree, and no process waits for one that gave
up.

process 0                              process 1
-------------------------------------  -------------------------------------
allocates and fills                    allocates and fills
handles, or an error         --------> <--------  handles, or an error
opens those of process 1               opens those of process 0
None, or an error            --------> <--------  None, or an error

The driver allocates the memory (cuMemAlloc), because it makes no handles for XLA's pool. Memory from
`share_memory` lives as long as the process and stays open in the others: a process cannot know when the last
kernel of another one that writes there has finished, and memory must not be freed before all processes have
closed it.
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


def share_memory(devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]]) -> Addresses | str:
    """Allocate memory on all devices and return its addresses for this process's devices, or why that failed.

    All processes must call this at the same time; all get addresses, or all get the same reason. No device's
    memory is read before all processes have filled theirs.

    Args:
        devices: GPUs of all processes.
        runs: Initial contents of each device's memory, as (32-bit word, count) pairs.
    """
    own: dict[jax.Device, int] = {}
    found: Addresses = {}
    is_shared = False
    try:
        failed = _shared(devices, runs, own, found)
        is_shared = failed is None
    finally:
        if not is_shared:  # whatever the error was, the other processes free theirs, too
            _free(own, found)
    return found if failed is None else failed


def why_not_shared(devices: Sequence[jax.Device]) -> str | None:
    """Return why share_memory would fail, or None, by trying it; all processes must call this together."""
    own: dict[jax.Device, int] = {}
    found: Addresses = {}
    try:
        failed = _shared(devices, [(0, 1)], own, found)
    finally:
        left = _free(own, found)
    return left if failed is None else failed


def _shared(
    devices: Sequence[jax.Device],
    runs: Sequence[tuple[int, int]],
    own: dict[jax.Device, int],
    found: Addresses,
) -> str | None:
    """Implement share_memory; add to `own` and `found` whatever was allocated and opened, even on failure."""
    messages, failed = _exchange_messages(lambda: _allocate(devices, runs, own))
    if failed is not None:
        return failed
    hosts = {message["host"]: message["name"] for message in messages}
    if len(hosts) > 1:
        return f"the devices belong to several hosts ({', '.join(sorted(hosts.values()))})"
    handles = {int(device): handle for message in messages for device, handle in message["handles"].items()}
    _, failed = _exchange_messages(lambda: _open(devices, own, handles, found))
    return failed


def _allocate(
    devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]], own: dict[jax.Device, int]
) -> dict[str, Any]:
    """Allocate and fill memory; return the host and, by device id, the UUID and the handle of the memory."""
    driver, num_bytes, handles = Driver(), 4 * sum(count for _, count in runs), {}
    for device in devices:
        if device.process_index != jax.process_index():
            continue
        index = device.local_hardware_id
        try:
            own[device] = driver.allocate(index, num_bytes)
            driver.fill(index, own[device], runs)
            handles[device.id] = driver.uuid(index), driver.handle(index, own[device])
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
    own: Mapping[jax.Device, int],
    handles: Mapping[int, Any],
    found: Addresses,
) -> None:
    """Open all memory for this process's devices and add its addresses to `found`.

    For GPUs that this process cannot use, opening the memory decides whether peer access is possible.
    """
    driver = Driver()
    indices = driver.indices()
    for device, peer in itertools.product(own, devices):
        index = device.local_hardware_id
        uuid, handle = handles[peer.id]
        peer_index = indices.get(uuid)
        if device != peer and peer_index is not None and not driver.can_access_peer(index, peer_index):
            raise DriverError(f"GPU {device.id} cannot access the memory of GPU {peer.id}")
        try:
            if peer not in own:
                found[device.id, peer.id] = driver.open(index, handle)
                continue
            if device != peer:
                driver.enable_peer_access(index, peer.local_hardware_id)
            found[device.id, peer.id] = own[peer]
        except DriverError as error:
            message = f"GPU {device.id} cannot open the memory of GPU {peer.id} ({error})"
            raise DriverError(message) from error


def _free(own: Mapping[jax.Device, int], found: Addresses) -> str | None:
    """Free the memory of all processes after all have closed it; return why one failed, or None."""
    by_id = {device.id: device for device in own}

    def close() -> None:
        driver = Driver()
        for (device, peer), address in found.items():
            if peer not in by_id:
                driver.close(by_id[device].local_hardware_id, address)

    def free() -> None:
        driver = Driver()
        for device, address in own.items():
            driver.free(device.local_hardware_id, address)

    _, failed = _exchange_messages(close)
    if failed is not None:
        return failed
    _, failed = _exchange_messages(free)
    return failed


def _exchange_messages(action: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """Run an action in each process; return the results in process order, and the first failure or None.

    An exception other than DriverError is raised in its own process after the others have been informed.
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
    failed = next((message["failed"] for message in messages if "failed" in message), None)
    return [message.get("result") for message in messages], failed
