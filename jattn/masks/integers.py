"""Division of whole numbers, in arrays and in kernels, which have no floor division."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.shared import block_of as block_of


def quotient(x: Any, size: int) -> Any:
    """`x // size` for x >= 0."""
    return jax.lax.div(x, jnp.full_like(x, size))


def remainder(x: Any, size: int) -> Any:
    """`x % size` for x >= 0."""
    return jax.lax.rem(x, jnp.full_like(x, size))
