"""Which arrays and devices the collectives support."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.architectures import GPU_PLATFORMS
from pallas_kernels.collectives.cuda_driver import Driver, DriverError
from pallas_kernels.collectives.ipc_memory import why_not_shared
from pallas_kernels.support import DTYPES, why_not_device

MAX_PEERS = 8


def why_not_peer_memory(devices: Sequence[jax.Device], count: int) -> str | None:
    """Return why devices cannot write into each other's memory, or None if they can or need not.

    If the devices are GPUs of several processes, all processes must call this at the same time. They open a
    few bytes of each other's memory, free them again, and get the same answer.

    Args:
        devices: All devices of a mesh.
        count: Number of devices that sum together.
    """
    if count > MAX_PEERS:
        return f"{count} devices would sum together (at most {MAX_PEERS} are supported)"
    gpus = [device for device in devices if device.platform in GPU_PLATFORMS]
    reason = next(filter(None, (why_not_device(gpu, "all_reduce") for gpu in gpus)), None)
    if reason is not None or len(gpus) < 2:
        return reason
    processes, num_processes = len({device.process_index for device in gpus}), jax.process_count()
    if processes not in (1, num_processes):
        return (
            f"the devices belong to {processes} of {num_processes} processes "
            "(they must belong to one or to all)"
        )
    return _why_not_peer_access(gpus) if processes == 1 else why_not_shared(gpus)


def _why_not_peer_access(gpus: Sequence[jax.Device]) -> str | None:
    """Return why one GPU cannot access another's memory, or None; XLA enables the access itself."""
    try:
        driver = Driver()
        for gpu, peer in itertools.permutations((device.local_hardware_id for device in gpus), 2):
            if not driver.can_access_peer(gpu, peer):
                return f"GPU {gpu} cannot access the memory of GPU {peer}"
    except DriverError as error:
        return str(error)
    return None


def why_not_all_reduce_kernel(
    *, dtype: DTypeLike, width: int, bytes_needed: int, block_bytes: int
) -> str | None:
    """Return why all_reduce has no kernel for an array, or None if it has one.

    Args:
        dtype: Dtype of the array.
        width: Number of columns.
        bytes_needed: Bytes of peer memory that a thread block needs.
        block_bytes: Bytes of peer memory that a thread block has.
    """
    name = jnp.dtype(dtype).name
    rules = (
        (name in DTYPES, f"{name} ({', '.join(DTYPES)} have one)"),
        (width % 4 == 0, f"rows of {width} numbers (multiples of 4 have one)"),
        _fits_memory(bytes_needed, block_bytes),
    )
    return _first_violation(rules)


def why_not_all_gather_kernel(
    *, dtype: DTypeLike, width: int, bytes_needed: int, block_bytes: int
) -> str | None:
    """Return why all_gather has no kernel for an array, or None; see why_not_all_reduce_kernel."""
    rules = (
        (jnp.dtype(dtype) == jnp.float32, f"{jnp.dtype(dtype).name} (float32 has one)"),
        (width % 2 == 0, f"rows of {width} numbers (even ones have one)"),
        _fits_memory(bytes_needed, block_bytes),
    )
    return _first_violation(rules)


def _fits_memory(bytes_needed: int, block_bytes: int) -> tuple[bool, str]:
    return bytes_needed <= block_bytes, f"{bytes_needed} bytes per thread block (peers has {block_bytes})"


def _first_violation(rules: Sequence[tuple[bool, str]]) -> str | None:
    return next(
        (f"there is no kernel for {request}" for is_supported, request in rules if not is_supported), None
    )
