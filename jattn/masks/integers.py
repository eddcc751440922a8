"""Division of whole numbers from 0 on, in arrays and in kernels, which have no floor division."""

from typing import Any

import jax
import jax.numpy as jnp


def quotient(x: Any, size: int) -> Any:
    """`x // size` for x >= 0."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """`x % size` for x >= 0."""
    return jax.lax.rem(x, jnp.full_like(x, size))
