"""What one tile of queries and one chunk of keys give to the gradients.

Probabilities are made anew from the scores and the log-sum-exp.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.implementations.xla.keys import load_chunk, static_scales
from jattn.implementations.xla.online_softmax import precision
from jattn.implementations.xla.scores import alibi_bias
from jattn.implementations.xla.tile import Problem, Queries, biased, capped_scores
from jattn.spec import AttentionSpec


class Tokens(NamedTuple):
    """What a tile takes of each of its queries.

    Attributes:
        query: 0 where the query sees no key.
        grad_out: Likewise.
        lse: +inf where the query sees no key, so that each of its probabilities is 0.
        delta: What is taken from each probability's gradient: that of the row's sum.
    """

    query: Float[Array, "*tokens q_heads head_dim"]
    grad_out: Float[Array, "*tokens q_heads head_dim"]
    lse: Float[Array, "*tokens q_heads"]
    delta: Float[Array, "*tokens q_heads"]


class Parts(NamedTuple):
    """What a tile and a chunk of keys give to the gradients."""

    query: Float[Array, "tile_q q_heads head_dim"]
    k: Float[Array, "keys kv_heads head_dim"]
    v: Float[Array, "keys kv_heads head_dim"]
    alibi_slopes: Float[Array, "kv_heads group"]


def parts_at(queries: Queries, tokens: Tokens, c: Int[Array, ""], problem: Problem) -> Parts:
    """What a tile's queries and chunk c of their request's keys give.

    Args:
        queries: The tile's.
        tokens: The same with what comes down to them.
        c: Number of the chunk.
        problem: The arguments of the forward pass.
    """
    multiplied, summed = queries.q.dtype, tokens.lse.dtype
    chunk = load_chunk(problem.kv, problem.metadata.block_table, queries.row, c)
    keys = c * chunk.k.shape[0] + jnp.arange(chunk.k.shape[0], dtype=jnp.int32)
    static_k, _ = static_scales(problem.kv, summed)
    capped, sees = capped_scores(queries, chunk, keys, static_k, problem)
    is_seen = sees.any(axis=(1, 2)).T[..., None]  # of each kv head: what nobody sees may be NaN
    k, v = (jnp.where(is_seen, x, jnp.zeros((), x.dtype)).astype(multiplied) for x in (chunk.k, chunk.v))
    grad_out, lse, delta = (_by_head(x, problem.spec) for x in tokens[1:])
    grad_out = grad_out.astype(multiplied)
    product = functools.partial(jnp.einsum, preferred_element_type=summed, precision=precision(multiplied))
    s = jnp.where(sees, biased(capped, queries, keys, problem), -jnp.inf)
    p = jnp.exp(s - lse[..., None])
    dp = product("hgqd,khd->hgqk", grad_out, v)
    ds = jnp.where(sees, p * (dp - delta[..., None]), 0.0)
    slopes = _of_slopes(ds, queries, keys, problem)
    ds = _before_cap(ds, capped, sees, problem.spec) * problem.spec.softmax_scale
    ds, p = ds.astype(multiplied), p.astype(multiplied)
    dq = product("hgqk,khd->qhgd", ds, k)
    dk, dv = product("hgqk,hgqd->khd", ds, queries.q), product("hgqk,hgqd->khd", p, grad_out)
    # Keys behind the last one are another request's: of a query that is NaN they would get 0 * NaN.
    dk, dv = (jnp.where(is_seen, x, 0.0) for x in (dk, dv))
    return Parts(
        query=dq.reshape(dq.shape[0], -1, dq.shape[-1]),
        k=dk,
        v=dv,
        alibi_slopes=slopes,
    )


def _by_head(x: Float[Array, "tile_q q_heads *rest"], spec: AttentionSpec) -> Array:
    """To [kv_heads, group, tile_q, *rest]."""
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head
    return jnp.moveaxis(x.reshape(x.shape[0], *heads, *x.shape[2:]), 0, 2)


def _of_slopes(ds: Array, queries: Queries, keys: Array, problem: Problem) -> Float[Array, "kv_heads group"]:
    """What scores with ALiBi's bias give to its slopes."""
    if problem.alibi_slopes is None:
        return jnp.zeros(ds.shape[:2], ds.dtype)
    of_one = alibi_bias(problem.spec, jnp.ones((1, 1), ds.dtype), queries.positions, keys)
    return jnp.sum(ds * of_one, axis=(2, 3))


def _before_cap(ds: Array, capped: Array, sees: Bool[Array, "..."], spec: AttentionSpec) -> Array:
    """Gradients of scores before the soft cap, from those behind it."""
    if spec.soft_cap is None:
        return ds
    return jnp.where(sees, ds * (1.0 - jnp.square(capped / spec.soft_cap)), 0.0)
