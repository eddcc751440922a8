"""What memory caches may take: more than there is ends the process, and no error of Python says why."""

import os
from typing import Any

import jax

from jattn.parallel import num_local_parts
from pallas_kernels.checks import require


def require_fits(name: str, value: int, cache_bytes: int, model: Any) -> None:
    """Caches must fit the memory of a device, whatever else is there; unknown memory is enough.

    Args:
        name: What was asked for, for the message.
        value: Its value.
        cache_bytes: That it makes of caches, on each device.
        model: Whose caches.

    Raises:
        ValueError: They do not.
    """
    most = memory_of_device(model)
    rule = f"fit the memory of a device ({most} bytes; these caches take {cache_bytes})"
    require(most is None or cache_bytes <= most, name, rule, value)


def memory_of_device(model: Any) -> int | None:
    """All memory of each of a model's devices, in bytes; None where it is unknown.

    Devices of a CPU share the host's.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu" or device.memory_stats():
        return (device.memory_stats() or {}).get("bytes_limit") or None  # 0: of allocators without a limit
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_parts(model)
