"""Attention of arrays by all scores at once, where attention_fn's queries stand elsewhere than keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from jattn.implementations.xla import alibi_bias, is_visible, pairs_of
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_shape


class Given(NamedTuple):
    """attention_fn's arrays, which say there what they are."""

    query: Float[Array, "..."]
    key: Float[Array, "..."]
    value: Float[Array, "..."]
    bias: Float[Array, "..."] | None
    mask: Shaped[Array, "..."] | None
    input_positions: Shaped[Array, "..."] | None
    sinks: Float[Array, " heads"] | None
    alibi_slopes: Float[Array, " heads"] | None


def by_scores(given: Given, spec: AttentionSpec, is_causal: bool) -> Float[Array, "..."]:
    """The output, in memory of queries x keys."""
    wide = jnp.float64 if given.query.dtype == jnp.float64 else jnp.float32
    visible, added = _seen_and_added(given, spec, is_causal, wide)
    given = _cleared(given, visible, spec)
    scores = _scores(given.query, given.key, spec, wide) + added
    if given.mask is not None and given.mask.dtype != bool:
        scores = jnp.where(jnp.broadcast_to(given.mask, scores.shape) < 0, jnp.nan, scores)
    return _average(jnp.where(visible, scores, -jnp.inf), given.value, given.sinks, spec)


def is_positional(given: Given, spec: AttentionSpec) -> bool:
    """Whether it matters where a query stands."""
    of_spec = spec.causal or any(x is not None for x in (spec.window, spec.chunk_size, spec.sparsity))
    return of_spec or given.alibi_slopes is not None


def _seen_and_added(
    given: Given, spec: AttentionSpec, is_causal: bool, dtype: DTypeLike
) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """Which keys a query sees, and what is added to its scores: [*batch, q_heads, q_tokens, kv_tokens]."""
    query, mask = given.query, given.mask
    *batch, q_tokens, q_heads, _ = query.shape
    kv_tokens = given.key.shape[-3]
    added = jnp.zeros((*batch, q_heads, q_tokens, kv_tokens), dtype)
    visible = jnp.broadcast_to(jnp.asarray(True) if mask is None else mask.astype(bool), added.shape)
    if is_positional(given, spec):
        shown = None if mask is None else visible
        positions = _positions(query.shape[:-2], kv_tokens, shown, given.input_positions)
        by_spec, slopes = _of_positions(spec, given.alibi_slopes, positions, dtype)
        visible, added = visible & _over_batch(by_spec, added), _over_batch(slopes, added)
    if is_causal or (spec.causal and q_tokens == kv_tokens):
        visible &= jnp.broadcast_to(jnp.tri(q_tokens, kv_tokens, dtype=bool), added.shape)
    if given.bias is not None:
        added += jnp.broadcast_to(given.bias, added.shape).astype(dtype)
    return visible, added


def _cleared(given: Given, visible: Bool[Array, "..."], spec: AttentionSpec) -> Given:
    """Keys and values that no query sees, and queries that see no key, may be NaN: they count as 0.

    A product, and its gradient, would get 0 * NaN of them.
    """
    by_kv_head = (*visible.shape[:-3], spec.num_kv_heads, spec.q_heads_per_kv_head, *visible.shape[-2:])
    is_seen = jnp.swapaxes(visible.reshape(by_kv_head).any(axis=(-3, -2)), -1, -2)
    can_see = jnp.swapaxes(visible.any(axis=-1), -1, -2)
    clear = lambda x, is_kept: jnp.where(is_kept[..., None], x, jnp.zeros((), x.dtype))
    key, value = clear(given.key, is_seen), clear(given.value, is_seen)
    return given._replace(query=clear(given.query, can_see), key=key, value=value)


