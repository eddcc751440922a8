"""Reference of grouped_matmul, one tile after the other in f32."""

import jax
import jax.numpy as jnp


def grouped_matmul_reference(
    x: jax.Array, weights: jax.Array, group_of_tile: jax.Array, *, outputs_first: bool = False
) -> jax.Array:
    """Return the f32 result [rows, outputs], with zeros in tiles without a group; see `grouped_matmul`."""
    tiles = x.reshape(len(group_of_tile), -1, x.shape[1])

    def multiply(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, group = tile
        matrix = weights[group].T if outputs_first else weights[group]
        out = jnp.matmul(rows.astype(jnp.float32), matrix.astype(jnp.float32), precision="highest")
        return jnp.where(group >= 0, out, 0)

    out = jax.lax.map(multiply, (tiles, group_of_tile))
    return out.reshape(len(x), -1)
