"""Online softmax over chunks of keys."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jattn.implementations.xla.kv_chunks import Chunk


class Softmax(NamedTuple):
    """State of an online softmax: row maximum, row sum and accumulated values; all f32 or f64."""

    row_max: Float[Array, "kv_heads group tile_q"]
    row_sum: Float[Array, "kv_heads group tile_q"]
    acc: Float[Array, "kv_heads group tile_q head_dim"]


def initial_softmax(shape: tuple[int, int, int], head_dim: int, dtype: np.dtype) -> Softmax:
    """Return the state before the first chunk; `shape` is kv_heads, group, tile_q."""
    return Softmax(
        jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, head_dim), dtype)
    )


def add_chunk(
    state: Softmax,
    s: Float[Array, "kv_heads group tile_q keys"],
    chunk: Chunk,
    is_visible_key: Bool[Array, "heads keys"],
    matmul_dtype: np.dtype,
) -> Softmax:
    """Update the state with a chunk; values of keys that no query attends to may be NaN and count as 0."""
    row_max = jnp.maximum(state.row_max, s.max(axis=-1))
    finite_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    p = jnp.exp(s - finite_max[..., None])
    alpha = jnp.exp(state.row_max - finite_max)
    row_sum = state.row_sum * alpha + p.sum(axis=-1)
    if chunk.v_scale is not None:
        v_scale = jnp.where(is_visible_key, chunk.v_scale.astype(p.dtype), 0.0)
        p = p * v_scale[:, None, None, :]
        # A small probability times a small scale underflows in float16.
        matmul_dtype = p.dtype if matmul_dtype == jnp.float16 else matmul_dtype
    v = jnp.where(is_visible_key.T[..., None], chunk.v.astype(matmul_dtype), jnp.zeros((), matmul_dtype))
    values = jnp.einsum(
        "hgqk,khd->hgqd",
        p.astype(matmul_dtype),
        v,
        preferred_element_type=p.dtype,
        precision=precision(matmul_dtype),
    )
    return Softmax(row_max, row_sum, state.acc * alpha[..., None] + values)


def add_sink(state: Softmax, sinks: Float[Array, "kv_heads group tile_q"]) -> Softmax:
    """Update the state with one score per head that has no value."""
    row_max = jnp.maximum(state.row_max, sinks)
    finite_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    alpha = jnp.exp(state.row_max - finite_max)
    row_sum = state.row_sum * alpha + jnp.exp(sinks - finite_max)
    return Softmax(row_max, row_sum, state.acc * alpha[..., None])


def precision(matmul_dtype: np.dtype) -> str | None:
    """Return the matmul precision: full f32 for f32 inputs, for which a GPU would use TF32."""
    return None if jnp.dtype(matmul_dtype).itemsize == 2 else "highest"
