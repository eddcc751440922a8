"""Parameters on the device: the file's bytes go there as they are, and become what the model has there."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jattn.models.hf_tensors import Join
from jattn.models.stored_tensors import StoredTensor
from jattn.models.weight_formats import Tensor

type Place = Callable[[np.ndarray], Array]
# Pages are faulted in and copied by one core a parameter; a few of them reach what the memory gives.
NUM_READERS = 4


def put(view: np.ndarray) -> Array:
    """An array on the device that jax takes by default; never the file's memory, which may change."""
    return jax.device_put(view, may_alias=False)


def put_parts(sharding: NamedSharding) -> Place:
    """Places an array as a mesh holds it: each device is sent its own part and no more."""
    return lambda view: jax.device_put(view, sharding, may_alias=False)


def each_at_once[Of, Made](make: Callable[[Of], Made], of: Sequence[Of]) -> Iterator[Made]:
    """What a function makes of each, in order, `NUM_READERS` of them at a time, each by a thread of its own.

    Threads take jax's default device from their caller. An error ends it, with what has not begun.
    """
    device = jax.config.jax_default_device

    def on_device(one: Of) -> Made:
        with jax.default_device(device):
            return make(one)

    pool = concurrent.futures.ThreadPoolExecutor(NUM_READERS)
    try:
        yield from pool.map(on_device, of)
    finally:
        pool.shutdown(cancel_futures=True)


def read_parameter(
    tensors: Sequence[Tensor],
    join: Join,
    dtype: np.dtype,
    place: Place = put,
    *,
    sharding: NamedSharding | None = None,
) -> Array:
    """A parameter, made of tensors of files. The host's memory of their bytes is given back.

    One for a mesh is made on the host, and no device ever holds more than its own part.

    Args:
        tensors: Those that it is.
        join: How it is made of them.
        dtype: Of the parameter.
        place: Puts one array on the device, where there is one.
        sharding: Where a mesh holds it; None = there is no mesh.
    """
    if sharding is None:
        array = _read(tensors, join, dtype, place)
    elif _is_stored(tensors, join, dtype):
        array = _read(tensors, join, dtype, put_parts(sharding))
    else:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            array = put_parts(sharding)(np.asarray(_read(tensors, join, dtype, jnp.asarray)))
    return array.block_until_ready()


def _taken(source: StoredTensor, place: Place) -> Array:
    """A tensor of a file, placed; its pages are given back before it is joined with others."""
    array = place(source.view()).block_until_ready()
    source.release()
    return array


def _is_stored(tensors: Sequence[Tensor], join: Join, dtype: np.dtype) -> bool:
    """Whether one tensor is the parameter, bit by bit."""
    one = tensors[0]
    return join.is_nothing and one.widen is None and one.sources[0].view().dtype == dtype


def _read(tensors: Sequence[Tensor], join: Join, dtype: np.dtype, place: Place) -> Array:
    sources = tuple(tuple(_taken(source, place) for source in tensor.sources) for tensor in tensors)
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
