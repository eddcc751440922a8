"""In how many shots devices sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.checks import (
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
from pallas_kernels.collectives.support import why_no_all_gather_kernel, why_no_all_reduce_kernel
from pallas_kernels.derivatives import forbid_kernel_derivative

# Two H100, a process each (mesh-two-shots), bf16 rows of 4,096: 256 take 9.7 us in one shot and 10.4 in two,
# 1,024 take 34.3 and 32.1, with the norm 38.1 and 31.5, 2,048 75.6 and 64.6, 86.6 and 67.6. They send as many
# bytes, but in one shot both add all of the rows.
BYTES_OF_TWO = 1 << 22
# More than two devices send fewer in two shots. Reckoned: bytes take the time of NVLink's 450 GB/s, the
# second wait up to 1 us. Four H100 (mesh-four) agree: 256 rows take 28.5 us in one shot and 13.8 in two, 64
# with the norm 13.4 and 9.9; of 8, and of one, it is the host that takes longest.
LINK_BYTES_PER_US, WAIT_US = 450_000, 1


def default_shots(rows: int, width: int, devices: int) -> int:
    """1 for few rows, else 2.

    Args:
        rows: Of 16-bit numbers.
        width: Of a row.
        devices: That sum.
    """
    of_rows = 2 * rows * width
    in_one, in_two = (bytes_sent(of_rows, devices, shots) for shots in (1, 2))
    return 2 if of_rows > BYTES_OF_TWO or in_one - in_two > WAIT_US * LINK_BYTES_PER_US else 1


def bytes_sent(of_rows: int, devices: int, shots: int) -> float:
    """By each device, of rows of so many bytes."""
    return of_rows * (devices - 1) * (1.0 if shots == 1 else 2 / devices)


def all_reduce(
    x: Float[Array, "rows width"],
    peers: PeerMemory,
    *,
    axis_name: str | tuple[str, ...],
    shots: int | None = None,
) -> Float[Array, "rows width"]:
    """The sum of all devices' x along an axis, inside `jax.shard_map`; as jax.lax.psum.

    Numbers are added in f32 in the devices' order and rounded once: all devices have the same bits. They must
    make the same calls in the same order, and of two calls with one PeerMemory one must depend on the other's
    result, as the sums of a decoder do: XLA may run at once, or turn round, what does not. A device waits for
    the others about 80 seconds; then its program fails, and all of it with that.

    Args:
        x: Of 16-bit numbers.
        peers: This device's part.
        axis_name: Static: the axis that peers was made for, or several.
        shots: Static: 1 = each device sends all rows to all others, and adds all; 2 = each row is sent to one
            device, which adds and sends the sum to all others: fewer bytes from 3 devices on, one wait more.
            None = `default_shots`. The numbers are the same, but for zeros whose sign may differ.

    Raises:
        ValueError: peers is for another number of devices, or shots is neither.
        NotImplementedError: There is no kernel for this request; the message says why.

    Source: vLLM `custom_all_reduce` with one shot or two, by words as TensorRT-LLM sends them. Where a
    program is compiled for no NVIDIA GPU, XLA sums.
    """
    of = _exchange("all_reduce", x, peers, axis_name, shots=shots)
    if of.rows == 0:
        return x
    x = forbid_kernel_derivative(x, "all_reduce", "Use jax.lax.psum")
    (out,) = all_reduce_kernel.by_platform(peers.table.reshape(-1), x, of=of, norm=None, axis_name=axis_name)
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
    """`residual + all_reduce(x)`, and that over its root mean square times a weight.

    Args:
        x: As all_reduce has it.
        residual: In x's dtype; the same on all devices.
        weight: Of the norm, in x's dtype.
        peers: As all_reduce has it; and so all that is said there of calls.
        axis_name: Static: the axis that peers was made for, or several.
        eps: Static: added to the mean square.
        is_offset: Static: the factor is 1 + weight (Gemma).
        rounds_once: Static: the product is rounded; else the normalised input, too (Llama).
        shots: As all_reduce has it.

    Raises:
        ValueError: Shapes or dtypes disagree, or as all_reduce.
        NotImplementedError: As all_reduce.

    Source: vLLM `fused_add_rms_norm` behind its all-reduce.
    """
    require_number(eps=eps)
    require_shape("residual", residual.shape, x.shape, "as x")
    require_shape("weight", weight.shape, x.shape[-1:], "width of x")
    for name, array in (("residual", residual), ("weight", weight)):
        require(array.dtype == x.dtype, f"{name}'s dtype", f"be {x.dtype.name}, as x", array.dtype.name)
    of = _exchange("all_reduce_rms_norm", x, peers, axis_name, shots=shots)
    if of.rows == 0:
        return x, x
    given = forbid_kernel_derivative((x, residual, weight), "all_reduce_rms_norm", "Use jax.lax.psum")
    norm = Norm(float(eps), is_offset, rounds_once)
    arrays = peers.table.reshape(-1), *given
    stream, normed = all_reduce_kernel.by_platform(*arrays, of=of, norm=norm, axis_name=axis_name)
    return stream, normed


def all_gather(
    x: Float[Array, "rows width"], peers: PeerMemory, *, axis_name: str | tuple[str, ...]
) -> Float[Array, "devices rows width"]:
    """All devices' x along an axis, inside `jax.shard_map`; as jax.lax.all_gather. It has no gradient.

    Args:
        x: Of f32, of which -4.6e-41, whose bits are a word that is never sent, becomes 0.
        peers: As all_reduce has it; and so all that is said there of calls. Its rows are of 16-bit numbers,
            of which one of f32 is two.
        axis_name: Static: what peers was made for.

    Raises:
        ValueError: peers is for another number of devices.
        NotImplementedError: There is no kernel for this request; the message says why.

    Source: vLLM `CustomAllreduce`'s shared buffer, by the words of all_reduce.
    """
    asked: Any = {"why_not": why_not_all_gather, "instead": "jax.lax.all_gather gathers it"}
    of = _exchange("all_gather", x, peers, axis_name, shots=1, **asked)
    if of.rows == 0:
        return jnp.zeros((of.devices, *x.shape), x.dtype)
    x = forbid_kernel_derivative(x, "all_gather", "Use jax.lax.all_gather")
    return all_gather_kernel.by_platform(peers.table.reshape(-1), x, of=of, axis_name=axis_name)


def why_not_all_gather(x: Float[Array, "rows width"], peers: PeerMemory) -> str | None:
    """Why there is no kernel that gathers it; None if there is. Only shapes and dtypes are looked at."""
    return why_no_all_gather_kernel(dtype=x.dtype, width=x.shape[1], **_memory_of(x, peers))


def why_not_all_reduce(x: Float[Array, "rows width"], peers: PeerMemory) -> str | None:
    """Why there is no kernel for a sum; None if there is. Only shapes and dtypes are looked at."""
    return why_no_all_reduce_kernel(dtype=x.dtype, width=x.shape[1], **_memory_of(x, peers))


def _exchange(
    what: str,
    x: jax.Array,
    peers: PeerMemory,
    axis_name: str | tuple[str, ...],
    *,
    shots: int | None,
    why_not: Callable[[jax.Array, PeerMemory], str | None] = why_not_all_reduce,
    instead: str = "jax.lax.psum sums it",
) -> Exchange:
    """See all_reduce's Raises."""
    devices, rule = lax.axis_size(axis_name), "be for the devices of the axis"
    require(
        devices == peers.devices, "peers", f"{rule} {axis_name!r} ({devices})", f"{peers.devices} devices"
    )
    require_axes(2, x=x)
    reason = why_not(x, peers)
    if reason is not None:
        raise unsupported(what, reason, instead)
    if shots is None:
        shots = default_shots(x.shape[0], x.shape[1], devices)
    require_one_of("shots", shots, (1, 2))
    return _exchange_of(x, peers, shots)


def _exchange_of(x: jax.Array, peers: PeerMemory, shots: int = 1) -> Exchange:
    """Of rows as 16-bit numbers."""
    rows, width = x.shape
    return Exchange(rows, width * x.dtype.itemsize // 2, peers.devices, peers.block_bytes, shots)


def _memory_of(x: jax.Array, peers: PeerMemory) -> dict[str, int]:
    """What of a thread block's memory is needed, and what there is."""
    of = _exchange_of(x, peers)
    return {"bytes_needed": of.bytes_needed, "block_bytes": of.block_bytes}
