"""Memory of several processes of one host: each opens the others', or none does.

Every process says what it has, then whether it could open what it heard of. Both go to all of them, by a
collective of all processes of `jax.distributed`: so they agree, and nobody waits for one that gave up.

process 0                              process 1
-------------------------------------  -------------------------------------
allocates and fills                    allocates and fills
handles, or why it has none  --------> <--------  handles, or why it has none
opens those of process 1               opens those of process 0
None, or why it could not    --------> <--------    None, or why it could not

The memory is the driver's (cuMemAlloc): of XLA's pool the driver makes no handles. What `share_memory` made
is kept as long as the process lives, and open in the others: nothing tells a process when the last kernel of
another one that writes there has ended, and memory must not be freed before all have closed it.
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

MAX_BYTES = 8192  # of what a process says: 8 GPUs' handles take 2,000
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")

type Addresses = dict[tuple[int, int], int]  # by the id of the device that asks, and of the one asked for


def share_memory(devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]]) -> Addresses | str:
    """Addresses of new memory of all devices, for each device of this process; or why one process has none.

    To be called by all processes at once, which get addresses all, or the same reason. No device's memory is
    looked at before all processes have filled theirs.

    Args:
        devices: GPUs, of all processes.
        runs: What fills each device's memory: words of 32 bits, and how many of each.
    """
    own: dict[jax.Device, int] = {}
    found: Addresses = {}
    is_shared = False
    try:
        failed = _shared(devices, runs, own, found)
        is_shared = failed is None
    finally:
        if not is_shared:  # whatever went wrong, the others do so, too
            _given_back(own, found)
    return found if failed is None else failed


def why_not_shared(devices: Sequence[jax.Device]) -> str | None:
    """Why share_memory would fail, by trying it with a word; None if not. All processes call at once."""
    own: dict[jax.Device, int] = {}
    found: Addresses = {}
    try:
        failed = _shared(devices, [(0, 1)], own, found)
    finally:
        left = _given_back(own, found)
    return left if failed is None else failed


def _shared(
    devices: Sequence[jax.Device],
    runs: Sequence[tuple[int, int]],
    own: dict[jax.Device, int],
    found: Addresses,
) -> str | None:
    """share_memory; own gets the memory of this process's devices. Where it fails both have what there is."""
    said, failed = _told(lambda: _made(devices, runs, own))
    if failed is not None:
        return failed
    hosts = {one["host"]: one["name"] for one in said}
    if len(hosts) > 1:
        return f"devices are of several hosts ({', '.join(sorted(hosts.values()))})"
    places = {int(device): place for one in said for device, place in one["places"].items()}
    _, failed = _told(lambda: _open(devices, own, places, found))
    return failed


def _made(
    devices: Sequence[jax.Device], runs: Sequence[tuple[int, int]], own: dict[jax.Device, int]
) -> dict[str, Any]:
    """The host of this process and, by the ids of its devices, their UUIDs and handles of their memory."""
    driver, num_bytes, places = Driver(), 4 * sum(times for _, times in runs), {}
    for device in devices:
        if device.process_index != jax.process_index():
            continue
        number = device.local_hardware_id
        try:
            own[device] = driver.allocate(number, num_bytes)
            driver.fill(number, own[device], runs)
            places[device.id] = driver.uuid(number), driver.handle(number, own[device])
        except DriverError as error:
            lacks = f"GPU {device.id} has no {num_bytes} bytes, besides XLA's, that others can open ({error})"
            raise DriverError(lacks) from error
    name = socket.gethostname()
    return {"host": _BOOT_ID.read_text() if _BOOT_ID.exists() else name, "name": name, "places": places}


def _open(
    devices: Sequence[jax.Device],
    own: Mapping[jax.Device, int],
    places: Mapping[int, Any],
    found: Addresses,
) -> None:
    """Addresses that this process's devices find. Of GPUs that it does not see, opening decides."""
    driver = Driver()
    numbers = driver.numbers()
    for one, other in itertools.product(own, devices):
        number, names = one.local_hardware_id, (f"GPU {one.id}", f"GPU {other.id}")
        uuid, handle = places[other.id]
        seen = numbers.get(uuid)
        if one != other and seen is not None and not driver.reaches(number, seen):
            raise DriverError(f"{names[0]} does not reach the memory of {names[1]}")
        try:
            if other not in own:
                found[one.id, other.id] = driver.open(number, handle)
                continue
            if one != other:
                driver.let_reach(number, other.local_hardware_id)
            found[one.id, other.id] = own[other]
        except DriverError as error:
            raise DriverError(f"{names[0]} cannot open the memory of {names[1]} ({error})") from error


def _given_back(own: Mapping[jax.Device, int], found: Addresses) -> str | None:
    """Frees the memory of all processes, each when all have closed it; or why one could not."""
    by_id = {device.id: device for device in own}

    def close() -> None:
        driver = Driver()
        for (one, other), address in found.items():
            if other not in by_id:
                driver.close(by_id[one].local_hardware_id, address)

    def free() -> None:
        driver = Driver()
        for device, address in own.items():
            driver.free(device.local_hardware_id, address)

    _, failed = _told(close)
    if failed is not None:
        return failed
    _, failed = _told(free)
    return failed


def _told(make: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """What each process makes, in their order; and why the first that could not did not.

    Raises what is no answer of the driver in its own process, when the others have heard of it.
    """
    unforeseen: Exception | None = None
    try:
        said = {"made": make()}
    except Exception as error:  # the others wait for a word, whatever went wrong
        unforeseen = None if isinstance(error, DriverError) else error
        said = {"failed": f"process {jax.process_index()}: {error}"}
    encoded = json.dumps(said).encode()
    assert len(encoded) <= MAX_BYTES, len(encoded)
    words = np.zeros(MAX_BYTES, np.uint8)
    words[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    heard = [json.loads(bytes(one).rstrip(b"\0")) for one in multihost_utils.process_allgather(words)]
    if unforeseen is not None:
        raise unforeseen
    failed = next((one["failed"] for one in heard if "failed" in one), None)
    return [one.get("made") for one in heard], failed
