"""Parameters on the device: the file's bytes go there as they are, and become what the model has there."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array

from jattn.models.hf_tensors import Join
from jattn.models.weight_formats import Tensor

type Place = Callable[[np.ndarray], Array]


def put(view: np.ndarray) -> Array:
    """An array on the device that jax takes by default; never the file's memory, which may change."""
    return jax.device_put(view, may_alias=False)


def read_parameter(tensors: Sequence[Tensor], join: Join, dtype: np.dtype, place: Place = put) -> Array:
    """A parameter, made of tensors of files. The host's memory of their bytes is given back.

    Args:
        tensors: Those that it is.
        join: How it is made of them.
        dtype: Of the parameter.
        place: Puts one array on the device, or on several.
    """
    sources = tuple(tuple(place(source.view()) for source in tensor.sources) for tensor in tensors)
    widen = tuple(tensor.widen for tensor in tensors)
    if join.is_nothing and widen == (None,) and sources[0][0].dtype == dtype:
        array = sources[0][0]
    else:
        array = _made(sources, widen=widen, join=join, dtype=dtype)
    array.block_until_ready()  # what is on its way to the device is in the host's memory, too
    for tensor in tensors:
        for source in tensor.sources:
            source.release()
    return array


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
