"""Validation and conversion of integer arguments, for numpy on the host or jax.numpy when traced."""

import array
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import require, require_int

INT32_MAX = int(np.iinfo(np.int32).max)
BOOLS = frozenset((bool, np.bool_))


class HostBlockTable(NamedTuple):
    """Block table on the host.

    Attributes:
        ids: Block ids [reqs, columns], int64, or int32 for an int32 array; 0 past the end of a shorter row.
        lens: Number of blocks per row, int64 [reqs]. For an array this is the number of columns, since
            padding cannot be told from blocks.
    """

    ids: np.ndarray
    lens: np.ndarray


def parse_int_vector(name: str, values: Any) -> np.ndarray:
    """Return host ints in [0, INT32_MAX] as an int64 array.

    Raises:
        ValueError: If they are not ints in this range.
    """
    ints = _ints(name, values)
    if ints.size and (ints.min() < 0 or ints.max() > INT32_MAX):
        is_low = bool(ints.min() < 0)
        rule = "be at least 0" if is_low else f"be at most {INT32_MAX}"
        require(False, name, rule, ints[ints < 0 if is_low else ints > INT32_MAX][:1])
    return ints


def python_ints(**values: Any) -> tuple[int, ...]:
    """Convert named ints to Python ints, which do not wrap as numpy's do.

    Raises:
        ValueError: If one is not an int.
    """
    require_int(**values)
    return tuple(map(int, values.values()))


def parse_block_table(block_table: Any, num_reqs: int, *, block_size: int) -> HostBlockTable:
    """Parse a block table from lists or an array.

    Args:
        block_table: One row of block ids per request: lists, arrays, or one 2-D array.
        num_reqs: Expected number of rows.
        block_size: Number of tokens per block; the last slot of a block must fit int32.

    Raises:
        ValueError: If the number of rows differs, or an entry is not an int in range. Negative ids pass,
            since they may be padding.
    """
    is_array = isinstance(block_table, np.ndarray | jax.Array)
    if not is_array and not isinstance(block_table, Sequence):
        require(False, "block_table", "be a table of block ids or None", block_table)
    if is_array:
        require(block_table.ndim == 2, "block_table", "have 2 axes", f"shape {block_table.shape}")
    got = block_table.shape if is_array else f"{len(block_table)} rows"
    require(len(block_table) == num_reqs, "block_table", f"have one row per request ({num_reqs})", got)
    try:
        if is_array:
            ids = np.asarray(block_table)
            require(ids.size == 0 or ids.dtype.kind in "iu", "block_table", "hold ints", ids.dtype)
            ids = ids if ids.dtype == np.int32 else ids.astype(np.int64)
            table = HostBlockTable(ids, np.full(len(ids), ids.shape[1], np.int64))
        else:
            table = _from_rows(block_table)
    except jax.errors.TracerArrayConversionError as error:
        raise _traced_array_error("block_table") from error
    limit, rule = max_block_id(block_size)
    if table.ids.size and table.ids.max() > limit:
        row = int(np.argmax((table.ids > limit).any(axis=1)))
        require(False, f"block_table[{row}]", rule, table.ids[row].tolist())
    return table


def max_block_id(block_size: int) -> tuple[int, str]:
    """Return the largest block id whose slots fit int32, and the rule for the error message."""
    limit = (INT32_MAX + 1) // block_size - 1
    return limit, f"hold block ids of at most {limit} (slots are int32)"


