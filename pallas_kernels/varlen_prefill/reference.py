"""Attention of a prompt as the paper has it, one request at a time: what the kernel is compared with."""

import jax
import jax.numpy as jnp


def attend_request(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """One request in f32: query [tokens, heads, head_dim], key and value [keys, heads, head_dim]."""
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    position = jnp.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0])
    ahead = jnp.arange(k.shape[0])[None, :] - position
    visible = (ahead <= 0) if causal else jnp.ones(ahead.shape, bool)
    left, right = window
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    s = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", p, v, precision="highest")
