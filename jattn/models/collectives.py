"""All-reduces over a decoder's devices: by XLA, or for few rows by kernels over peer memory."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jattn.models.layers import RMSNorm, add_and_norm
from jattn.parallel import ALL_AXES, CP, Axes
from pallas_kernels.architectures import GPU_PLATFORMS
from pallas_kernels.checks import require_type

if TYPE_CHECKING:
    from pallas_kernels.collectives import PeerMemory


class PeerVariable(nnx.Variable[Any]):
    """Peer memory in a model's state, which is not a weight."""


class PeerMemoryModule(nnx.Module):
    """PeerMemory as a module, so that it is part of the model's state."""

    def __init__(self, peers: "PeerMemory") -> None:
        """Store the arrays as variables."""
        self.table, self.memory = PeerVariable(peers.table), PeerVariable(peers.memory)

    @property
    def local(self) -> "PeerMemory":
        """The arrays; inside shard_map this device's shards."""
        from pallas_kernels.collectives import PeerMemory

        return PeerMemory(self.table[...], self.memory[...])


class Peers(nnx.Module):
    """The peer memory of a model's devices.

    Attributes:
        all_reduce_memory: Memory for all-reduces over all devices.
        lse_memory: Memory for exchanging log-sum-exps between context-parallel ranks; None without context
            parallelism.
    """

    def __init__(self, all_reduce_memory: "PeerMemory", lse_memory: "PeerMemory | None") -> None:
        """Store the memory as modules."""
        self.all_reduce_memory = PeerMemoryModule(all_reduce_memory)
        self.lse_memory = None if lse_memory is None else PeerMemoryModule(lse_memory)


# A gather's thread blocks process one row at a time, however narrow. XLA may be faster beyond this (not
# measured).
MAX_RANK_EXCHANGE_ROWS = 256


def use_peer_memory(model: Any, *, max_rows: int = 2048) -> None:
    """Make a model's layers all-reduce with `pallas_kernels.collectives` in steps of up to max_rows tokens.

    XLA does the all-reduces of larger steps, of models that are not 16-bit, and of models without peer
    memory. With cp, ranks also exchange the log-sum-exps of up to 256 tokens through peer memory. Call this
    before creating an engine. The model keeps the memory: on each device 4 * max_rows * hidden_size bytes per
    device of the mesh, 67 MB on two devices with a hidden_size of 4,096. With several processes, all must
    call this at the same time.

    Args:
        model: A decoder on a mesh (`jattn.models.load`) of GPUs of one host that are connected by NVLink.
        max_rows: Maximum number of tokens per step.

    Raises:
        ValueError: If the model is not on a mesh, or max_rows is not a positive int.
        NotImplementedError: If the devices cannot write into each other's memory. The message says why.
    """
    from pallas_kernels import collectives

    require_type("max_rows", max_rows, int, "tokens of a step")
    mesh = getattr(model, "mesh", None)
    if mesh is None:
        raise ValueError("use_peer_memory requires a model on a mesh. Load it with load(DIR, mesh=...).")
    make = functools.partial(collectives.make_peer_memory, model.mesh)
    all_reduce_memory, lse_memory = make(ALL_AXES, max_rows=max_rows, width=model.config.hidden_size), None
    if model.mesh.shape[CP] > 1:
        width = 2 * model.config.num_attention_heads  # one f32 per head, counted in 16-bit elements
        lse_memory = make(CP, max_rows=min(max_rows, MAX_RANK_EXCHANGE_ROWS), width=width + width % 4)
    model.peers = nnx.data(Peers(all_reduce_memory, lse_memory))


def why_not_peer_memory(model: Any) -> str | None:
    """Return why `use_peer_memory` has no benefit or would raise, or None if it can be used.

    With several processes, all must call this at the same time, and get the same answer.

    Args:
        model: A decoder, with weights or abstract.
    """
    from pallas_kernels import collectives

    mesh = getattr(model, "mesh", None)
    if mesh is None or mesh.size == 1:
        return "the model is on one device, so that there are no all-reduces"
    if not isinstance(model.embed_tokens.embedding.get_value(), jax.Array):
        return "the model has no weights"
    devices = list(mesh.devices.flat)
    if any(device.platform not in GPU_PLATFORMS for device in devices):
        return "the devices are not NVIDIA GPUs"
    sizes = {"width": model.config.hidden_size, "bytes_needed": 0, "block_bytes": 0}
    why_not_all_reduce_kernel = collectives.why_not_all_reduce_kernel(dtype=model.dtype, **sizes)
    return why_not_all_reduce_kernel or collectives.why_not_peer_memory(devices, mesh.size)


def all_reduce_sum(
    x: Float[Array, "tokens hidden"], axis_name: Axes | None, peers: "PeerMemory | None"
) -> Float[Array, "tokens hidden"]:
    """Return the sum of all devices' x inside shard_map, or x if axis_name is None."""
    if axis_name is None:
        return x
    if peers is None:
        return jax.lax.psum(x, axis_name)
    from pallas_kernels import collectives

    if collectives.why_not_all_reduce(x, peers) is not None:
        return jax.lax.psum(x, axis_name)
    return collectives.all_reduce(x, peers, axis_name=axis_name)


def zero_except_first_device(
    x: Float[Array, "tokens hidden"], axis_name: Axes | None
) -> Float[Array, "tokens hidden"]:
    """Return x on the first device and zeros on all others, so that the sum over devices is x."""
    return jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))


def all_reduce_add_and_norm(
    x: Float[Array, "tokens hidden"],
    partial: Float[Array, "tokens hidden"],
    norm: Any,
    *,
    axis_name: Axes | None,
    peers: "PeerMemory | None",
    allow_kernel: bool,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """Add the sum of all devices' `partial` to x and return it and its norm; by one kernel where supported.

    Args:
        x: The residual stream, replicated on all devices.
        partial: This device's summand.
        norm: Norm before the next attention or MLP.
        axis_name: Mesh axes to sum over; None = `partial` is complete.
        peers: This device's peer memory; None = XLA sums.
        allow_kernel: Whether `add_and_norm` may use its kernel; static.
    """
    is_supported = isinstance(norm, RMSNorm) and x.dtype == norm.weight.dtype == partial.dtype
    if axis_name is None or peers is None or not is_supported:
        return add_and_norm(x, all_reduce_sum(partial, axis_name, peers), norm, allow_kernel=allow_kernel)
    from pallas_kernels import collectives

    if collectives.why_not_all_reduce(partial, peers) is not None:
        return add_and_norm(x, all_reduce_sum(partial, axis_name, peers), norm, allow_kernel=allow_kernel)
    return collectives.all_reduce_rms_norm(
        partial,
        x,
        norm.weight[...],
        peers,
        axis_name=axis_name,
        eps=norm.eps,
        is_offset=norm.is_offset,
        rounds_once=norm.rounds_once,
    )
