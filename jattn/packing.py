"""What the host gives several devices in a step, as one array: each of them goes to a mesh slowly."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from jattn.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the arrays of a tree lie in one array of words. Static in a traced function.

    Attributes:
        structure: The tree's.
        layout: Shape and dtype of each leaf that is packed; None = it stays as it is.
    """

    structure: Any
    layout: tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]

    @classmethod
    def of(cls, tree: Any) -> "Packing":
        """The packing of trees like this one: of all that has 4 bytes an element and is on no device.

        Args:
            tree: Of arrays, or of their shapes where they will be on the host.
        """
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(_place(leaf) for leaf in leaves))

    def pack(self, tree: Any) -> tuple[Int32[np.ndarray, " words"], list[Any]]:
        """The words, and the leaves that are not packed. Waits where one to be packed is on a device."""
        leaves = self.structure.flatten_up_to(tree)
        pairs = list(zip(leaves, self.layout, strict=True))
        words = [np.ravel(leaf).view(np.int32) for leaf, place in pairs if place is not None]
        rest = [leaf for leaf, place in pairs if place is None]
        return np.concatenate([np.zeros(0, np.int32), *words]), rest

    def unpack(self, words: Int32[Array, " words"], rest: list[Any]) -> Any:
        """The tree, of what `pack` gave. Traced."""
        others, leaves, start = iter(rest), [], 0
        for place in self.layout:
            if place is None:
                leaves.append(next(others))
                continue
            shape, dtype = place
            end = start + math.prod(shape)
            leaves.append(jax.lax.bitcast_convert_type(words[start:end], dtype).reshape(shape))
            start = end
        return jax.tree.unflatten(self.structure, leaves)


class PackedSteps:
    """A step that is given what stands behind its caches as words, and each bucket's packing."""

    def __init__(self, step: Callable[..., Any]) -> None:
        """Compiles nothing yet.

        Args:
            step: `(structure, leaves, caches, *arguments)`; the structure is static, the caches are donated.
        """
        self._step = jax.jit(functools.partial(_on_words, step), static_argnums=(0, 1), donate_argnums=3)
        self._packings: dict[Bucket, Packing] = {}

    def lower(
        self, bucket: Bucket, structure: Any, leaves: Any, caches: Any, arguments: tuple[Any, ...]
    ) -> jax.stages.Lowered:
        """The step of a bucket, for such arguments or their shapes."""
        packing = self._packings[bucket] = Packing.of(arguments)
        given = jax.tree.map(_on_host, arguments)
        return self._step.lower(structure, packing, leaves, caches, *packing.pack(given))

    def pack(self, bucket: Bucket, arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """What its executable is given for these arguments."""
        return self._packings[bucket].pack(arguments)


def _on_words(step: Callable[..., Any], structure: Any, packing: Packing, *arguments: Any) -> Any:
    leaves, caches, words, rest = arguments
    return step(structure, leaves, caches, *packing.unpack(words, rest))


def _on_host(leaf: Any) -> Any:
    """The array, or zeros for its shape."""
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _place(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    is_packed = isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct)
    is_packed = is_packed and leaf.dtype in (np.int32, np.uint32, np.float32)
    return (tuple(leaf.shape), np.dtype(leaf.dtype)) if is_packed else None
