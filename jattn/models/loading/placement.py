"""Placement of parameters: stored bytes go to the device, where they become parameters, or to the host."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jattn.models.loading.quantized_weights import Tensor
from jattn.models.loading.safetensors_files import StoredTensor
from jattn.models.loading.tensor_layouts import Join
from pallas_kernels.checks import unsupported

type Put = Callable[[np.ndarray], Array]

TRANSFER_BYTES = 1 << 26  # number of bytes that are sent to the device at a time


def put(view: np.ndarray) -> Array:
    """Copy an array to JAX's default device. The result never aliases the file's memory, which may change."""
    return jax.device_put(view, may_alias=False)


class MeshPlacement(NamedTuple):
    """The placement of a parameter on a mesh.

    Attributes:
        sharding: Sharding of the padded parameter.
        pad_to_mesh: Function that pads a host array of the single-device parameter for the mesh.
    """

    sharding: NamedSharding
    pad_to_mesh: Callable[[np.ndarray], np.ndarray]

    def put(self, parameter: np.ndarray) -> Array:
        """Send each device its shard only. A process reads the shards of its own devices."""
        array = self.pad_to_mesh(parameter)
        return jax.make_array_from_callback(
            array.shape, self.sharding, lambda index: np.array(array[index]), dtype=array.dtype
        )


def read_parameter(
    tensors: Sequence[Tensor],
    join: Join,
    dtype: np.dtype,
    put: Put = put,
    *,
    mesh_placement: "MeshPlacement | None" = None,
) -> Array:
    """Read a parameter from stored tensors and release the host memory of their pages.

    A parameter for a mesh is assembled on the host, so that no device ever holds more than its shard.

    Args:
        tensors: Tensors that the parameter is made of.
        join: Conversion of the tensors to the parameter.
        dtype: Dtype of the parameter.
        put: Function that copies an array to the device, without a mesh.
        mesh_placement: Placement of the parameter on a mesh; None = there is no mesh.
    """
    if mesh_placement is None:
        array = _read(tensors, join, dtype, put)
    elif _is_stored_as_is(tensors, join, dtype):
        array = mesh_placement.put(tensors[0].sources[0].view())
    else:
        array = mesh_placement.put(_on_host(tensors, join, dtype))
    array.block_until_ready()  # a transfer in flight also occupies host memory
    for tensor in tensors:
        for source in tensor.sources:
            source.release()
    return array


def check_host(mesh: Mesh | None) -> None:
    """Require JAX's CPU backend, which assembles the parameters of a mesh.

    Raises:
        NotImplementedError: If there is a mesh and no CPU backend.
    """
    if mesh is None:
        return
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        fix = "Include cpu: JAX_PLATFORMS=cuda,cpu"
        raise unsupported("load(mesh=)", f"JAX has no CPU backend ({error})", fix) from error


def _on_host(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> np.ndarray:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(_read(tensors, join, dtype, jnp.asarray))


def _is_stored_as_is(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> bool:
    """Return whether one stored tensor is the parameter, bit by bit."""
    tensor = tensors[0]
    return join.is_identity and tensor.dequantize is None and tensor.sources[0].view().dtype == dtype


def _read(tensors: Sequence[Tensor], join: Join, dtype: np.dtype, put: Put) -> Array:
    sources = tuple(tuple(_send(source, put) for source in tensor.sources) for tensor in tensors)
    if _is_stored_as_is(tensors, join, dtype) and len(sources[0][0]) == 1:
        return sources[0][0][0]
    source_shapes = tuple(tuple(source.shape for source in tensor.sources) for tensor in tensors)
    dequantize = tuple(tensor.dequantize for tensor in tensors)
    return _assemble(sources, source_shapes=source_shapes, dequantize=dequantize, join=join, dtype=dtype)


def _send(source: StoredTensor, put: Put) -> tuple[Array, ...]:
    """Send a tensor to the device in pieces of some rows, at most two of which are in flight."""
    view = source.view()
    if view.nbytes <= TRANSFER_BYTES:
        return (put(view),)
    rows = view.reshape(-1, view.shape[-1])
    count = max(1, TRANSFER_BYTES // rows[0].nbytes)
    pieces = [rows[first : first + count] for first in range(0, len(rows), count)]
    sent: list[Array] = []
    for i, piece in enumerate(pieces):
        sent.append(put(piece))
        if i:
            sent[i - 1].block_until_ready()
    return tuple(sent)


@functools.partial(jax.jit, static_argnames=("source_shapes", "dequantize", "join", "dtype"))
def _assemble(
    sources: tuple[tuple[tuple[Array, ...], ...], ...],
    *,
    source_shapes: tuple[tuple[tuple[int, ...], ...], ...],
    dequantize: tuple[Callable[..., Array] | None, ...],
    join: Join,
    dtype: np.dtype,
) -> Array:
    """Build a parameter on its device from the pieces of its tensors.

    Args:
        sources: Per tensor and array that it is dequantized from: the pieces that were sent.
        source_shapes: Per tensor and array: the shape of the array.
        dequantize: Per tensor: function of its arrays; None = the tensor is the only array.
        join: Function that joins the tensors to the parameter.
        dtype: Dtype of the parameter.
    """

    def concatenate(pieces: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces).reshape(shape)

    tensors = []
    for tensor_sources, tensor_shapes, function in zip(sources, source_shapes, dequantize, strict=True):
        arrays = list(map(concatenate, tensor_sources, tensor_shapes))
        tensors.append(arrays[0] if function is None else function(*arrays))
    return join(tensors).astype(dtype)
