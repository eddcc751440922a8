"""Memory of several processes of one host: each opens the others', or none does.

Every process says what it has, then whether it could open what it heard of. Both go to all of them, by a
collective of all processes of `jax.distributed`: so they agree, and nobody waits for one that gave up.

process 0                              process 1
-------------------------------------  -------------------------------------
handles of its memory        --------> <--------        handles of its memory
opens those of process 1               opens those of process 0
None, or why it could not    --------> <--------    None, or why it could not
"""

import json
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pallas_kernels.all_reduce.driver import Driver, DriverError, Exported

MAX_BYTES = 8192  # of what a process says: 8 GPUs' handles take 2,000
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")

type Addresses = dict[tuple[int, int], int]  # by the id of the device that asks, and of the one asked for


def open_memory(devices: Sequence[jax.Device], here: Mapping[jax.Device, int]) -> Addresses | str:
    """Addresses of all devices' memory, for each device of this process; or why one process has them not.

    To be called by all processes at once, which get addresses all, or the same reason. No device's memory is
    looked at before all processes have called.

    Args:
        devices: Of all processes.
        here: Addresses of the memory on this process's devices.
    """
    said, failed = _told(lambda: _exported(here))
    if failed is not None:
        return failed
    hosts = {one["host"]: one["name"] for one in said}
    if len(hosts) > 1:
        return f"devices are of several hosts ({', '.join(sorted(hosts.values()))})"
    places = {int(device): place for one in said for device, place in one["places"].items()}
    found: Addresses = {}
    _, failed = _told(lambda: found.update(_opened(devices, here, places)))
    return found if failed is None else failed


def _exported(here: Mapping[jax.Device, int]) -> dict[str, Any]:
    """The host of this process and, by the ids of its devices, their UUIDs and where their memory is."""
    driver, places = Driver(), {}
    for device, address in here.items():
        number = device.local_hardware_id
        try:
            exported = driver.exported(number, address)
        except DriverError as error:
            hint = f"{error}; leave XLA_PYTHON_CLIENT_ALLOCATOR at its default"
            raise DriverError(f"XLA's memory cannot be opened by other processes ({hint})") from error
        places[device.id] = driver.uuid(number), *exported
    name = socket.gethostname()
    return {"host": _BOOT_ID.read_text() if _BOOT_ID.exists() else name, "name": name, "places": places}


def _opened(
    devices: Sequence[jax.Device], here: Mapping[jax.Device, int], places: Mapping[int, Any]
) -> Addresses:
    """What this process's devices find; the driver is asked about GPUs that it does not hide."""
    driver, found = Driver(), {}
    numbers = driver.numbers()
    for one in here:
        for other in devices:
            if other in here:
                found[one.id, other.id] = here[other]
                continue
            uuid, handle, offset = places[other.id]
            seen, names = numbers.get(uuid), (f"GPU {one.id}", f"GPU {other.id}")
            if seen is not None and not driver.reaches(one.local_hardware_id, seen):
                raise DriverError(f"{names[0]} does not reach the memory of {names[1]}")
            try:
                found[one.id, other.id] = driver.opened(one.local_hardware_id, Exported(handle, offset))
            except DriverError as error:
                raise DriverError(f"{names[0]} cannot open the memory of {names[1]} ({error})") from error
    return found


def _told(make: Callable[[], Any]) -> tuple[list[Any], str | None]:
    """What each process makes, in their order; and why the first that could not did not."""
    try:
        said = {"made": make()}
    except DriverError as error:
        said = {"failed": f"process {jax.process_index()}: {error}"}
    encoded = json.dumps(said).encode()
    assert len(encoded) <= MAX_BYTES, len(encoded)
    words = np.zeros(MAX_BYTES, np.uint8)
    words[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    heard = [json.loads(bytes(one).rstrip(b"\0")) for one in multihost_utils.process_allgather(words)]
    failed = next((one["failed"] for one in heard if "failed" in one), None)
    return [one.get("made") for one in heard], failed
