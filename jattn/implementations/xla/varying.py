"""Loops under shard_map: what a loop begins with must vary over the devices as what it ends with does."""

import jax
from jaxtyping import Array, Float


def varying_as[Tree](like: Float[Array, "..."], tree: Tree) -> Tree:
    """`tree` of floats, each of which varies over the axes of devices that `like` varies over, too.

    A sum over nothing is added: 0, whatever `like` holds, and XLA takes it away again. That `like` has a
    gradient gives `tree` none.
    """
    nothing = jax.lax.stop_gradient(like).reshape(-1)[:0].sum()
    return jax.tree.map(lambda array: array + nothing.astype(array.dtype), tree)
