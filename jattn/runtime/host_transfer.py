"""Transfer of a step's host arrays to the device as one packed array, since each transfer costs time.

On an H200 in a virtual machine a transfer took 0.2 ms of host time: a step of 1.2 ms took 2.35 ms with eight
arrays and 1.31 ms with the same data in one array.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shared import ALIGNED_BYTES

ALIGNMENT = ALIGNED_BYTES // 4  # in words: XLA passes slices of the packed array to kernels in place


class TransferLeaf(NamedTuple):
    """Shape and dtype of an array that is packed.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array: 4 bytes wide, or bool.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TransferLayout(NamedTuple):
    """Layout of the packed array: which leaves of the arguments it holds. Hashable, so static under jit.

    Attributes:
        structure: Tree structure of the arguments.
        leaves: Shape and dtype of each packed leaf, in order; None for a leaf that is passed separately.
        starts: Index of the first word of each packed leaf, and the total number of words.
    """

    structure: Any
    leaves: tuple[TransferLeaf | None, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, arguments: Any, *, from_host: bool) -> "TransferLayout":
        """Return the layout of some arguments; if `from_host`, their numpy arrays are packed."""
        leaves, structure = jax.tree.flatten(arguments)
        packed_leaves = tuple([_transfer_leaf(leaf) if from_host else None for leaf in leaves])
        sizes = [_align(math.prod(packed_as.shape)) for packed_as in packed_leaves if packed_as is not None]
        return cls(structure, packed_leaves, tuple(itertools.accumulate(sizes, initial=0)))

    def pack(self, arguments: Any) -> tuple[Any, list[Any]]:
        """Return the packed int32 array, or None if nothing is packed, and the remaining leaves.

        Leaves that are already on the device are packed there.

        Raises:
            ValueError: If the arguments do not have the structure, shapes and dtypes of the layout.
        """
        leaves, structure = jax.tree.flatten(arguments)
        if structure != self.structure:
            raise ValueError(
                f"The step was compiled for arguments with the structure {self.structure}, but was called "
                f"with {structure}. Call it with the structure it was compiled for."
            )
        parts, remaining = [], []
        for leaf, packed_as in zip(leaves, self.leaves, strict=True):
            if packed_as is None:
                remaining.append(leaf)
                continue
            if leaf.shape != packed_as.shape or leaf.dtype != packed_as.dtype:
                raise ValueError(
                    f"The step was compiled for an array {packed_as.dtype}{list(packed_as.shape)}, but was "
                    f"called with {leaf.dtype}{list(leaf.shape)}. Pass an array of the compiled shape and "
                    "dtype."
                )
            parts.append(leaf)
        if not parts:
            return None, remaining
        if any([isinstance(part, jax.Array) for part in parts]):
            return _join_on_device(parts), remaining
        packed = np.zeros(self.starts[-1], np.int32)
        for start, part in zip(self.starts, parts, strict=False):
            flat: np.ndarray = np.ravel(part)
            packed[start : start + flat.size] = flat if flat.dtype == np.bool_ else flat.view(np.int32)
        return packed, remaining

    def unpack(self, packed: Any, remaining: Sequence[Any]) -> Any:
        """Return the arguments from the packed array and the remaining leaves. Works inside jit."""
        leaves, other_leaves, starts = [], iter(remaining), iter(self.starts)
        for packed_as in self.leaves:
            if packed_as is None:
                leaves.append(next(other_leaves))
                continue
            start = next(starts)
            words = packed[start : start + math.prod(packed_as.shape)].reshape(packed_as.shape)
            leaves.append(_from_ints(words, packed_as.dtype))
        return jax.tree.unflatten(self.structure, leaves)


def _transfer_leaf(leaf: Any) -> TransferLeaf | None:
    """Return the shape and dtype of a leaf to pack; None for device arrays and other dtype sizes."""
    if not isinstance(leaf, np.ndarray | np.generic) or (leaf.dtype.itemsize != 4 and leaf.dtype != np.bool_):
        return None
    return TransferLeaf(leaf.shape, leaf.dtype)


def _align(size: int) -> int:
    """Round a number of words up to the alignment."""
    return size + -size % ALIGNMENT


@jax.jit
def _join_on_device(parts: Sequence[Any]) -> jax.Array:
    """Pack arrays that are already on the device."""
    words = [_to_ints(jnp.ravel(part)) for part in parts]
    return jnp.concatenate([jnp.pad(ints, (0, _align(ints.size) - ints.size)) for ints in words])


def _to_ints(flat: jax.Array) -> jax.Array:
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(flat, jnp.int32)


def _from_ints(ints: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return ints.astype(bool) if dtype == np.bool_ else jax.lax.bitcast_convert_type(ints, dtype)
