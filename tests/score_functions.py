"""Score functions for tests of kernels, and their definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn

Q_HEADS, ROWS, LENGTH = 4, 2, 300


def relative(score, batch, head, q_idx, kv_idx, table):
    """Add a bias per head and clipped distance."""
    return score + table[head, jnp.clip(q_idx - kv_idx + 16, 0, 32)]


def capped(score, batch, head, q_idx, kv_idx, table):
    """Add a bias per head and clipped distance, and cap the sum."""
    return 3.0 * jnp.tanh((score + table[head, jnp.clip(q_idx - kv_idx + 16, 0, 32)]) / 3.0)


def bounded(score, batch, head, q_idx, kv_idx):
    """Cap the score, and add a term per query."""
    return 2.0 * jnp.tanh(score / 2.0) + jnp.cos(q_idx.astype(jnp.float32))


def gained(score, batch, head, q_idx, kv_idx, gains, ids, is_special):
    """Combine lookups per row and head, per query, and per key beyond the end of an array."""
    capped = jnp.where(is_special[q_idx], score * gains[batch, head], 2.0 * jnp.tanh(score / 2.0))
    return capped + 0.01 * ids[kv_idx].astype(jnp.float32)


def hiding(score, batch, head, q_idx, kv_idx):
    """Return -inf for the keys of all blocks of 8 but every third, and NaN for later keys."""
    distance = (q_idx - kv_idx).astype(jnp.float32)
    is_hidden = (kv_idx // 8 + head) % 3 != 0
    return jnp.where(is_hidden, -jnp.inf, score - 0.125 * jnp.log(1.0 + distance))


def scaled(score, batch, head, q_idx, kv_idx):
    """Scale and bend the score; the derivative has both signs."""
    return 0.25 * score * jnp.abs(score) - 0.5 * score


def arrays_of(function, num_heads=Q_HEADS, num_rows=ROWS, seed=0):
    """Return random arrays of a function for numbers of query heads and of rows of the batch."""
    rng = np.random.default_rng(seed)
    if function in (relative, capped):
        return (rng.normal(size=(num_heads, 33)).astype(np.float32),)
    if function is gained:
        gains = rng.uniform(0.5, 1.5, (num_rows, num_heads)).astype(np.float32)
        return gains, np.arange(70, dtype=np.int32), rng.random(LENGTH) < 0.5
    return ()


def score_mod(function, arrays=None):
    """Return a score function with its arrays."""
    return jattn.ScoreMod(function, *map(jnp.asarray, arrays_of(function) if arrays is None else arrays))


class Definition:
    """The function of (scores, request, head, i, j) in float64, and its derivative by the scores."""

    def __init__(self, function, arrays=None, rows=None):
        """Create the definition; `rows` is the row of the batch of each request, None for the request."""
        self.function, self.rows = function, rows
        self.arrays = arrays_of(function) if arrays is None else arrays

    def __call__(self, *pairs):
        return self._vectorized(self.function, *pairs)

    def derivative(self, *pairs):
        return self._vectorized(jax.grad(self.function), *pairs)

    def _vectorized(self, function, scores, request, head, i, j):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays = [jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype) for x in self.arrays]
            i, j = (jnp.asarray(np.broadcast_to(x, scores.shape), jnp.int32) for x in (i, j))
            row = jnp.int32(request if self.rows is None else self.rows[request])
            one = lambda score, i, j: function(score, row, jnp.int32(head), i, j, *arrays)
            return np.asarray(jnp.vectorize(one)(jnp.asarray(scores, jnp.float64), i, j))
