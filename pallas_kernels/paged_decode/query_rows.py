"""Queries as rows of the tensor core's tiles: a kv head's together, decode token major, then query head."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_decode.spec import Shape
from pallas_kernels.shared.softmax import LOG2E


def to_rows(x: jax.Array, shape: Shape) -> jax.Array:
    """[reqs * query_len, q_heads, ...] to [reqs, kv_heads * row_tiles, rows, ...].

    TMA fills up a single tile of rows with zeros; several tiles, or one of odd size, are padded here.
    """
    rest, rows = x.shape[2:], shape.group * shape.query_len
    x = x.reshape(-1, shape.query_len, shape.kv_heads, shape.group, *rest)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(x.shape[0], shape.kv_heads, rows, *rest)
    padding = shape.row_tiles * shape.rows - rows
    if padding:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * len(rest)))
    return x.reshape(x.shape[0], shape.kv_heads * shape.row_tiles, shape.rows, *rest)


def from_rows(x: jax.Array, shape: Shape) -> jax.Array:
    """The inverse; rows may be as many as tile_q, and a request of the schedule a kv head."""
    rest, rows = x.shape[3:], shape.group * shape.query_len
    reqs = x.shape[0] * x.shape[1] // (shape.kv_heads * shape.row_tiles)
    x = x.reshape(reqs, shape.kv_heads, -1, *rest)[:, :, :rows]
    x = x.reshape(reqs, shape.kv_heads, shape.query_len, shape.group, *rest)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    return x.reshape(reqs * shape.query_len, shape.kv_heads * shape.group, *rest)


def heads_to_rows(x: jax.Array | None, shape: Shape) -> jax.Array | None:
    """[q_heads] to [kv_heads * row_tiles, tile_q] f32, times log2(e)."""
    if x is None:
        return None
    x = jnp.broadcast_to(x.astype(jnp.float32)[None] * LOG2E, (shape.query_len, x.shape[0]))
    x = to_rows(x, shape)[0]
    return jnp.pad(x, ((0, 0), (0, shape.tile_q - shape.rows)))
