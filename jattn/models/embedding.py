"""Rows of an embedding, with a gradient that loses no small parts of a sum."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_jvp
def take_rows(
    table: Float[Array, "rows hidden"], ids: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden"]:
    """A row of the table for each id, the nearest one for ids beyond it.

    The gradient of a row that many tokens share is summed in float32 and rounded once: a sum in bfloat16
    stops growing where a token's part is less than half a unit in its last place.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


@take_rows.defjvp
def _take_rows_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Any]
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    # Tangents alone are widened, and turned into the gradient's sum: the table is never copied.
    (table, ids), (moves, _) = primals, tangents
    wide = moves.astype(jnp.float32) if table.dtype.itemsize < 4 else moves
    return take_rows(table, ids), jnp.take(wide, ids, axis=0, mode="clip").astype(table.dtype)
