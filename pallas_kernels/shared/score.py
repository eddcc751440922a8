"""The score of a query and a key: the static attention parameters of a layer, as kernels take them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import require

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The function `scale * q.k`, soft-capped, masked and with ALiBi's bias.

    The fields have the meaning of AttentionSpec's fields of the same names, but a window side that masks
    nothing must be None: 2**30 and more are refused.
    """

    scale: float
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    soft_cap: float | None = None
    sqrt_alibi: bool = False

    def __post_init__(self) -> None:
        for side, width in zip(("left", "right"), self.window, strict=True):
            fits = width is None or 0 <= width < UNLIMITED
            require(fits, f"window's {side} side", f"be None or lie in [0, {UNLIMITED})", width)
        fits = self.chunk_size is None or 0 < self.chunk_size <= MAX_CHUNK_SIZE
        require(fits, "chunk_size", f"be None or lie in [1, {MAX_CHUNK_SIZE}]", self.chunk_size)

    @property
    def mask(self) -> tuple[bool, tuple[int | None, int | None], int | None]:
        """Fields that decide which keys a query attends to; layers that agree in them share a schedule."""
        return self.causal, self.window, self.chunk_size

    def max_visible_keys(self, num_queries: int) -> int | None:
        """Return a bound on the keys that `num_queries` adjacent queries attend to; None if unbounded."""
        left, right = self.window
        bounds = []
        if left is not None and (self.causal or right is not None):
            bounds.append(left + (0 if right is None else max(right, 0)) + num_queries)
        if self.chunk_size is not None:
            bounds.append(2 * self.chunk_size + num_queries)
        return min(bounds, default=None)

    def key_range(self, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first key that the query at `position` attends to, and one past the last.

        Args:
            position: Query position: an int32 scalar or tile.
            seq_len: Keys of the request, of the same shape or a scalar.
        """
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        low, high = position * 0, position * 0 + seq_len
        if right is not None:
            high = jnp.minimum(high, position + (1 + right))
        if left is not None:
            low = jnp.maximum(low, position - left)
        if self.chunk_size is not None:
            shift = MAX_QUERIES_BEFORE_KEYS * self.chunk_size  # lax.div rounds towards 0
            chunk = lax.div(position + shift, position * 0 + self.chunk_size) * self.chunk_size - shift
            low, high = jnp.maximum(low, chunk), jnp.minimum(high, chunk + self.chunk_size)
        return low, jnp.maximum(high, low)

    def request_key_range(self, seq_len: jax.Array, query_len: int) -> tuple[jax.Array, jax.Array]:
        """Return the first key that the last `query_len` queries attend to, and one past the last."""
        low, _ = self.key_range(seq_len - query_len, seq_len)
        _, high = self.key_range(seq_len - 1, seq_len)
        return low, jnp.maximum(high, low)
