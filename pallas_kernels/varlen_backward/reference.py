"""Gradients of attention as the paper has them, one request at a time: what the kernel is compared with."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def grads_of_request(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array | None = None,
    *,
    scale: float,
    sees: jax.Array,
    soft_cap: float | None = None,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    rounded: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of one request's queries, keys and values, in the precision of its arrays.

    Args:
        query: [tokens, q_heads, head_dim].
        key: [keys, kv_heads, head_dim].
        value: As key.
        grad_out: As query.
        grad_lse: [q_heads, tokens]: of the natural log of the softmax's denominator; None = 0.
        scale: Of scores.
        sees: Bool [tokens, keys], or [q_heads, tokens, keys].
        soft_cap: Of scaled scores.
        bias: [q_heads, tokens, keys]: added to scores behind the cap.
        sinks: [q_heads]: one more score of each head, without a value.
        rounded: What becomes of the output, of probabilities and of gradients of scores before they are
            multiplied.
    """
    keys, kv_heads, _ = key.shape
    group = query.shape[1] // kv_heads
    k, v = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, k, precision="highest") * scale
    slope = jnp.full_like(scores, scale)
    if soft_cap is not None:
        bent = jnp.tanh(scores / soft_cap)
        scores, slope = bent * soft_cap, (1 - bent * bent) * scale
    scores = scores if bias is None else scores + bias
    scores = jnp.where(sees, scores, -jnp.inf)
    columns = scores if sinks is None else jnp.pad(scores, ((0, 0), (0, 0), (0, 1)))
    if sinks is not None:
        columns = columns.at[:, :, keys].set(sinks[:, None])
    top = jnp.max(columns, axis=2, keepdims=True, initial=jnp.finfo(scores.dtype).min)
    total = jnp.exp(columns - top).sum(axis=2, keepdims=True)
    p = jnp.exp(scores - top) / jnp.where(total == 0, 1, total)
    grad_p = jnp.einsum("qhd,khd->hqk", grad_out, v, precision="highest")
    out = rounded(jnp.einsum("hqk,khd->qhd", p, v, precision="highest"))
    expected = (out * grad_out).sum(axis=2).T[:, :, None]
    if grad_lse is not None:
        expected = expected - grad_lse[:, :, None]
    grad_s = rounded(p * (grad_p - expected) * slope)
    grad_q = jnp.einsum("hqk,khd->qhd", grad_s, k, precision="highest")
    grad_k = jnp.einsum("hqk,qhd->khd", grad_s, query, precision="highest")
    grad_v = jnp.einsum("hqk,qhd->khd", rounded(p), grad_out, precision="highest")
    of_kv_heads = lambda x: x.reshape(*key.shape[:2], group, key.shape[2]).sum(axis=2)
    return grad_q, of_kv_heads(grad_k), of_kv_heads(grad_v)
