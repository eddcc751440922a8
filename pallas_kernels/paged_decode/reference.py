"""Reference of paged_decode: dense, one request after the other, in f32 or f64."""

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
    """Return the output [tokens, q_heads, head_dim] and the log-sum-exp [q_heads, tokens].

    The arguments are those of the kernel; `mask` are those of `is_visible`.
    """
    (tokens, q_heads, head_dim), reqs = query.shape, seq_lens.shape[0]
    dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    if layout == "HND":
        k_cache, v_cache = jnp.swapaxes(k_cache, 1, 2), jnp.swapaxes(v_cache, 1, 2)
    group = q_heads // k_cache.shape[2]

    def repeat_heads(x: jax.Array, axis: int) -> jax.Array:
        return jnp.repeat(x, group, axis=axis)

    def attend(request: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, blocks, seq_len, lists = request
        k = repeat_heads(gather_blocks(k_cache, k_scale, blocks, dtype), 1)
        v = repeat_heads(gather_blocks(v_cache, v_scale, blocks, dtype), 1)
        i = seq_len - decode_query_len + jnp.arange(decode_query_len)[:, None]
        j = jnp.arange(k.shape[0])[None, :]
        visible = jnp.broadcast_to((j < seq_len) & is_visible(i, j, **mask), (q_heads, len(q), len(k)))
        if lists is not None:
            visible &= repeat_heads(is_listed(j[0] // list_block_size, *lists), 0)[:, None]

        s = jnp.einsum("qhd,khd->hqk", q.astype(dtype), k, precision="highest") * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        if alibi_slopes is not None:
            distance = (i - j).astype(dtype)
            if sqrt_alibi:
                distance = jnp.sqrt(jnp.maximum(i - j, 0).astype(dtype))
            s -= alibi_slopes.astype(dtype)[:, None, None] * distance[None]
        s = jnp.where(visible, s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=2)
        if sinks is not None:
            lse = jnp.logaddexp(lse, jnp.where(seq_len > 0, sinks.astype(dtype), -jnp.inf)[:, None])
        p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
        v = jnp.where(visible.any(axis=1).T[..., None], v, 0.0)  # 0 * NaN is NaN
        return jnp.einsum("hqk,khd->qhd", p, v, precision="highest"), lse

    q = query.reshape(reqs, decode_query_len, q_heads, head_dim)
    out, lse = jax.lax.map(attend, (q, block_table, seq_lens, block_list))
    lse = jnp.moveaxis(lse, 1, 0).reshape(q_heads, tokens)
    return out.reshape(query.shape).astype(query.dtype), lse.astype(jnp.float32)


def gather_blocks(
    cache: jax.Array, scale: jax.Array | None, blocks: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the dequantized keys or values of a request's blocks, [keys, kv_heads, head_dim]."""
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
    """Return whether the query at position i attends to the key at position j."""
    visible = (j <= i) | (not causal)
    if window[0] is not None:
        visible &= i - j <= window[0]
    if window[1] is not None:
        visible &= j - i <= window[1]
    return visible if chunk_size is None else visible & (i // chunk_size == j // chunk_size)


def is_listed(blocks: jax.Array, ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Return whether each block is one of a KV head's first `counts` ids, [kv_heads, blocks]."""
    is_valid = jnp.arange(ids.shape[1])[None] < counts[:, None]
    return ((blocks[None, :, None] == ids[:, None]) & is_valid[:, None]).any(axis=2)