def _scores(query: Array, key: Array, spec: AttentionSpec, dtype: DTypeLike) -> Array:
    """Scaled and soft-capped [*batch, q_heads, q_tokens, kv_tokens]."""
    keys = jnp.repeat(key, spec.q_heads_per_kv_head, axis=-2).astype(dtype)
    scores = jnp.einsum("...qhd,...khd->...hqk", query.astype(dtype), keys, precision="highest")
    scores = scores * spec.softmax_scale
    return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _positions(
    queries: tuple[int, ...], kv_tokens: int, visible: Bool[Array, "..."] | None, given: Array | None
) -> tuple[Array, Array]:
    """Where queries and keys stand: each [tokens], or [*batch, tokens].

    Args:
        queries: (*batch, q_tokens).
        kv_tokens: Keys.
        visible: The mask.
        given: input_positions.
    """
    *batch, q_tokens = queries
    keys = jnp.arange(kv_tokens, dtype=jnp.int32)
    if given is not None:
        are_integers = jnp.issubdtype(given.dtype, jnp.integer)
        require(are_integers, "input_positions", "be integers", given.dtype)
        require_shape("input_positions", given.shape, queries, "*batch, q_tokens")
        given = given.astype(jnp.int32)
        return given, given if q_tokens == kv_tokens else jnp.broadcast_to(keys, (*batch, kv_tokens))
    rule = f"be given for {q_tokens} queries over {kv_tokens} keys (where each query stands)"
    require(q_tokens <= kv_tokens, "input_positions", rule, None)
    if q_tokens == kv_tokens or visible is None:
        return keys[:q_tokens] + (kv_tokens - q_tokens), keys
    rule = f"be given for {q_tokens} queries over {kv_tokens} keys with a mask (where each query stands)"
    require(q_tokens == 1, "input_positions", rule, None)
    last = jnp.max(jnp.where(visible.any(axis=-3), keys, 0), axis=-1)  # [*batch, 1]
    return last, jnp.broadcast_to(keys, (*batch, kv_tokens))


def _of_positions(
    spec: AttentionSpec, alibi_slopes: Array | None, positions: tuple[Array, Array], dtype: DTypeLike
) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """What a query sees by the spec, and ALiBi's bias: [*batch, q_heads, q_tokens, kv_tokens] or no batch."""
    slopes = jnp.zeros(spec.num_q_heads, dtype) if alibi_slopes is None else alibi_slopes.astype(dtype)
    slopes = slopes.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head)

    def of_row(q_positions: Array, k_positions: Array) -> tuple[Array, Array]:
        visible = is_visible(spec, q_positions, k_positions)
        if spec.sparsity is not None:
            pairs = pairs_of(spec, jnp.int32(0), q_positions, k_positions, is_prefill=True)
            visible = visible & spec.sparsity.visible(pairs)
        bias = alibi_bias(spec, slopes, q_positions, k_positions)
        shape = (spec.num_q_heads, *bias.shape[2:])
        return jnp.broadcast_to(visible, bias.shape).reshape(shape), bias.reshape(shape)

    for _ in range(positions[0].ndim - 1):
        of_row = jax.vmap(of_row)
    return of_row(*positions)


def _over_batch(array: Array, scores: Array) -> Array:
    """`array`, which may lack the batch's axes, in the scores' shape."""
    missing = (1,) * (scores.ndim - array.ndim)
    return jnp.broadcast_to(array.reshape(missing + array.shape), scores.shape)


def _average(scores: Array, value: Array, sinks: Array | None, spec: AttentionSpec) -> Array:
    """softmax(scores) @ value: [*batch, q_tokens, q_heads, head_dim]."""
    v = jnp.repeat(value, spec.q_heads_per_kv_head, axis=-2).astype(scores.dtype)
    top = scores.max(axis=-1, initial=-jnp.inf)  # [*batch, q_heads, q_tokens]
    sink = None if sinks is None else sinks.astype(scores.dtype)[:, None]
    top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, _over_batch(sink, top)))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    p = jnp.exp(scores - top[..., None])
    total = p.sum(axis=-1)
    total = total if sink is None else total + jnp.exp(_over_batch(sink, top) - top)
    out = jnp.einsum("...hqk,...khd->...hqd", p, v, precision="highest")
    # A row without keys is divided by 1: it is 0, and so is its gradient.
    return jnp.moveaxis(out / jnp.where(total == 0, 1.0, total)[..., None], -3, -2)
