"""The end of an online softmax in powers of 2, the same for decode, its merge and prefill."""

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)  # scores times it are powers of 2


def finalize_softmax(top: jax.Array, total: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What each query's accumulator is multiplied by, and its natural log-sum-exp, once a sink has joined.

    Args:
        top: What scores were less in the exponential, of each query; -inf: it saw no key.
        total: Sum of the exponentials.
        sink: One more score of each query, like scores times log2(e); -inf: none for this one. Or None.
    """
    base = top if sink is None else jnp.maximum(top, sink)
    finite = jnp.where(base == -jnp.inf, 0.0, base)
    shrink = jnp.exp2(top - finite)
    total = total * shrink
    if sink is not None:
        total = total + jnp.exp2(sink - finite)
    factor = shrink / jnp.where(total == 0.0, 1.0, total)
    return factor, (finite + jnp.log2(total)) * math.log(2)
