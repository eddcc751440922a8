"""Masks given by Python functions."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks.base import Mask
from jattn.masks.in_kernel import KernelTiling
from jattn.masks.pairs import Pairs
from jattn.pytree import lift_function, pytree, static
from pallas_kernels.checks import require

NO_CAPTURED_ARRAYS = "there is no kernel for a mask function that closes over arrays or traced numbers"

_PAIR = (jax.ShapeDtypeStruct((), np.int32),) * 3  # head, query and key


@contextlib.contextmanager
def elementwise() -> Iterator[None]:
    """Raise ValueError if a mask's function, traced in this context, converts an array to a bool."""
    try:
        yield
    except jax.errors.TracerBoolConversionError as error:
        raise ValueError(
            "The mask function converts an array to a bool, but it must be elementwise. Use & for and, | for "
            "or, ~ for not, and jnp.where for if."
        ) from error


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MaskFunction(Mask):
    """A mask given by an elementwise `function(head, query, key) -> bool`.

    The function receives int32 arrays that broadcast against each other; `query` and `key` are positions. It
    returns a bool array, or True or False for all pairs. Its schedule evaluates every pair. Arrays captured
    by the function are constants of the compiled code: after another array is assigned to the captured
    variable, calls still use the old one. The kernels support captured numbers, but neither other arrays nor
    values that JAX traces. Hashed by identity.
    """

    function: Callable[[Any, Any, Any], Any]

    def __post_init__(self) -> None:
        is_function = callable(self.function)
        require(is_function, "function", "be a function of head, query and key", repr(self.function))
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # Some builtin functions have no signature.
            return
        try:
            signature.bind(None, None, None)
        except TypeError:
            raise ValueError(
                f"The mask function must take the arguments head, query and key, got signature {signature}."
            ) from None

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, 1

    def _call(self, head: Any, query: Any, key: Any) -> Any:
        """Call the function, and check that it returns bool: & and ~ of integers are bitwise."""
        with elementwise():
            result = self.function(head, query, key)
        result = np.bool_(result) if isinstance(result, bool) else result  # Python's ~True is -2.
        dtype = getattr(result, "dtype", type(result).__name__)
        if dtype != jnp.bool_:
            raise ValueError(f"The mask function must return bool, got {dtype}.")
        return result

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self._call(pairs.head, pairs.query, pairs.key)

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        captured = mask_function_jaxpr(self).consts
        has_arrays = any(np.ndim(array) or isinstance(array, jax.core.Tracer) for array in captured)
        return NO_CAPTURED_ARRAYS if has_arrays else None

    @override
    def for_kernels(self) -> Mask:
        captures_none = not mask_function_jaxpr(self).consts
        return self if captures_none else MaskFunction(_WithNumPyNumbers(self.function))


@dataclasses.dataclass(frozen=True)
class _WithNumPyNumbers:
    """A mask's function that captures NumPy numbers instead of jax.Arrays, which kernels cannot capture."""

    function: Callable[[Any, Any, Any], Any]

    def __call__(self, head: Any, query: Any, key: Any) -> Any:
        closed = jax.make_jaxpr(self.function)(head, query, key)
        numbers = [np.asarray(number)[()] for number in closed.consts]
        return jax.core.eval_jaxpr(closed.jaxpr, numbers, head, query, key)[0]


@pytree
class LiftedMaskFunction(Mask):
    """A MaskFunction whose captured arrays are fields, so that JAX transformations can trace them.

    Attributes:
        arrays: Arrays that the function captures.
        function: Static: the function of a head, a query, a key and the captured arrays.
    """

    arrays: tuple[Any, ...]
    function: Callable[..., Any] = static()

    row_axes: ClassVar[dict[str, int]] = {}

    @property
    def _function(self) -> MaskFunction:
        return MaskFunction(jnp.vectorize(lambda *pair: self.function(*pair, *self.arrays)))

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self._function.num_heads

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self._function.visible(pairs)

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        return NO_CAPTURED_ARRAYS


def lift_captured_arrays(mask: Mask) -> Mask:
    """Return the mask with the traced arrays that its functions capture as fields; see `lift_function`."""
    return mask.map_leaves(lambda leaf: _lift(leaf) if isinstance(leaf, MaskFunction) else leaf)


def mask_function_jaxpr(mask: MaskFunction) -> Any:
    """Return the mask's function as a jaxpr, whose constants are the captured arrays."""
    with elementwise():
        return jax.make_jaxpr(mask.function)(*_PAIR)


def _lift(mask: MaskFunction) -> Mask:
    with elementwise():
        function, arrays = lift_function(mask.function, _PAIR)
    return LiftedMaskFunction(arrays=arrays, function=function) if arrays else mask
