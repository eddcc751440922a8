"""All-reduce and all-gather over GPUs that write into each other's memory.

One kernel does each: no barrier before it, and no copy or second kernel after it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require,
    require_axes,
    require_number,
    require_one_of,
    require_shape,
    unsupported,
)
from pallas_kernels.collectives.peer_memory import PeerMemory
from pallas_kernels.collectives.ptx.all_gather import all_gather_kernel
from pallas_kernels.collectives.ptx.all_reduce import Norm, all_reduce_kernel
from pallas_kernels.collectives.ptx.exchange import Exchange
from pallas_kernels.collectives.support import why_not_all_gather_kernel, why_not_all_reduce_kernel

# Two H100, one process each, bf16 rows of 4,096: 256 rows take 9.7 us in one shot and 10.4
# in two; 1,024 take 34.3 and 32.1, with the norm 38.1 and 31.5; 2,048 take 75.6 and 64.6, with the norm 86.6
# and 67.6. Both send the same number of bytes, but in one shot both devices add all rows.
ONE_SHOT_BYTES = 1 << 22
# More than two devices send fewer bytes in two shots. The model: bytes take the time of NVLink's 450 GB/s,
# the second wait up to 1 us. Four H100 (mesh-four) agree: 256 rows take 28.5 us in one shot and 13.8 in two,
# 64 rows with the norm 13.4 and 9.9. So do eight H200, one process each (mesh-eight), with the norm: 64 rows
# take 22.8 us in one shot and 7.9 in two, 8 rows 6.7 and 7.1. Where both take about as long, 8 rows of 8,192,
# 9.8 and 10.5 (in one process 26.0 and 21.3).
LINK_BYTES_PER_US, WAIT_US = 450_000, 1


def default_shots(rows: int, width: int, devices: int) -> int:
    """Return the number of shots for a sum: 1 for few rows, else 2.

    Args:
        rows: Number of rows of 16-bit numbers.
        width: Number of columns.
        devices: Number of devices that sum.
    """
    num_bytes = 2 * rows * width
    in_one, in_two = (bytes_sent(num_bytes, devices, shots) for shots in (1, 2))
    return 2 if num_bytes > ONE_SHOT_BYTES or in_one - in_two > WAIT_US * LINK_BYTES_PER_US else 1


def bytes_sent(num_bytes: int, devices: int, shots: int) -> float:
    """Return the number of bytes that each device sends to sum an array of `num_bytes` bytes."""
    return num_bytes * (devices - 1) * (1.0 if shots == 1 else 2 / devices)


def all_reduce(
    x: Float[Array, "rows width"],
    peers: PeerMemory,
    *,
    axis_name: str | tuple[str, ...],
    shots: int | None = None,
) -> Float[Array, "rows width"]:
    """Return the sum of all devices' x along an axis, inside `jax.shard_map`, as `jax.lax.psum` does.

    Numbers are added in f32 in the order of the devices and rounded once, so all devices get the same bits.
    All devices must make the same calls in the same order, and of two calls with the same PeerMemory one must
    depend on the other's result, as the sums of a decoder do: XLA may overlap or reorder independent calls. A
    device waits about 80 seconds for the others; then its program fails.

    Where a program is compiled for another platform than NVIDIA GPUs, XLA sums.

    Args:
        x: Array of 16-bit numbers.
        peers: This device's shard of the peer memory.
        axis_name: Static: the axis or axes that `peers` was made for.
        shots: Static: 1 = each device sends all rows to all others and adds all rows; 2 = each row is sent to
            one device, which adds it and sends the sum to all others: fewer bytes from 3 devices on, but a
            second wait. None = `default_shots`. The results are equal, except that the sign of a zero may
            differ.

    Raises:
        ValueError: If `peers` is for another number of devices, or `shots` is not 1, 2 or None.
        NotImplementedError: If there is no kernel for the arguments; the message says why.

    Source: vLLM `custom_all_reduce` (one-shot and two-shot), with words sent as in TensorRT-LLM.
    """
    exchange = _checked_exchange("all_reduce", x, peers, axis_name, shots=shots)
    if exchange.rows == 0:
        return x
    x = forbid_kernel_derivative(x, "all_reduce", "Use jax.lax.psum")
    (out,) = all_reduce_kernel.by_platform(
        peers.table.reshape(-1), x, exchange=exchange, norm=None, axis_name=axis_name
    )
    return out


def all_reduce_rms_norm(
    x: Float[Array, "rows width"],
    residual: Float[Array, "rows width"],
    weight: Float[Array, " width"],
    peers: PeerMemory,
    *,
    axis_name: str | tuple[str, ...],
    eps: float,
    is_offset: bool = False,
    rounds_once: bool = False,
    shots: int | None = None,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """Return `residual + all_reduce(x)` and its RMS norm.

    Args:
        x: Array of 16-bit numbers; see `all_reduce` for the rules on calls.
        residual: Residual stream in x's dtype, the same on all devices.
        weight: Weight of the norm in x's dtype.
        peers: This device's shard of the peer memory.
        axis_name: Static: the axis or axes that `peers` was made for.
        eps: Static: number that is added to the mean square.
        is_offset: Static: whether the factor is 1 + weight (Gemma).
        rounds_once: Static: whether only the product with the weight is rounded; else the normalized input is
            rounded, too (Llama).
        shots: Static: number of shots; see `all_reduce`.

    Raises:
        ValueError: If shapes or dtypes disagree, or for the reasons of `all_reduce`.
        NotImplementedError: If there is no kernel for the arguments; the message says why.

    Source: vLLM `fused_add_rms_norm` after its all-reduce.
    """
    require_number(eps=eps)
    require_shape("residual", residual.shape, x.shape, "as x")
    require_shape("weight", weight.shape, x.shape[-1:], "width of x")
    for name, array in (("residual", residual), ("weight", weight)):
        require(array.dtype == x.dtype, f"{name}'s dtype", f"be {x.dtype.name}, as x", array.dtype.name)
    exchange = _checked_exchange("all_reduce_rms_norm", x, peers, axis_name, shots=shots)
    if exchange.rows == 0:
        return x, x
    arrays = forbid_kernel_derivative((x, residual, weight), "all_reduce_rms_norm", "Use jax.lax.psum")
    stream, normed = all_reduce_kernel.by_platform(
        peers.table.reshape(-1),
        *arrays,
        exchange=exchange,
        norm=Norm(float(eps), is_offset, rounds_once),
        axis_name=axis_name,
    )
    return stream, normed


def all_gather(
    x: Float[Array, "rows width"], peers: PeerMemory, *, axis_name: str | tuple[str, ...]
) -> Float[Array, "devices rows width"]:
    """Return all devices' x along an axis, inside `jax.shard_map`, as `jax.lax.all_gather` does.

    The function has no gradient. See `all_reduce` for the rules on calls.

    Args:
        x: Array of f32. The number -4.6e-41, whose bits mark words that have not arrived, becomes 0.
        peers: This device's shard of the peer memory. An f32 counts as two of its 16-bit numbers.
        axis_name: Static: the axis or axes that `peers` was made for.

    Raises:
        ValueError: If `peers` is for another number of devices.
        NotImplementedError: If there is no kernel for the arguments; the message says why.

    Source: vLLM `CustomAllreduce`'s shared buffer, with the words of `all_reduce`.
    """
    exchange = _checked_exchange(
        "all_gather",
        x,
        peers,
        axis_name,
        shots=1,
        why_not=why_not_all_gather,
        fix="Use jax.lax.all_gather",
    )
    if exchange.rows == 0:
        return jnp.zeros((exchange.devices, *x.shape), x.dtype)
    x = forbid_kernel_derivative(x, "all_gather", "Use jax.lax.all_gather")
    return all_gather_kernel.by_platform(peers.table.reshape(-1), x, exchange=exchange, axis_name=axis_name)


def why_not_all_gather(x: Float[Array, "rows width"], peers: PeerMemory) -> str | None:
    """Return why no kernel gathers x, or None if one does; depends only on shapes and dtypes."""
    exchange = _make_exchange(x, peers)
    return why_not_all_gather_kernel(
        dtype=x.dtype,
        width=x.shape[1],
        bytes_needed=exchange.bytes_needed,
        block_bytes=exchange.block_bytes,
    )


def why_not_all_reduce(x: Float[Array, "rows width"], peers: PeerMemory) -> str | None:
    """Return why no kernel sums x, or None if one does; depends only on shapes and dtypes."""
    exchange = _make_exchange(x, peers)
    return why_not_all_reduce_kernel(
        dtype=x.dtype,
        width=x.shape[1],
        bytes_needed=exchange.bytes_needed,
        block_bytes=exchange.block_bytes,
    )


def _checked_exchange(
    function_name: str,
    x: jax.Array,
    peers: PeerMemory,
    axis_name: str | tuple[str, ...],
    *,
    shots: int | None,
    why_not: Callable[[jax.Array, PeerMemory], str | None] = why_not_all_reduce,
    fix: str = "Use jax.lax.psum",
) -> Exchange:
    """Check a call's arguments and return its exchange; see `all_reduce` for the errors."""
    devices, rule = lax.axis_size(axis_name), "be for the devices of the axis"
    require(
        devices == peers.devices, "peers", f"{rule} {axis_name!r} ({devices})", f"{peers.devices} devices"
    )
    require_axes(2, x=x)
    reason = why_not(x, peers)
    if reason is not None:
        raise unsupported(function_name, reason, fix)
    if shots is None:
        shots = default_shots(x.shape[0], x.shape[1], devices)
    require_one_of("shots", shots, (1, 2))
    return _make_exchange(x, peers, shots)


def _make_exchange(x: jax.Array, peers: PeerMemory, shots: int = 1) -> Exchange:
    """Return the exchange of x's rows, counted in 16-bit numbers."""
    rows, width = x.shape
    return Exchange(rows, width * x.dtype.itemsize // 2, peers.devices, peers.block_bytes, shots)
