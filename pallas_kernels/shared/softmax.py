"""The last step of an online softmax in base 2, shared by the attention kernels and their combine kernels."""

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)  # scores times LOG2E are exponents of 2


def finalize_softmax(
    row_max: jax.Array, row_sum: jax.Array, sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the factor that normalizes each query's accumulator, and the query's log-sum-exp (base e).

    Args:
        row_max: Number that was subtracted from each query's scores before the exponential; -inf if the query
            attends to no key.
        row_sum: Sum of each query's exponentials.
        sink: Attention sink of each query in base 2 (times LOG2E); -inf if the query has none. None = no
            sinks.
    """
    final_max = row_max if sink is None else jnp.maximum(row_max, sink)
    finite_max = jnp.where(final_max == -jnp.inf, 0.0, final_max)
    alpha = jnp.exp2(row_max - finite_max)
    row_sum = row_sum * alpha
    if sink is not None:
        row_sum = row_sum + jnp.exp2(sink - finite_max)
    factor = alpha / jnp.where(row_sum == 0.0, 1.0, row_sum)
    return factor, (finite_max + jnp.log2(row_sum)) * math.log(2)
