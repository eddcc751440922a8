"""One body for host and traced values: numpy where every input is on the host, jax.numpy otherwise."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AnyArray = np.ndarray | jax.Array
IntLike = int | np.integer | AnyArray
IntVector = Sequence[int] | AnyArray
IntTable = Sequence[Sequence[int]] | Sequence[np.ndarray] | AnyArray


def with_namespace(*values: Any) -> tuple[Any, ...]:
    """`(xp, *arrays)`: jax.numpy and its arrays if any value is a jax array, else numpy and its arrays.

    Integers and empty lists come out as int32, None stays None.
    """
    xp: Any = jnp if any(isinstance(value, jax.Array) for value in values) else np
    arrays = [None if value is None else xp.asarray(value) for value in values]
    is_int = lambda array: array.size == 0 or np.issubdtype(array.dtype, np.integer)
    narrow = lambda array: array.astype(np.int32) if is_int(array) else array
    return xp, *(None if array is None else narrow(array) for array in arrays)


def host_int(value: Any) -> Any:
    """A numpy number as a Python int; a jax array as it is."""
    return value if isinstance(value, jax.Array) else int(value)


def start_locs(xp: Any, lens: Any) -> Any:
    """Exclusive prefix sums of `lens` and their total: int32 [n + 1]."""
    return xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens).astype(np.int32)])
