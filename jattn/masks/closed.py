"""Functions of pairs that close over traced arrays, as masks that hold these: derivatives must see them."""

import dataclasses
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks.base import And, Mask, Not, Or
from jattn.masks.mesh_heads import OnMesh
from jattn.masks.pairs import Coverage, Pairs, Tiles
from jattn.masks.positions import MaskFunction, elementwise
from jattn.pytree import pytree, static


@pytree
class ClosedFunction(Mask):
    """A MaskFunction, taken apart.

    Attributes:
        arrays: What the function closes over.
        jaxpr: Static: the function of these, and of a head, a query and a key.
    """

    arrays: tuple[Any, ...]
    jaxpr: Any = static()

    row_axes: ClassVar[dict[str, int]] = {}

    @property
    def _function(self) -> MaskFunction:
        of_one = lambda *pair: jax.core.eval_jaxpr(self.jaxpr, self.arrays, *pair)[0]
        return MaskFunction(jnp.vectorize(of_one))

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self._function.num_heads

    @override
    def sees(self, pairs: Pairs) -> Any:
        return self._function.sees(pairs)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return self._function.coverage(tiles)


def with_arrays(mask: Mask) -> Mask:
    """The mask; functions that close over traced arrays, which jax.custom_vjp would lose, hold them."""
    match mask:
        case And() | Or() | Not():
            return type(mask)(masks=tuple(map(with_arrays, mask.masks)))
        case OnMesh():
            return dataclasses.replace(mask, mask=with_arrays(mask.mask))
        case MaskFunction():
            return _taken_apart(mask)
    return mask


def closed_over(mask: MaskFunction) -> Any:
    """The function of a head, a query and a key as a jaxpr, whose constants are what it closes over."""
    one = jax.ShapeDtypeStruct((), np.int32)
    with elementwise():
        return jax.make_jaxpr(mask.function)(one, one, one)


def _taken_apart(mask: MaskFunction) -> Mask:
    closed = closed_over(mask)
    if not any(isinstance(array, jax.core.Tracer) for array in closed.consts):
        return mask
    return ClosedFunction(arrays=tuple(closed.consts), jaxpr=closed.jaxpr)
