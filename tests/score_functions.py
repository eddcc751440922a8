"""Score functions for tests of kernels, and their definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn

Q_HEADS, ROWS, LENGTH = 4, 2, 300
RNG = np.random.default_rng(0)


def relative(score, batch, head, q_idx, kv_idx, table):
    """Add a bias per head and clipped distance."""
    return score + table[head, jnp.clip(q_idx - kv_idx + 16, 0, 32)]


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


ARRAYS = {
    relative: (RNG.normal(size=(Q_HEADS, 33)).astype(np.float32),),
    gained: (
        RNG.uniform(0.5, 1.5, (ROWS, Q_HEADS)).astype(np.float32),
        np.arange(70, dtype=np.int32),
        RNG.random(LENGTH) < 0.5,
    ),
    hiding: (),
    scaled: (),
}


def score_mod(function):
    """Return a score function with its arrays."""
    return jattn.ScoreMod(function, *map(jnp.asarray, ARRAYS[function]))


class Definition:
    """The function of (scores, request, head, i, j) in float64, and its derivative by the scores."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *pairs):
        return self._vectorized(self.function, *pairs)

    def derivative(self, *pairs):
        return self._vectorized(jax.grad(self.function), *pairs)

    def _vectorized(self, function, scores, request, head, i, j):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays = [
                jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype)
                for x in ARRAYS[self.function]
            ]
            i, j = (jnp.asarray(np.broadcast_to(x, scores.shape), jnp.int32) for x in (i, j))
            one = lambda score, i, j: function(score, jnp.int32(request), jnp.int32(head), i, j, *arrays)
            return np.asarray(jnp.vectorize(one)(jnp.asarray(scores, jnp.float64), i, j))
