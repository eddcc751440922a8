"""Functions of pairs that close over traced arrays, as masks that hold these: derivatives must see them."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks.base import And, Mask, Not, Or
from jattn.masks.pairs import Coverage, Pairs, Tiles
from jattn.masks.sharded import ShardedMask
from jattn.pytree import pytree, static
from pallas_kernels.checks import require


@contextlib.contextmanager
def elementwise() -> Iterator[None]:
    """Where a mask's function is traced: ValueError where it asks an array whether it is true."""
    try:
        yield
    except jax.errors.TracerBoolConversionError as error:
        rule = "be elementwise: & for and, | for or, ~ for not, jnp.where for if"
        raise ValueError(f"function must {rule}, got one that asks an array whether it is true.") from error


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MaskFunction(Mask):
    """`function(head, query, key) -> bool`, elementwise, of int32 arrays that broadcast; hashed by identity.

    Its schedule takes a look at every pair. `query` and `key` are positions; arrays that the function closes
    over are constants of what is compiled, and with some there is no kernel. What it returns is an array of
    bool, or True or False of all.
    """

    function: Callable[[Any, Any, Any], Any]

    def __post_init__(self) -> None:
        is_function = callable(self.function)
        require(is_function, "function", "be a function of head, query and key", repr(self.function))
        try:
            taken = inspect.signature(self.function)
        except ValueError:  # of some that are not written in Python nobody knows
            return
        try:
            taken.bind(None, None, None)
        except TypeError:
            rule = "take three arguments: head, query and key"
            raise ValueError(f"function must {rule}, got one of {taken}.") from None

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, 1

    def _says(self, head: Any, query: Any, key: Any) -> Any:
        """What the function returns: of other numbers than bool & and ~ would take the bits."""
        with elementwise():
            said = self.function(head, query, key)
        said = np.bool_(said) if isinstance(said, bool) else said  # Python's ~True is -2
        dtype = getattr(said, "dtype", type(said).__name__)
        require(dtype == jnp.bool_, "function", "return bool, as comparisons do", dtype)
        return said

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self._says(pairs.head, pairs.query, pairs.key)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        def every_pair(of: Callable[[Any, Any], Any]) -> Any:
            """`of(sees, is_in_tile)` over each tile's pairs, which get two more axes."""
            wide = lambda x: jnp.asarray(x)[..., None, None]
            query = wide(tiles.first_query) + jnp.arange(tiles.size[0], dtype=jnp.int32)[:, None].reshape(
                *[1] * jnp.ndim(tiles.first_query), -1, 1
            )
            key = wide(tiles.first_key) + jnp.arange(tiles.size[1], dtype=jnp.int32).reshape(
                *[1] * jnp.ndim(tiles.first_key), 1, -1
            )
            is_in = (query <= wide(tiles.last_query)) & (key <= wide(tiles.last_key))
            return of(self._says(wide(tiles.head), query, key), is_in)

        any_visible = every_pair(lambda visible, is_in: visible & is_in).any(axis=(-2, -1))
        all_visible = every_pair(lambda visible, is_in: visible | ~is_in).all(axis=(-2, -1))
        return Coverage(any_visible, all_visible)


@pytree
class LiftedMaskFunction(Mask):
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
    def visible(self, pairs: Pairs) -> Any:
        return self._function.visible(pairs)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return self._function.coverage(tiles)


def lift_captured_arrays(mask: Mask) -> Mask:
    """The mask; functions that close over traced arrays, which jax.custom_vjp would lose, hold them."""
    match mask:
        case And() | Or() | Not():
            return type(mask)(masks=tuple(map(lift_captured_arrays, mask.masks)))
        case ShardedMask():
            return dataclasses.replace(mask, mask=lift_captured_arrays(mask.mask))
        case MaskFunction():
            return _taken_apart(mask)
    return mask


def mask_function_jaxpr(mask: MaskFunction) -> Any:
    """The function of a head, a query and a key as a jaxpr, whose constants are what it closes over."""
    one = jax.ShapeDtypeStruct((), np.int32)
    with elementwise():
        return jax.make_jaxpr(mask.function)(one, one, one)


def _taken_apart(mask: MaskFunction) -> Mask:
    closed = mask_function_jaxpr(mask)
    if not any(isinstance(array, jax.core.Tracer) for array in closed.consts):
        return mask
    return LiftedMaskFunction(arrays=tuple(closed.consts), jaxpr=closed.jaxpr)
