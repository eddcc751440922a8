"""What a step brings from the host, sent as one array: each that is sent by itself takes time of its own.

On an H200 behind a virtual machine's host an array that was sent took 0.2 ms of it; a step of 1.2 ms with
eight of them took 2.35 ms, with the same numbers in one 1.31 (benchmarks/results, `uploads`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import require
from pallas_kernels.shared import ALIGNED_BYTES

ALIGNMENT = ALIGNED_BYTES // 4  # words: XLA hands a kernel a part of the array as it lies there


class TransferLeaf(NamedTuple):
    """An array that is sent with the others.

    Attributes:
        shape: Its shape.
        dtype: Of 4 bytes, or bool.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TransferLayout(NamedTuple):
    """Which leaves of some arguments are sent together, in their order. Hashable: static under jit.

    Attributes:
        structure: Of the arguments.
        leaves: A leaf each; None = it goes by itself.
    """

    structure: Any
    leaves: tuple[TransferLeaf | None, ...]

    @classmethod
    def of(cls, arguments: Any, *, from_host: bool) -> "TransferLayout":
        """With `from_host`, numpy's arrays among the leaves are sent together; else nothing is."""
        leaves, structure = jax.tree.flatten(arguments)
        return cls(structure, tuple(_sent(leaf) if from_host else None for leaf in leaves))

    def pack(self, arguments: Any) -> tuple[Any, list[Any]]:
        """The arrays that are sent together as one of int32, None where there are none; and the others.

        What the device has already is joined there: nothing is fetched.

        Raises:
            ValueError: An array has not the shape or dtype that the layout has, or one is missing.
        """
        leaves, structure = jax.tree.flatten(arguments)
        if structure != self.structure:
            require(False, "a step's arguments", f"be {self.structure}, as compiled", structure)
        parts, others = [], []
        for leaf, sent in zip(leaves, self.leaves, strict=True):
            if sent is None:
                others.append(leaf)
                continue
            if leaf.shape != sent.shape or leaf.dtype != sent.dtype:
                rule = f"be {sent.dtype}{list(sent.shape)}, as compiled"
                require(False, "an array of a step", rule, f"{leaf.dtype}{list(leaf.shape)}")
            parts.append(leaf)
        if not parts:
            return None, others
        if any([isinstance(part, jax.Array) for part in parts]):
            return _joined_on_device(parts), others
        packed, start = np.zeros(sum([_aligned(part.size) for part in parts]), np.int32), 0
        for part in parts:
            packed[start : start + part.size] = _as_ints(part)
            start += _aligned(part.size)
        return packed, others

    def unpack(self, packed: Any, others: Sequence[Any]) -> Any:
        """The arguments again. Traced."""
        leaves, rest, start = [], iter(others), 0
        for sent in self.leaves:
            if sent is None:
                leaves.append(next(rest))
                continue
            size = math.prod(sent.shape)
            leaves.append(_from_ints(packed[start : start + size].reshape(sent.shape), sent.dtype))
            start += _aligned(size)
        return jax.tree.unflatten(self.structure, leaves)


def _sent(leaf: Any) -> TransferLeaf | None:
    """None for what the device has, and for dtypes of other sizes than int32's."""
    if not isinstance(leaf, np.ndarray | np.generic) or (leaf.dtype.itemsize != 4 and leaf.dtype != np.bool_):
        return None
    return TransferLeaf(leaf.shape, leaf.dtype)


def _as_ints(array: np.ndarray | np.generic) -> np.ndarray:
    flat: np.ndarray = np.ravel(array)
    return flat.astype(np.int32) if array.dtype == np.bool_ else flat.view(np.int32)


def _aligned(size: int) -> int:
    """Words that so many take."""
    return size + -size % ALIGNMENT


@jax.jit
def _joined_on_device(parts: Sequence[Any]) -> jax.Array:
    pad = lambda ints: jnp.pad(ints, (0, _aligned(ints.size) - ints.size))
    return jnp.concatenate([pad(_to_ints(jnp.ravel(part))) for part in parts])


def _to_ints(flat: jax.Array) -> jax.Array:
    if flat.dtype == jnp.bool_:
        return flat.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(flat, jnp.int32)


def _from_ints(ints: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return ints.astype(bool) if dtype == np.bool_ else jax.lax.bitcast_convert_type(ints, dtype)
