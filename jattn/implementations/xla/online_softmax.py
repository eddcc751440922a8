"""A softmax over chunks of keys, one after the other."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jattn.implementations.xla.kv_chunks import Chunk


class Softmax(NamedTuple):
    """A softmax under way: largest score, sum of exponentials, weighted sum of values; all f32 or f64."""

    top: Float[Array, "kv_heads group tile_q"]
    total: Float[Array, "kv_heads group tile_q"]
    acc: Float[Array, "kv_heads group tile_q head_dim"]


def initial_softmax(shape: tuple[int, int, int], head_dim: int, dtype: np.dtype) -> Softmax:
    """The softmax before the first chunk; shape: kv_heads, group, tile_q."""
    return Softmax(
        jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, head_dim), dtype)
    )


def add_chunk(
    state: Softmax,
    s: Float[Array, "kv_heads group tile_q keys"],
    chunk: Chunk,
    reachable: Bool[Array, "heads keys"],
    multiplied: np.dtype,
) -> Softmax:
    """One step of the online softmax. Keys that no query sees may be NaN: their values count as 0."""
    top = jnp.maximum(state.top, s.max(axis=-1))
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    p = jnp.exp(s - finite_top[..., None])
    shrink = jnp.exp(state.top - finite_top)
    total = state.total * shrink + p.sum(axis=-1)
    if chunk.v_scale is not None:
        v_scale = jnp.where(reachable, chunk.v_scale.astype(p.dtype), 0.0)
        p = p * v_scale[:, None, None, :]
        # float16 has no room for a small probability times a small scale.
        multiplied = p.dtype if multiplied == jnp.float16 else multiplied
    v = jnp.where(reachable.T[..., None], chunk.v.astype(multiplied), jnp.zeros((), multiplied))
    new = jnp.einsum(
        "hgqk,khd->hgqd",
        p.astype(multiplied),
        v,
        preferred_element_type=p.dtype,
        precision=precision(multiplied),
    )
    return Softmax(top, total, state.acc * shrink[..., None] + new)


def add_sink(state: Softmax, sinks: Float[Array, "kv_heads group tile_q"]) -> Softmax:
    """One more score per head, without a value."""
    top = jnp.maximum(state.top, sinks)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    shrink = jnp.exp(state.top - finite_top)
    total = state.total * shrink + jnp.exp(sinks - finite_top)
    return Softmax(top, total, state.acc * shrink[..., None])


def precision(multiplied: np.dtype) -> str | None:
    """Full f32 products where the data are f32 (a GPU would use TF32)."""
    return None if jnp.dtype(multiplied).itemsize == 2 else "highest"
