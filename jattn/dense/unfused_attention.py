"""Unfused attention, which materializes all scores, for calls that `attention` does not support."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from jattn.implementations.xla import alibi_bias, is_visible, pairs_of
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_shape


class FlaxInputs(NamedTuple):
    """The array arguments of `attention_fn`."""

    query: Float[Array, "..."]
    key: Float[Array, "..."]
    value: Float[Array, "..."]
    bias: Float[Array, "..."] | None
    mask: Shaped[Array, "..."] | None
    input_positions: Shaped[Array, "..."] | None
    sinks: Float[Array, " heads"] | None
    alibi_slopes: Float[Array, " heads"] | None


def attend_unfused(inputs: FlaxInputs, spec: AttentionSpec, is_causal: bool) -> Float[Array, "..."]:
    """Compute the output; needs memory proportional to queries x keys."""
    dtype = jnp.float64 if inputs.query.dtype == jnp.float64 else jnp.float32
    visible, bias = _visible_and_bias(inputs, spec, is_causal, dtype)
    inputs = _clear_unused(inputs, visible, spec)
    scores = _scores(inputs.query, inputs.key, spec, dtype) + bias
    if inputs.mask is not None and inputs.mask.dtype != bool:
        scores = jnp.where(jnp.broadcast_to(inputs.mask, scores.shape) < 0, jnp.nan, scores)
    return _softmax_output(jnp.where(visible, scores, -jnp.inf), inputs.value, inputs.sinks, spec)


def is_positional(inputs: FlaxInputs, spec: AttentionSpec) -> bool:
    """Return whether the output depends on the positions of the queries."""
    depends_on_spec = spec.causal or any(x is not None for x in (spec.window, spec.chunk_size, spec.sparsity))
    return depends_on_spec or inputs.alibi_slopes is not None


def _visible_and_bias(
    inputs: FlaxInputs, spec: AttentionSpec, is_causal: bool, dtype: DTypeLike
) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """Return which keys are visible, and the bias of the scores: [*batch, q_heads, q_tokens, kv_tokens]."""
    query, mask = inputs.query, inputs.mask
    *batch, q_tokens, q_heads, _ = query.shape
    kv_tokens = inputs.key.shape[-3]
    bias = jnp.zeros((*batch, q_heads, q_tokens, kv_tokens), dtype)
    visible = jnp.broadcast_to(jnp.asarray(True) if mask is None else mask.astype(bool), bias.shape)
    if is_positional(inputs, spec):
        mask_visible = None if mask is None else visible
        positions = _positions(query.shape[:-2], kv_tokens, mask_visible, inputs.input_positions)
        by_spec, slopes = _apply_spec(spec, inputs.alibi_slopes, positions, dtype)
        visible, bias = visible & _over_batch(by_spec, bias), _over_batch(slopes, bias)
    if is_causal or (spec.causal and q_tokens == kv_tokens):
        visible &= jnp.broadcast_to(jnp.tri(q_tokens, kv_tokens, dtype=bool), bias.shape)
    if inputs.bias is not None:
        bias += jnp.broadcast_to(inputs.bias, bias.shape).astype(dtype)
    return visible, bias


def _clear_unused(inputs: FlaxInputs, visible: Bool[Array, "..."], spec: AttentionSpec) -> FlaxInputs:
    """Set keys and values that no query attends to, and queries without visible keys, to 0.

    They may be NaN, and the products and their gradients would be 0 * NaN.
    """
    by_kv_head = (*visible.shape[:-3], spec.num_kv_heads, spec.q_heads_per_kv_head, *visible.shape[-2:])
    is_used = jnp.swapaxes(visible.reshape(by_kv_head).any(axis=(-3, -2)), -1, -2)
    has_keys = jnp.swapaxes(visible.any(axis=-1), -1, -2)

    def clear(x: Array, is_kept: Array) -> Array:
        return jnp.where(is_kept[..., None], x, jnp.zeros((), x.dtype))

    key, value = clear(inputs.key, is_used), clear(inputs.value, is_used)
    return inputs._replace(query=clear(inputs.query, has_keys), key=key, value=value)


def _scores(query: Array, key: Array, spec: AttentionSpec, dtype: DTypeLike) -> Array:
    """Return the scaled and soft-capped scores [*batch, q_heads, q_tokens, kv_tokens]."""
    keys = jnp.repeat(key, spec.q_heads_per_kv_head, axis=-2).astype(dtype)
    scores = jnp.einsum("...qhd,...khd->...hqk", query.astype(dtype), keys, precision="highest")
    scores = scores * spec.softmax_scale
    return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _positions(
    queries: tuple[int, ...],
    kv_tokens: int,
    visible: Bool[Array, "..."] | None,
    input_positions: Array | None,
) -> tuple[Array, Array]:
    """Return the positions of queries and keys, each [tokens] or [*batch, tokens].

    Args:
        queries: Shape (*batch, q_tokens) of the queries.
        kv_tokens: Number of keys.
        visible: Visible pairs under the mask; None without a mask.
        input_positions: Positions of the queries, if given.
    """
    *batch, q_tokens = queries
    keys = jnp.arange(kv_tokens, dtype=jnp.int32)
    if input_positions is not None:
        are_integers = jnp.issubdtype(input_positions.dtype, jnp.integer)
        require(are_integers, "input_positions", "have an integer dtype", input_positions.dtype)
        require_shape("input_positions", input_positions.shape, queries, "*batch, q_tokens")
        positions = input_positions.astype(jnp.int32)
        return positions, positions if q_tokens == kv_tokens else jnp.broadcast_to(keys, (*batch, kv_tokens))
    if q_tokens > kv_tokens:
        raise ValueError(
            f"The positions of {q_tokens} queries among {kv_tokens} keys are ambiguous. Pass input_positions."
        )
    if q_tokens == kv_tokens or visible is None:
        return keys[:q_tokens] + (kv_tokens - q_tokens), keys
    if q_tokens != 1:
        raise ValueError(
            f"The positions of {q_tokens} queries among {kv_tokens} keys with a mask are ambiguous. Pass "
            "input_positions."
        )
    last = jnp.max(jnp.where(visible.any(axis=-3), keys, 0), axis=-1)  # [*batch, 1]
    return last, jnp.broadcast_to(keys, (*batch, kv_tokens))


def _apply_spec(
    spec: AttentionSpec, alibi_slopes: Array | None, positions: tuple[Array, Array], dtype: DTypeLike
) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """Return the visible keys under the spec, and the ALiBi bias: [*batch, q_heads, q_tokens, kv_tokens]."""
    slopes = jnp.zeros(spec.num_q_heads, dtype) if alibi_slopes is None else alibi_slopes.astype(dtype)
    slopes = slopes.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head)

    def apply_to_row(q_positions: Array, k_positions: Array) -> tuple[Array, Array]:
        visible = is_visible(spec, q_positions, k_positions)
        if spec.sparsity is not None:
            pairs = pairs_of(spec, jnp.int32(0), q_positions, k_positions, is_prefill=True)
            visible = visible & spec.sparsity.visible(pairs)
        bias = alibi_bias(spec, slopes, q_positions, k_positions)
        shape = (spec.num_q_heads, *bias.shape[2:])
        return jnp.broadcast_to(visible, bias.shape).reshape(shape), bias.reshape(shape)

    for _ in range(positions[0].ndim - 1):
        apply_to_row = jax.vmap(apply_to_row)
    return apply_to_row(*positions)


def _over_batch(array: Array, scores: Array) -> Array:
    """Broadcast an array, with or without batch axes, to the shape of the scores."""
    missing = (1,) * (scores.ndim - array.ndim)
    return jnp.broadcast_to(array.reshape(missing + array.shape), scores.shape)


def _softmax_output(scores: Array, value: Array, sinks: Array | None, spec: AttentionSpec) -> Array:
    """Return softmax(scores) @ value: [*batch, q_tokens, q_heads, head_dim]."""
    v = jnp.repeat(value, spec.q_heads_per_kv_head, axis=-2).astype(scores.dtype)
    row_max = scores.max(axis=-1, initial=-jnp.inf)  # [*batch, q_heads, q_tokens]
    sink = None if sinks is None else sinks.astype(scores.dtype)[:, None]
    row_max = jax.lax.stop_gradient(
        row_max if sink is None else jnp.maximum(row_max, _over_batch(sink, row_max))
    )
    row_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    p = jnp.exp(scores - row_max[..., None])
    row_sum = p.sum(axis=-1)
    row_sum = row_sum if sink is None else row_sum + jnp.exp(_over_batch(sink, row_max) - row_max)
    out = jnp.einsum("...hqk,...khd->...hqd", p, v, precision="highest")
    # A row without keys is divided by 1, so that it and its gradient are 0.
    return jnp.moveaxis(out / jnp.where(row_sum == 0, 1.0, row_sum)[..., None], -3, -2)
