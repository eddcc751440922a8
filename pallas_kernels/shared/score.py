"""What the score of a query and a key is: the static part of a layer's attention, as kernels see it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import require

# A query may stand this many positions before its request's first key (fewer keys than queries).
MAX_QUERIES_BEFORE_KEYS = 8
# No request has so many keys: a wider side of a window hides none, and would not fit int32 beside a position.
UNLIMITED = 2**30
# Chunks are counted from a few before position 0, in int32.
MAX_CHUNK_SIZE = UNLIMITED // MAX_QUERIES_BEFORE_KEYS


def normalize_window_side(width: int | None) -> int | None:
    """A window's side; None where it hides nothing."""
    return None if width is None or width >= UNLIMITED else width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """`scale * q.k`, soft-capped, masked, ALiBi-biased. Fields are AttentionSpec's of the same names.

    But a side of the window that hides nothing must be None here: 2**30 and more are refused.
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
        """What decides which keys a query sees; layers that agree in it share a schedule."""
        return self.causal, self.window, self.chunk_size

    def max_visible_keys(self, rows: int) -> int | None:
        """A bound on the keys that `rows` neighbouring queries see together; None: the request's length."""
        left, right = self.window
        bounds = []
        if left is not None and (self.causal or right is not None):
            bounds.append(left + (0 if right is None else max(right, 0)) + rows)
        if self.chunk_size is not None:
            bounds.append(2 * self.chunk_size + rows)
        return min(bounds, default=None)

    def key_range(self, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First key that the query at `position` sees, and one past the last: scalars or tiles of int32."""
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
        """First key that some of a request's last `query_len` queries sees, and one past the last."""
        low, _ = self.key_range(seq_len - query_len, seq_len)
        _, high = self.key_range(seq_len - 1, seq_len)
        return low, jnp.maximum(high, low)
