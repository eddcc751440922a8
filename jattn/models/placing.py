"""Parameters on the device: the file's bytes go there as they are, and become what the model has there."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jattn.models.hf_tensors import Join
from jattn.models.weight_formats import Tensor

type Place = Callable[[np.ndarray], Array]


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
) -> Array:
    """A parameter, made of tensors of files. The host's memory of their bytes is given back.

    One for a mesh is made on the host, and no device ever holds more than its own part.

    Args:
        tensors: Those that it is.
        join: How it is made of them.
        dtype: Of the parameter.
        place: Puts one array on the device, where there is one.
        on_mesh: How a mesh holds it; None = there is no mesh.
    """
    if on_mesh is None:
        array = _read(tensors, join, dtype, place)
    elif _is_stored(tensors, join, dtype):
        array = on_mesh.put(tensors[0].sources[0].view())
    else:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            array = on_mesh.put(np.asarray(_read(tensors, join, dtype, jnp.asarray)))
    array.block_until_ready()  # what is on its way to the device is in the host's memory, too
    for tensor in tensors:
        for source in tensor.sources:
            source.release()
    return array


def _is_stored(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> bool:
    """Whether one tensor is the parameter, bit by bit."""
    one = tensors[0]
    return join.is_nothing and one.widen is None and one.sources[0].view().dtype == dtype


def _read(tensors: Sequence[Tensor], join: Join, dtype: np.dtype, place: Place) -> Array:
    sources = tuple(tuple(place(source.view()) for source in tensor.sources) for tensor in tensors)
    if _is_stored(tensors, join, dtype):
        return sources[0][0]
    return _made(sources, widen=tuple(tensor.widen for tensor in tensors), join=join, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("widen", "join", "dtype"))
def _made(
    sources: tuple[tuple[Array, ...], ...],
    *,
    widen: tuple[Callable[..., Array] | None, ...],
    join: Join,
    dtype: np.dtype,
) -> Array:
    parts = [of[0] if how is None else how(*of) for of, how in zip(sources, widen, strict=True)]
    return join(parts).astype(dtype)
