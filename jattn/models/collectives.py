"""Sums and gathers over a decoder's devices: XLA's, or of a few rows kernels' over memory of their own."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jattn.models.layers import RMSNorm, add_and_norm
from jattn.parallel import ALL_AXES, CP, Axes
from pallas_kernels.checks import require, require_type
from pallas_kernels.support import GPU_PLATFORMS

if TYPE_CHECKING:
    from pallas_kernels.collectives import PeerMemory


class PeerVariable(nnx.Variable[Any]):
    """No weight: part of the memory that devices write to each other."""


class PeerArrays(nnx.Module):
    """PeerMemory as part of a model, so that it reaches whatever runs it."""

    def __init__(self, peers: "PeerMemory") -> None:
        """Wraps the arrays."""
        self.table, self.memory = PeerVariable(peers.table), PeerVariable(peers.memory)

    @property
    def here(self) -> "PeerMemory":
        """The arrays; inside shard_map this device's parts."""
        from pallas_kernels.collectives import PeerMemory

        return PeerMemory(self.table[...], self.memory[...])


class Peers(nnx.Module):
    """What a model's devices write to.

    Attributes:
        sums: For sums over all of them.
        ranks: For log-sum-exps of those that hold a request's keys together; None where one does.
    """

    def __init__(self, sums: "PeerMemory", ranks: "PeerMemory | None") -> None:
        """Wraps them."""
        self.sums = PeerArrays(sums)
        self.ranks = None if ranks is None else PeerArrays(ranks)


# A gather's thread blocks take a row at a time, however narrow: beyond this XLA's may be quicker; not timed.
MAX_ROWS_OF_RANKS = 256


def use_peer_memory(model: Any, *, max_rows: int = 2048) -> None:
    """Lets a model's layers sum by `pallas_kernels.collectives` in steps of up to so many tokens.

    A model whose `peers` are None sums by XLA. In larger steps, and where the model's numbers have not 16
    bits, XLA sums as before. With cp ranks exchange their log-sum-exps so, too, of up to 256 tokens. To be
    called before an engine is made of the model; the memory is the model's from then on: on each device
    4 * max_rows * hidden_size bytes for each of them, 67 MB on two with a hidden_size of 4,096. Where the
    devices are of several processes, all of these call at once.

    Args:
        model: A decoder on a mesh (`jattn.models.load`), of GPUs of one host that reach each other by NVLink.
        max_rows: Tokens of a step, at most.

    Raises:
        ValueError: The model is on no mesh, or max_rows is no positive int.
        NotImplementedError: Its devices cannot write into each other's memory; the message says why.
    """
    from pallas_kernels import collectives

    require_type("max_rows", max_rows, int, "tokens of a step")
    mesh = getattr(model, "mesh", None)
    require(mesh is not None, "model", "be on a mesh (load(DIR, mesh=))", mesh)
    make = functools.partial(collectives.make_peer_memory, model.mesh)
    all_sums, ranks = make(ALL_AXES, max_rows=max_rows, width=model.config.hidden_size), None
    if model.mesh.shape[CP] > 1:
        of_heads = 2 * model.config.num_attention_heads  # f32, in 16-bit numbers; a device has some of them
        ranks = make(CP, max_rows=min(max_rows, MAX_ROWS_OF_RANKS), width=of_heads + of_heads % 4)
    model.peers = nnx.data(Peers(all_sums, ranks))


def why_no_peer_memory(model: Any) -> str | None:
    """Why nothing is gained by `use_peer_memory`, or it would raise; None if it serves.

    All processes that the model's devices are of call at once, and get the same answer.

    Args:
        model: A decoder, or its shapes.
    """
    from pallas_kernels import collectives

    mesh = getattr(model, "mesh", None)
    if mesh is None or mesh.size == 1:
        return "there is nothing to sum"
    if not isinstance(model.embed_tokens.embedding.get_value(), jax.Array):
        return "the model has shapes alone"
    devices = list(mesh.devices.flat)
    if any(device.platform not in GPU_PLATFORMS for device in devices):
        return "devices are no NVIDIA GPUs"
    sizes = {"width": model.config.hidden_size, "bytes_needed": 0, "block_bytes": 0}
    why_no_kernel = collectives.why_no_all_reduce_kernel(dtype=model.dtype, **sizes)
    return why_no_kernel or collectives.why_not_peer_memory(devices, mesh.size)


def summed(
    x: Float[Array, "tokens hidden"], axis_name: Axes | None, peers: "PeerMemory | None"
) -> Float[Array, "tokens hidden"]:
    """The sum of all devices' x inside shard_map; x itself where there is no axis."""
    if axis_name is None:
        return x
    if peers is None:
        return jax.lax.psum(x, axis_name)
    from pallas_kernels import collectives

    if collectives.why_not_all_reduce(x, peers) is not None:
        return jax.lax.psum(x, axis_name)
    return collectives.all_reduce(x, peers, axis_name=axis_name)


def of_first_device(
    x: Float[Array, "tokens hidden"], axis_name: Axes | None
) -> Float[Array, "tokens hidden"]:
    """Parts of a sum that is x, which all devices have."""
    return jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))


def sum_add_and_norm(
    x: Float[Array, "tokens hidden"],
    part: Float[Array, "tokens hidden"],
    norm: Any,
    *,
    axis_name: Axes | None,
    peers: "PeerMemory | None",
    may_take_kernel: bool,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """The stream x with all devices' parts added, and that normalised: by one kernel where it can.

    Args:
        x: The stream, which all devices have.
        part: This device's.
        norm: Of the next part of the model.
        axis_name: As `summed`.
        peers: As `summed`.
        may_take_kernel: Static: of `add_and_norm`, too.
    """
    is_served = isinstance(norm, RMSNorm) and x.dtype == norm.weight.dtype == part.dtype
    if axis_name is None or peers is None or not is_served:
        return add_and_norm(x, summed(part, axis_name, peers), norm, may_take_kernel=may_take_kernel)
    from pallas_kernels import collectives

    if collectives.why_not_all_reduce(part, peers) is not None:
        return add_and_norm(x, summed(part, axis_name, peers), norm, may_take_kernel=may_take_kernel)
    return collectives.all_reduce_rms_norm(
        part,
        x,
        norm.weight[...],
        peers,
        axis_name=axis_name,
        eps=norm.eps,
        is_offset=norm.is_offset,
        rounds_once=norm.rounds_once,
    )
