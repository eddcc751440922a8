"""Which sums and which devices all_reduce serves."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.collectives.cuda_driver import Driver, DriverError
from pallas_kernels.collectives.ipc_memory import why_not_shared
from pallas_kernels.support import DTYPES, GPU_PLATFORMS, why_not_device

MAX_PEERS = 8


def why_not_peer_memory(devices: Sequence[jax.Device], count: int) -> str | None:
    """Why devices cannot write into each other's memory, as all_reduce does; None if they can, or need not.

    Where devices are GPUs of several processes, all processes call at once, open a few bytes of each other's
    memory, which they give back, and get the same answer.

    Args:
        devices: Of a mesh.
        count: Of them, that sum together.
    """
    if count > MAX_PEERS:
        return f"{count} devices would sum together (at most {MAX_PEERS})"
    gpus = [device for device in devices if device.platform in GPU_PLATFORMS]
    unfit = next(filter(None, map(why_not_device, gpus)), None)
    if unfit is not None or len(gpus) < 2:
        return unfit
    processes, among = len({device.process_index for device in gpus}), jax.process_count()
    if processes not in (1, among):
        return f"devices are of {processes} of {among} processes (all of them have some, or one has all)"
    return _why_no_reach(gpus) if processes == 1 else why_not_shared(gpus)


def _why_no_reach(gpus: Sequence[jax.Device]) -> str | None:
    """Why a GPU cannot address another's memory, by the driver, which XLA asks before it opens the way."""
    try:
        driver = Driver()
        for one, other in itertools.permutations((gpu.local_hardware_id for gpu in gpus), 2):
            if not driver.reaches(one, other):
                return f"GPU {one} does not reach the memory of GPU {other}"
    except DriverError as error:
        return str(error)
    return None


def why_no_all_reduce_kernel(
    *, dtype: DTypeLike, width: int, bytes_needed: int, block_bytes: int
) -> str | None:
    """Why all_reduce has no kernel; None if it has.

    Args:
        dtype: Of the array.
        width: Of a row.
        bytes_needed: Of a thread block's memory.
        block_bytes: What it has.
    """
    name = jnp.dtype(dtype).name
    rules = (
        (name in DTYPES, f"{name} ({', '.join(DTYPES)} have one)"),
        (width % 4 == 0, f"rows of {width} numbers (multiples of 4 have one)"),
        _fits(bytes_needed, block_bytes),
    )
    return _first_broken(rules)


def why_no_all_gather_kernel(
    *, dtype: DTypeLike, width: int, bytes_needed: int, block_bytes: int
) -> str | None:
    """Why all_gather has no kernel; None if it has. Arguments as why_no_all_reduce_kernel's."""
    rules = (
        (jnp.dtype(dtype) == jnp.float32, f"{jnp.dtype(dtype).name} (float32 has one)"),
        (width % 2 == 0, f"rows of {width} numbers (even ones have one)"),
        _fits(bytes_needed, block_bytes),
    )
    return _first_broken(rules)


def _fits(bytes_needed: int, block_bytes: int) -> tuple[bool, str]:
    return bytes_needed <= block_bytes, f"{bytes_needed} bytes a thread block (peers has {block_bytes})"


def _first_broken(rules: Sequence[tuple[bool, str]]) -> str | None:
    return next((f"there is no kernel for {what}" for is_served, what in rules if not is_served), None)
