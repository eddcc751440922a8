"""Paged decode, one request after the other, dense and in f32 or wider: what the kernel is judged by."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def paged_decode(
    query: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sqrt_alibi: bool = False,
    layout: str = "NHD",
    decode_query_len: int = 1,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    block_list: tuple[jax.Array, jax.Array] | None = None,
    list_block_size: int = 1,
    **mask: Any,
) -> tuple[jax.Array, jax.Array]:
    """Output [tokens, q_heads, head_dim] and log-sum-exp [q_heads, tokens]; arguments as the kernel's."""
    (tokens, q_heads, head_dim), reqs = query.shape, seq_lens.shape[0]
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    if layout == "HND":
        k_cache, v_cache = jnp.swapaxes(k_cache, 1, 2), jnp.swapaxes(v_cache, 1, 2)
    of_head = lambda x, axis: jnp.repeat(x, q_heads // k_cache.shape[2], axis=axis)  # of a kv head's group

    def attend(request: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, blocks, seq_len, lists = request
        k, v = (of_head(stored(*x, blocks, wide), 1) for x in ((k_cache, k_scale), (v_cache, v_scale)))
        i = seq_len - decode_query_len + jnp.arange(decode_query_len)[:, None]
        j = jnp.arange(k.shape[0])[None, :]
        visible = jnp.broadcast_to((j < seq_len) & is_visible(i, j, **mask), (q_heads, len(q), len(k)))
        if lists is not None:
            visible &= of_head(is_listed(j[0] // list_block_size, *lists), 0)[:, None]

        s = jnp.einsum("qhd,khd->hqk", q.astype(wide), k, precision="highest") * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        if alibi_slopes is not None:
            back = jnp.sqrt(jnp.maximum(i - j, 0).astype(wide)) if sqrt_alibi else (i - j).astype(wide)
            s -= alibi_slopes.astype(wide)[:, None, None] * back[None]
        s = jnp.where(visible, s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=2)
        if sinks is not None:
            lse = jnp.logaddexp(lse, jnp.where(seq_len > 0, sinks.astype(wide), -jnp.inf)[:, None])
        p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
        v = jnp.where(visible.any(axis=1).T[..., None], v, 0.0)  # 0 * NaN is NaN
        return jnp.einsum("hqk,khd->qhd", p, v, precision="highest"), lse

    q = query.reshape(reqs, decode_query_len, q_heads, head_dim)
    out, lse = jax.lax.map(attend, (q, block_table, seq_lens, block_list))
    lse = jnp.moveaxis(lse, 1, 0).reshape(q_heads, tokens)
    return out.reshape(query.shape).astype(query.dtype), lse.astype(jnp.float32)


def stored(cache: jax.Array, scale: jax.Array | None, blocks: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What a request's blocks hold: [keys, kv_heads, head_dim]."""
    x = jnp.take(cache, blocks, axis=0, mode="clip").astype(dtype)
    x = x.reshape(-1, *x.shape[2:])
    if scale is None:
        return x
    scale = scale.astype(dtype)
    if scale.ndim == 3:  # per token and head
        scale = jnp.swapaxes(jnp.take(scale, blocks, axis=0, mode="clip"), 1, 2)
        return x * scale.reshape(*x.shape[:2], 1)
    return x * (scale[None] if scale.ndim == 2 else scale.reshape(1, -1, 1))


def is_visible(
    i: jax.Array,
    j: jax.Array,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    chunk_size: int | None = None,
) -> jax.Array:
    """Whether the query at position i may see the key at j."""
    visible = (j <= i) | (not causal)
    if window[0] is not None:
        visible &= i - j <= window[0]
    if window[1] is not None:
        visible &= j - i <= window[1]
    return visible if chunk_size is None else visible & (i // chunk_size == j // chunk_size)


def is_listed(blocks: jax.Array, ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Whether each block is one of a kv head's first `counts` ids: [kv_heads, blocks]."""
    is_live = jnp.arange(ids.shape[1])[None] < counts[:, None]
    return ((blocks[None, :, None] == ids[:, None]) & is_live[:, None]).any(axis=2)
