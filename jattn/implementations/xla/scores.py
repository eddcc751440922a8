"""Visibility and ALiBi bias of query-key pairs by the spec's window, chunk size and causality."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.masks import And, Mask, Or, Pairs, Sinks
from jattn.spec import AttentionSpec


def is_visible(
    spec: AttentionSpec, query_positions: Int[Array, " tile_q"], key_positions: Int[Array, " keys"]
) -> Bool[Array, "1 1 tile_q keys"]:
    """Return which keys are visible to each query by the spec's window, chunk size and causality."""
    ahead = key_positions[None, :] - query_positions[:, None]  # distance of the key from the query
    left, right = spec.window or (None, None)
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    visible = jnp.ones(ahead.shape, bool)
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    if spec.chunk_size is not None:
        key_chunks, query_chunks = key_positions // spec.chunk_size, query_positions // spec.chunk_size
        visible &= key_chunks[None, :] == query_chunks[:, None]
    return visible[None, None]


def pairs_of(
    spec: AttentionSpec,
    row: Int[Array, ""],
    query_positions: Int[Array, " tile_q"],
    key_positions: Int[Array, " keys"],
    *,
    is_prefill: bool,
) -> Pairs:
    """Return all pairs of a tile and a chunk: [kv_heads, group, tile_q, keys]."""
    heads = jnp.arange(spec.num_q_heads, dtype=jnp.int32)
    return Pairs(
        head=heads.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head, 1, 1),
        row=row.reshape(1, 1, 1, 1),
        query=query_positions[None, None, :, None],
        key=key_positions[None, None, None, :],
        num_heads=(spec.num_q_heads, spec.num_kv_heads),
        is_prefill=is_prefill,
    )


def key_range(
    spec: AttentionSpec, first: Int[Array, ""], last: Int[Array, ""], seq_len: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the first key that may be visible to a query of a tile, and one past the last."""
    low, high = jnp.zeros_like(seq_len), seq_len
    left, right = spec.window or (None, None)
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    if right is not None:
        high = jnp.minimum(high, last + 1 + right)
    if left is not None:
        low = jnp.maximum(low, first - left)
    if spec.chunk_size is not None:
        low = jnp.maximum(low, first // spec.chunk_size * spec.chunk_size)
        high = jnp.minimum(high, (last // spec.chunk_size + 1) * spec.chunk_size)
    return low, jnp.maximum(high, low)


def num_first_keys(mask: Mask | None) -> int | None:
    """Return the number of leading keys that a mask limits attention to; None if it sets no limit."""
    if isinstance(mask, Sinks):
        return mask.num
    if not isinstance(mask, And | Or):
        return None
    bounds = [num_first_keys(operand) for operand in mask.masks]
    known_bounds = [bound for bound in bounds if bound is not None]
    if isinstance(mask, Or):
        return max(known_bounds) if len(known_bounds) == len(bounds) else None
    return min(known_bounds, default=None)


def alibi_bias(
    spec: AttentionSpec, slopes: Float[Array, "kv_heads group"], query_positions: Array, key_positions: Array
) -> Float[Array, "kv_heads group tile_q keys"]:
    """Return the ALiBi bias `slope * (key - query)`, or `-slope * sqrt(query - key)`, 0 for later keys."""
    distance = (query_positions[:, None] - key_positions[None, :]).astype(slopes.dtype)
    distance = jnp.sqrt(jnp.maximum(distance, 0.0)) if spec.sqrt_alibi else distance
    return -slopes[..., None, None] * distance[None, None]
