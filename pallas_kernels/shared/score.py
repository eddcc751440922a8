"""The score of a query and a key: the static attention parameters of a layer, as kernels take them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import require
from pallas_kernels.shared.arithmetic import floor_div

# A query may lie this many positions before its request's first key, if there are fewer keys than queries.
MAX_QUERIES_BEFORE_KEYS = 8
# No request has this many keys: a wider window side masks nothing, and would overflow int32 in sums with
# positions.
UNLIMITED = 2**30
# Chunk indices are computed from MAX_QUERIES_BEFORE_KEYS chunks before position 0, in int32.
MAX_CHUNK_SIZE = UNLIMITED // MAX_QUERIES_BEFORE_KEYS


def normalize_window_side(width: int | None) -> int | None:
    """Return the width of one side of a sliding window, or None if it masks nothing."""
    return None if width is None or width >= UNLIMITED else width


type ScoreMask = tuple[bool, tuple[int | None, int | None], int | None, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The function `scale * q.k`, soft-capped, masked and with ALiBi's bias.

    The fields have the meaning of AttentionSpec's fields of the same names, but a window side that masks
    nothing must be None: values from 2**30 on raise ValueError.

    Attributes:
        rows_per_token: Number of consecutive query rows of a token, a power of two. If it is not 1,
            varlen_prefill and varlen_backward take the queries of several heads of a KV head as rows of one
            head, and count positions of queries, but not of keys, in rows.
        mask: Fields that decide which keys a query attends to. Layers with equal values can share a schedule.
    """

    scale: float
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    soft_cap: float | None = None
    sqrt_alibi: bool = False
    rows_per_token: int = 1
    mask: ScoreMask = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for side, width in zip(("left", "right"), self.window, strict=True):
            is_in_range = width is None or 0 <= width < UNLIMITED
            require(is_in_range, f"window's {side} side", f"be None or lie in [0, {UNLIMITED})", width)
        is_in_range = self.chunk_size is None or 0 < self.chunk_size <= MAX_CHUNK_SIZE
        require(is_in_range, "chunk_size", f"be None or lie in [1, {MAX_CHUNK_SIZE}]", self.chunk_size)
        rows = self.rows_per_token
        require(rows > 0 and rows & (rows - 1) == 0, "rows_per_token", "be a power of two", rows)
        vars(self).update(mask=(self.causal, self.window, self.chunk_size, rows))

    def max_visible_keys(self, num_queries: int) -> int | None:
        """Return the maximum number of keys that `num_queries` adjacent queries attend to, or None."""
        left, right = self.window
        bounds = []
        if left is not None and (self.causal or right is not None):
            bounds.append(left + (0 if right is None else max(right, 0)) + num_queries)
        if self.chunk_size is not None:
            bounds.append(2 * self.chunk_size + num_queries)
        return min(bounds, default=None)

    def key_range(self, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the range [first_key, end_key) of key positions that the query at `position` attends to.

        Args:
            position: Query position, in rows: an int32 scalar or tile.
            seq_len: Number of keys of the request: an int32 scalar, or an array of the shape of `position`.
        """
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        if self.rows_per_token > 1:
            position = floor_div(position, self.rows_per_token)
        first_key, end_key = position * 0, position * 0 + seq_len
        if right is not None:
            end_key = jnp.minimum(end_key, position + (1 + right))
        if left is not None:
            first_key = jnp.maximum(first_key, position - left)
        if self.chunk_size is not None:
            shift = MAX_QUERIES_BEFORE_KEYS * self.chunk_size  # lax.div rounds towards 0
            chunk = lax.div(position + shift, position * 0 + self.chunk_size) * self.chunk_size - shift
            first_key, end_key = jnp.maximum(first_key, chunk), jnp.minimum(end_key, chunk + self.chunk_size)
        return first_key, jnp.maximum(end_key, first_key)

    def request_key_range(self, seq_len: jax.Array, query_len: int) -> tuple[jax.Array, jax.Array]:
        """Return the range [first_key, end_key) of keys that the last `query_len` queries attend to."""
        first_key, _ = self.key_range(seq_len - query_len, seq_len)
        _, end_key = self.key_range(seq_len - 1, seq_len)
        return first_key, jnp.maximum(end_key, first_key)
