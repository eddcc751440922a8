"""Parameters on the device: the file's bytes go there as they are, and become what the model has there."""

import contextlib
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jattn.models.loading.quantized_weights import QuantizedTensor, Tensor
from jattn.models.loading.safetensors_files import StoredTensor
from jattn.models.loading.tensor_layouts import Join
from pallas_kernels.checks import unsupported

type Place = Callable[[np.ndarray], Array]

PIECE = 1 << 26  # bytes of a tensor that are sent to the device at once


def put(view: np.ndarray) -> Array:
    """An array on the device that jax takes by default; never the file's memory, which may change."""
    return jax.device_put(view, may_alias=False)


class OnMesh(NamedTuple):
    """How a mesh holds a parameter.

    Attributes:
        sharding: Where its parts lie.
        spread: Of a host's array that is the parameter on one device, what is cut into parts.
    """

    sharding: NamedSharding
    spread: Callable[[np.ndarray], np.ndarray]

    def put(self, whole: np.ndarray) -> Array:
        """Each device is sent its own part and no more; a process reads those of its own devices."""
        array = self.spread(whole)
        return jax.make_array_from_callback(
            array.shape, self.sharding, lambda index: np.array(array[index]), dtype=array.dtype
        )


def read_parameter(
    tensors: Sequence[Tensor],
    join: Join,
    dtype: np.dtype,
    place: Place = put,
    *,
    on_mesh: "OnMesh | None" = None,
    is_on_host: bool = False,
) -> Array:
    """A parameter, made of tensors of files. The host's memory of their bytes is given back.

    One for a mesh is made on the host, and no device ever holds more than its own part.

    Args:
        tensors: Those that it is.
        join: How it is made of them.
        dtype: Of the parameter.
        place: Puts one array on the device, where there is one.
        on_mesh: How a mesh holds it; None = there is no mesh.
        is_on_host: The device is the host: what is written there stays there, and nothing is placed.

    Raises:
        ValueError: A scale of weights in few bits is no finite number.
    """
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            tensor.check_scales()
    if on_mesh is None and is_on_host:
        array = jax.device_put(_on_host(tensors, join, dtype), may_alias=True)
    elif on_mesh is None:
        array = _read(tensors, join, dtype, place)
    elif _is_stored(tensors, join, dtype):
        array = on_mesh.put(tensors[0].sources[0].view())
    else:
        array = on_mesh.put(_on_host(tensors, join, dtype))
    array.block_until_ready()  # what is on its way to the device is in the host's memory, too
    for tensor in tensors:
        for source in tensor.sources:
            source.release()
    return array


def check_host(mesh: Mesh | None) -> None:
    """Parameters of several devices are made by JAX's CPU backend.

    Raises:
        NotImplementedError: There is a mesh, but no such backend.
    """
    if mesh is None:
        return
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        way_out = "Let it name cpu, too: JAX_PLATFORMS=cuda,cpu"
        raise unsupported("load(mesh=)", f"JAX_PLATFORMS leaves out the host ({error})", way_out) from error


def _on_host(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> np.ndarray:
    stored = [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]
    if join.has_views and len(stored) == len(tensors):
        return write_parameter(stored, join, dtype)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(_read(tensors, join, dtype, jnp.asarray))


def _is_stored(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> bool:
    """Whether one tensor is the parameter, bit by bit."""
    one = tensors[0]
    return join.is_nothing and one.widen is None and one.sources[0].view().dtype == dtype


def _read(tensors: Sequence[Tensor], join: Join, dtype: np.dtype, place: Place) -> Array:
    sources = tuple(tuple(_sent(source, place) for source in tensor.sources) for tensor in tensors)
    if _is_stored(tensors, join, dtype) and len(sources[0][0]) == 1:
        return sources[0][0][0]
    shapes = tuple(tuple(source.shape for source in tensor.sources) for tensor in tensors)
    widen = tuple(tensor.widen for tensor in tensors)
    return _made(sources, shapes=shapes, widen=widen, join=join, dtype=dtype)


def _sent(source: StoredTensor, place: Place) -> tuple[Array, ...]:
    """A tensor on the device, in pieces of some rows: on its way there are never more than two of them."""
    view = source.view()
    if view.nbytes <= PIECE:
        return (place(view),)
    rows = view.reshape(-1, view.shape[-1])
    count = max(1, PIECE // rows[0].nbytes)
    pieces = [rows[first : first + count] for first in range(0, len(rows), count)]
    sent: list[Array] = []
    for number, piece in enumerate(pieces):
        sent.append(place(piece))
        if number:
            sent[number - 1].block_until_ready()
            source.release(pieces[number - 1])
    return tuple(sent)


@functools.partial(jax.jit, static_argnames=("shapes", "widen", "join", "dtype"))
def _made(
    sources: tuple[tuple[tuple[Array, ...], ...], ...],
    *,
    shapes: tuple[tuple[tuple[int, ...], ...], ...],
    widen: tuple[Callable[..., Array] | None, ...],
    join: Join,
    dtype: np.dtype,
) -> Array:
    whole = lambda pieces, shape: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces).reshape(shape)
    parts = [
        whole(of[0], shape[0]) if how is None else how(*map(whole, of, shape))
        for of, shape, how in zip(sources, shapes, widen, strict=True)
    ]
    return join(parts).astype(dtype)


_PIECE = 1 << 22  # bytes that are turned at once, in a core's cache


def write_parameter(tensors: Sequence[StoredTensor], join: Join, dtype: np.dtype) -> np.ndarray:
    """A parameter, made of tensors of files; pages of theirs are given back as soon as they have been read.

    Args:
        tensors: Those that it is, one or more.
        join: How it is made of them; has_views.
        dtype: Of the parameter.
    """
    views = [tensor.view() for tensor in tensors]
    whole = _empty(join.shape, dtype)
    pairs = join.pairs(whole, views)
    owners = tensors if len(tensors) == len(pairs) else [tensors[0]] * len(pairs)
    for (target, source), tensor in zip(pairs, owners, strict=True):
        _write(target, source, tensor)
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of its own, given back when the array goes; in huge pages, if the system has some.

    To be given small pages takes longer than to fill them.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without any
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, num_bytes // dtype.itemsize).reshape(shape)


def _write(target: np.ndarray, source: np.ndarray, tensor: StoredTensor) -> None:
    """Writes a view of a tensor a piece at a time, in the order in which the file has it."""
    if 0 in source.shape:
        return
    if source.ndim == 0:
        target[...] = source
        return
    axis = max(range(source.ndim), key=lambda i: (source.shape[i] > 1, source.strides[i]))
    order = sorted(range(target.ndim), key=lambda i: -target.strides[i])
    is_in_order = target.dtype == source.dtype and source.strides[order[-1]] == source.itemsize
    count = max(1, _PIECE // (source.nbytes // source.shape[axis]))
    for first in range(0, source.shape[axis], count):
        where = (slice(None),) * axis + (slice(first, first + count),)
        piece = source[where].transpose(order)
        target[where].transpose(order)[...] = piece if is_in_order else _turned(piece, target.dtype)
        tensor.release(piece)


def _turned(piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same numbers in C order; JAX turns and casts several times faster than NumPy."""
    array = jax.device_put(piece, jax.local_devices(backend="cpu")[0], may_alias=False)
    return np.asarray(array if array.dtype == dtype else array.astype(dtype))
