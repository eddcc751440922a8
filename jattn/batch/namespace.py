"""One body for host and traced values: numpy where every input is on the host, jax.numpy otherwise."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.batch.host_arrays import INT32_MAX
from pallas_kernels.checks import require

AnyArray = np.ndarray | jax.Array
IntLike = int | np.integer | AnyArray
IntVector = Sequence[int] | AnyArray
IntTable = Sequence[Sequence[int]] | Sequence[np.ndarray] | AnyArray


def with_namespace(*values: Any, **ints: Any) -> tuple[Any, ...]:
    """`(xp, *arrays)`: jax.numpy and its arrays if any value is a jax array, else numpy and its arrays.

    Integers and empty lists come out as int32, None stays None. What is handed over by name must be ints that
    an int32 holds.

    Raises:
        ValueError: It is not.
    """
    xp: Any = jnp if any(isinstance(value, jax.Array) for value in (*values, *ints.values())) else np
    arrays = [*values, *(_as_ints(name, value) for name, value in ints.items())]
    arrays = [None if value is None else xp.asarray(value) for value in arrays]
    is_int = lambda array: array.size == 0 or np.issubdtype(array.dtype, np.integer)
    narrow = lambda array: array.astype(np.int32) if is_int(array) else array
    return xp, *(None if array is None else narrow(array) for array in arrays)


def _as_ints(name: str, value: Any) -> Any:
    """The value, once it is an int or ints that an int32 holds; what is on the device is not read."""
    if value is None or isinstance(value, jax.Array):
        dtype = None if value is None or value.size == 0 else value.dtype
        require(dtype is None or np.issubdtype(dtype, np.integer), name, "hold ints", dtype)
        return value
    try:
        ints = np.asarray(value)
    except ValueError:  # lists of several lengths
        require(False, name, "hold ints in rows of one length", value)
        raise
    require(ints.size == 0 or ints.dtype.kind in "iu", name, "hold ints", ints.dtype)
    is_wide = ints.size > 0 and (int(ints.max()) > INT32_MAX or int(ints.min()) < -INT32_MAX - 1)
    require(not is_wide, name, "hold int32s", value)
    return ints


def require_one_a_request(**arrays: Any) -> None:
    """Named arrays must have an entry a request, as many as the first: numpy would stretch one entry to all.

    Raises:
        ValueError: One has other axes, or another length.
    """
    num_reqs: int | None = None
    for name, array in arrays.items():
        require(array.ndim == 1, name, "have one entry per request", f"shape {array.shape}")
        num_reqs = array.shape[0] if num_reqs is None else num_reqs
        require(array.shape[0] == num_reqs, name, f"have one entry per request ({num_reqs})", array.shape[0])


def host_int(value: Any) -> Any:
    """A numpy number as a Python int; a jax array as it is."""
    return value if isinstance(value, jax.Array) else int(value)


def start_locs(xp: Any, lens: Any) -> Any:
    """Exclusive prefix sums of `lens` and their total: int32 [n + 1]."""
    return xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens).astype(np.int32)])
