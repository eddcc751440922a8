"""Which sums and which devices all_reduce serves."""

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
    gpus = (device for device in devices if device.platform in GPU_PLATFORMS)
    return next(filter(None, map(why_not_device, gpus)), None)


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
