"""Which sums and which devices all_reduce serves."""

import ctypes
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.support import DTYPES, GPU_PLATFORMS, why_not_device

MAX_PEERS = 8


def why_not_peers(devices: Sequence[jax.Device], count: int) -> str | None:
    """Why devices cannot write into each other's memory, as all_reduce does; None if they can, or need not.

    Args:
        devices: Of a mesh.
        count: Of them, that sum together.
    """
    if len({device.process_index for device in devices}) > 1:
        return "devices are of several processes, and addresses mean something in one"
    if count > MAX_PEERS:
        return f"{count} devices would sum together (at most {MAX_PEERS})"
    gpus = [device for device in devices if device.platform in GPU_PLATFORMS]
    unfit = next(filter(None, map(why_not_device, gpus)), None)
    return unfit if unfit is not None or len(gpus) < 2 else _why_no_reach(gpus)


def _why_no_reach(gpus: Sequence[jax.Device]) -> str | None:
    """Why a GPU cannot address another's memory, by the driver, which XLA asks before it opens the way."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver to ask whether GPUs reach each other's memory"
    for one, other in itertools.permutations(gpus, 2):
        numbers, can = [ctypes.c_int(-1), ctypes.c_int(-1)], ctypes.c_int(0)
        for number, gpu in zip(numbers, (one, other), strict=True):
            cuda.cuDeviceGet(ctypes.byref(number), ctypes.c_int(gpu.local_hardware_id))
        failed = cuda.cuDeviceCanAccessPeer(ctypes.byref(can), *numbers)
        if failed or not can.value:
            return f"GPU {one.local_hardware_id} does not reach the memory of GPU {other.local_hardware_id}"
    return None


def why_not_all_reduce(*, dtype: DTypeLike, width: int, bytes_needed: int, block_bytes: int) -> str | None:
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
        (bytes_needed <= block_bytes, f"{bytes_needed} bytes a thread block (peers has {block_bytes})"),
    )
    return next((f"there is no kernel for {what}" for is_served, what in rules if not is_served), None)
