"""Parameters on the host: written once, in memory that they stay in, straight from the files' pages."""

import contextlib
import mmap
from collections.abc import Sequence

import jax
import numpy as np

from jattn.models.hf_tensors import Join
from jattn.models.stored_tensors import StoredTensor

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
