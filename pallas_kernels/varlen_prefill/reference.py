"""Textbook attention of one prompt, against which the kernel is tested and benchmarked."""

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
    """Return the attention of one request, computed in f32.

    Args:
        query: Queries [tokens, heads, head_dim], the last of which is aligned with the last key.
        key: Keys [keys, heads, head_dim].
        value: Values [keys, heads, head_dim].
        scale: Factor of the scores.
        causal: Whether later keys are masked out.
        window: Numbers of visible keys to the left and to the right of the query; None for unlimited.
    """
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    position = jnp.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0])
    distance = jnp.arange(k.shape[0])[None, :] - position
    is_visible = (distance <= 0) if causal else jnp.ones(distance.shape, bool)
    left, right = window
    if left is not None:
        is_visible &= distance >= -left
    if right is not None:
        is_visible &= distance <= right
    s = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
    p = jax.nn.softmax(jnp.where(is_visible, s, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", p, v, precision="highest")
