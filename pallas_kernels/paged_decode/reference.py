"""Paged decode, one request after the other, dense and in f32 or wider: what the kernel is judged by."""

from typing import Any

import jax
import jax.numpy as jnp


def paged_decode(
    query: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    chunk_size: int | None = None,
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
) -> tuple[jax.Array, jax.Array]:
    """Output [tokens, q_heads, head_dim] and log-sum-exp [q_heads, tokens]; arguments as the kernel's."""
    tokens, q_heads, head_dim = query.shape
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    if layout == "HND":
        k_cache, v_cache = jnp.swapaxes(k_cache, 1, 2), jnp.swapaxes(v_cache, 1, 2)

    def values_of(cache: jax.Array, scale: jax.Array | None, blocks: jax.Array) -> jax.Array:
        """What a request's blocks hold: [keys, kv_heads, head_dim]."""
        stored = jnp.take(cache, blocks, axis=0, mode="clip").astype(wide)
        stored = stored.reshape(-1, *stored.shape[2:])
        if scale is None:
            return stored
        scale = scale.astype(wide)
        if scale.ndim == 3:  # per token and head
            scale = jnp.swapaxes(jnp.take(scale, blocks, axis=0, mode="clip"), 1, 2)
            return stored * scale.reshape(*stored.shape[:2], 1)
        return stored * (scale[None] if scale.ndim == 2 else scale.reshape(1, -1, 1))

    def one_request(inputs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, blocks, seq_len, lists = inputs
        k, v = (values_of(x, scale, blocks) for x, scale in ((k_cache, k_scale), (v_cache, v_scale)))
        k, v = (jnp.repeat(x, q_heads // x.shape[1], axis=1) for x in (k, v))
        i = seq_len - decode_query_len + jnp.arange(decode_query_len)[:, None]
        j = jnp.arange(k.shape[0])[None, :]
        sees = j < seq_len
        if causal:
            sees &= j <= i
        if window[0] is not None:
            sees &= i - j <= window[0]
        if window[1] is not None:
            sees &= j - i <= window[1]
        if chunk_size is not None:
            sees &= i // chunk_size == j // chunk_size
        s = jnp.einsum("thd,khd->htk", q.astype(wide), k, precision="highest") * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        if alibi_slopes is not None:
            back = jnp.sqrt(jnp.maximum(i - j, 0).astype(wide)) if sqrt_alibi else (i - j).astype(wide)
            s -= alibi_slopes.astype(wide)[:, None, None] * back[None]
        sees = jnp.broadcast_to(sees, (q_heads, *sees.shape))
        if lists is not None:
            ids, counts = lists  # [kv_heads, max_listed], [kv_heads]
            is_live = jnp.arange(ids.shape[1])[None] < counts[:, None]
            is_listed = (j[0, None, :, None] // list_block_size == ids[:, None]) & is_live[:, None]
            is_listed = jnp.repeat(is_listed.any(axis=2), q_heads // ids.shape[0], axis=0)
            sees &= is_listed[:, None]
        s = jnp.where(sees, s, -jnp.inf)
        if sinks is not None:
            sink = jnp.where(seq_len > 0, sinks.astype(wide), -jnp.inf)
            s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:2], 1))], axis=2)
        lse = jax.nn.logsumexp(s, axis=2)
        p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])[..., : k.shape[0]]
        v = jnp.where(sees.any(axis=1).T[..., None], v, 0.0)
        return jnp.einsum("htk,khd->thd", p, v, precision="highest"), lse

    reqs = seq_lens.shape[0]
    q = query.reshape(reqs, decode_query_len, q_heads, head_dim)
    out, lse = jax.lax.map(one_request, (q, block_table, seq_lens, block_list))
    lse = jnp.moveaxis(lse, 1, 0).reshape(q_heads, tokens)
    return out.reshape(query.shape).astype(query.dtype), lse.astype(jnp.float32)
