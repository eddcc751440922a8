"""Paged decode, one request after the other, dense and in f32 or wider: what the kernel is judged by."""

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
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output [tokens, q_heads, head_dim] and log-sum-exp [q_heads, tokens]; arguments as the kernel's."""
    tokens, q_heads, head_dim = query.shape
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    if layout == "HND":
        k_cache, v_cache = jnp.swapaxes(k_cache, 1, 2), jnp.swapaxes(v_cache, 1, 2)

    def one_request(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, blocks, seq_len = inputs
        k, v = (jnp.take(x, blocks, axis=0, mode="clip") for x in (k_cache, v_cache))
        k, v = (x.reshape(-1, *x.shape[2:]).astype(wide) for x in (k, v))  # [keys, kv_heads, head_dim]
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
        s = jnp.where(sees[None], s, -jnp.inf)
        if sinks is not None:
            sink = jnp.where(seq_len > 0, sinks.astype(wide), -jnp.inf)
            s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:2], 1))], axis=2)
        lse = jax.nn.logsumexp(s, axis=2)
        p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])[..., : k.shape[0]]
        v = jnp.where(sees.any(axis=0)[:, None, None], v, 0.0)
        return jnp.einsum("htk,khd->thd", p, v, precision="highest"), lse

    reqs = seq_lens.shape[0]
    q = query.reshape(reqs, decode_query_len, q_heads, head_dim)
    out, lse = jax.lax.map(one_request, (q, block_table, seq_lens))
    lse = jnp.moveaxis(lse, 1, 0).reshape(q_heads, tokens)
    return out.reshape(query.shape).astype(query.dtype), lse.astype(jnp.float32)