def require_blocks(table: HostBlockTable, seq_lens: np.ndarray, block_size: int) -> None:
    """Check that every request has the blocks that its tokens need.

    Raises:
        ValueError: If a request has too few blocks or a negative id among them.
    """
    num_needed = -(-seq_lens // block_size)
    for r in np.flatnonzero(num_needed > table.lens)[:1]:
        raise ValueError(
            f"block_table[{r}] has {table.lens[r]} blocks of {block_size} tokens, but request {r} has "
            f"{seq_lens[r]} tokens. Pass at least {num_needed[r]} blocks."
        )
    if table.ids.size == 0 or table.ids.min() >= 0:
        return
    is_used = np.arange(table.ids.shape[1]) < num_needed[:, None]
    for r in np.flatnonzero((is_used & (table.ids < 0)).any(axis=1))[:1]:
        rule = f"have no negative block id among the blocks of its {seq_lens[r]} tokens"
        require(False, f"block_table[{r}]", rule, table.ids[r, : table.lens[r]].tolist())


def pad_columns(
    table: HostBlockTable, num_columns: int | None, seq_lens: np.ndarray, block_size: int
) -> np.ndarray:
    """Return the ids in `num_columns` columns; None uses as many as the longest row has, or one.

    Raises:
        ValueError: If a request needs more columns.
    """
    if num_columns is None:
        num_columns = max(table.ids.shape[1], 1)
    num_needed = -(-seq_lens // block_size)
    for r in np.flatnonzero(num_needed > num_columns)[:1]:
        rule = f"be at least {num_needed[r]}, the blocks of request {r} with {seq_lens[r]} tokens"
        require(False, "bucket.max_blocks", rule, num_columns)
    width = table.ids.shape[1]
    if width >= num_columns:
        return table.ids[:, :num_columns]
    padded = np.zeros((len(table.ids), num_columns), table.ids.dtype)
    padded[:, :width] = table.ids
    return padded


def as_block_table(name: str, table: Any) -> Any:
    """Return a block table as an array: arrays unchanged, lists as numpy padded with -1.

    Raises:
        ValueError: If it is not a table of ints.
    """
    if isinstance(table, np.ndarray | jax.Array):
        require(table.ndim == 2, name, "have 2 axes", f"shape {table.shape}")
        return table
    ids, lens = _from_rows(table)
    return np.where(np.arange(ids.shape[1]) < lens[:, None], ids, -1)


def _ints(name: str, values: Any) -> np.ndarray:
    """Return a 1-D int64 array; raise ValueError for bools, floats and nested lists."""
    try:
        ints = np.asarray(values)
    except ValueError:  # nested lists
        require(False, name, "be a list of ints", values)
        raise
    except jax.errors.TracerArrayConversionError as error:
        raise _traced_array_error(name) from error
    require(ints.ndim == 1, name, "be a list of ints", f"shape {ints.shape}")
    has_bools = not isinstance(values, np.ndarray | jax.Array) and not BOOLS.isdisjoint(map(type, values))
    dtype = np.dtype(bool) if has_bools else ints.dtype
    require(ints.size == 0 or dtype.kind in "iu", name, "be a list of ints", dtype)
    return ints.astype(np.int64)


def _traced_array_error(name: str) -> ValueError:
    return ValueError(
        f"{name} is a traced array, but its values must be known on the host. "
        "Build the metadata outside of jit and pass it in."
    )


def _from_rows(rows: Sequence[Any]) -> HostBlockTable:
    """Convert all rows at once if they are lists of Python ints, as an engine's are, else one by one."""
    ids = _all_ids(rows) if {list, tuple}.issuperset(map(type, rows)) else None
    if ids is None:
        rows = [_ints(f"block_table[{r}]", row) for r, row in enumerate(rows)]
        ids = np.concatenate([*rows, np.zeros(0, np.int64)])
    lens = np.fromiter(map(len, rows), np.int64, len(rows))
    table = np.zeros((len(rows), int(lens.max(initial=0))), np.int64)
    table[np.arange(table.shape[1]) < lens[:, None]] = ids
    return HostBlockTable(table, lens)


def _all_ids(rows: Sequence[Sequence[Any]]) -> np.ndarray | None:
    """Return the ids of all rows; None if one is not an int, so that `_ints` reports it."""
    flat = list(itertools.chain.from_iterable(rows))
    try:
        ids = np.asarray(array.array("q", flat), np.int64)  # twice as fast as numpy, and takes no float
    except (TypeError, OverflowError):
        return None
    maybe_bool = np.flatnonzero(ids >> 1 == 0)
    return None if any(type(flat[i]) in BOOLS for i in maybe_bool.tolist()) else ids


AnyArray = np.ndarray | jax.Array
IntLike = int | np.integer | AnyArray
IntVector = Sequence[int] | AnyArray
IntTable = Sequence[Sequence[int]] | Sequence[np.ndarray] | AnyArray


def with_namespace(*values: Any, **ints: Any) -> tuple[Any, ...]:
    """Return `(xp, *arrays)`: jax.numpy and its arrays if a value is a jax array, else numpy and its arrays.

    Ints and empty lists become int32, None stays None.

    Args:
        values: Arrays or numbers of any type.
        ints: Named ints or int arrays, which must fit int32.

    Raises:
        ValueError: If a named value does not hold int32s.
    """
    xp: Any = jnp if any(isinstance(value, jax.Array) for value in (*values, *ints.values())) else np
    arrays = [*values, *(_as_ints(name, value) for name, value in ints.items())]
    arrays = [None if value is None else xp.asarray(value) for value in arrays]

    def to_int32(array: Any) -> Any:
        is_int = array.size == 0 or np.issubdtype(array.dtype, np.integer)
        return array.astype(np.int32) if is_int else array

    return xp, *(None if array is None else to_int32(array) for array in arrays)


def _as_ints(name: str, value: Any) -> Any:
    """Check that a value holds ints that fit int32; values on the device are not read."""
    if value is None or isinstance(value, jax.Array):
        dtype = None if value is None or value.size == 0 else value.dtype
        require(dtype is None or np.issubdtype(dtype, np.integer), name, "hold ints", dtype)
        return value
    try:
        ints = np.asarray(value)
    except ValueError:  # lists of different lengths
        require(False, name, "hold ints in rows of one length", value)
        raise
    require(ints.size == 0 or ints.dtype.kind in "iu", name, "hold ints", ints.dtype)
    overflows = ints.size > 0 and (int(ints.max()) > INT32_MAX or int(ints.min()) < -INT32_MAX - 1)
    require(not overflows, name, "hold int32s", value)
    return ints


def require_one_per_request(**arrays: Any) -> None:
    """Check that all named arrays have one entry per request: numpy would broadcast a single entry.

    Raises:
        ValueError: If an array is not 1-D or has another length than the first.
    """
    num_reqs: int | None = None
    for name, values in arrays.items():
        require(values.ndim == 1, name, "have one entry per request", f"shape {values.shape}")
        num_reqs = values.shape[0] if num_reqs is None else num_reqs
        require(
            values.shape[0] == num_reqs, name, f"have one entry per request ({num_reqs})", values.shape[0]
        )


def to_python_int(value: Any) -> Any:
    """Convert a numpy number to a Python int; return a jax array unchanged."""
    return value if isinstance(value, jax.Array) else int(value)


def start_locs(xp: Any, lens: Any) -> Any:
    """Return the exclusive prefix sums of `lens` and their total, int32 [n + 1]."""
    return xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens).astype(np.int32)])
