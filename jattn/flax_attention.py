"""Attention with all that a spec can say, as the attention_fn of Flax's multi-head attention.

Where a query stands among the keys matters to causality, windows, chunks, patterns and ALiBi. It is what
`input_positions` says, or else: query i at key i where there are as many; a single query with a mask at
the last key that the mask shows it, which in Flax's decode mode is the cache's index; without a mask the
last query at the last key (bottom-right aligned).

`attention` does what it can, in memory linear in tokens: as many queries as keys, or where it does not matter
where they stand. What is left, and what has a bias, takes memory that grows with queries x keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from jattn.dense_attention import attend_arrays
from jattn.dense_checks import Rows, mask_of_array
from jattn.implementations.choice import asked_for, first_able
from jattn.implementations.xla import alibi_bias, pairs_of, visible
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_shape, unsupported


def attention_fn(
    query: Float[Array, "..."],
    key: Float[Array, "..."],
    value: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    mask: Shaped[Array, "..."] | None = None,
    *,
    spec: AttentionSpec | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = True,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: Shaped[Array, "..."] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Attention as a spec, given with functools.partial, for `nnx.MultiHeadAttention(attention_fn=...)`.

    Args:
        query: [*batch, q_tokens, q_heads, head_dim].
        key: [*batch, kv_tokens, kv_heads, head_dim].
        value: As key.
        bias: Added to the scores, broadcastable to [*batch, q_heads, q_tokens, kv_tokens].
        mask: Which keys a query may see besides; shape as bias. Bool, or Flax's numbers: 0 hides. A negative
            number is a bias in the wrong place, and its row becomes NaN.
        spec: The attention; None = every key is seen, scale head_dim ** -0.5.
        sinks: As in `attend`.
        alibi_slopes: As in `attend`.
        dropout_rng: Not used: there is no dropout.
        dropout_rate: Must be 0 unless deterministic.
        broadcast_dropout: Not used.
        deterministic: No dropout.
        dtype: Of the output; None = the query's. Sums are f32, or f64 for f64 queries.
        precision: Not used: products are never less exact than asked for.
        module: Must be None: no weights are sown.
        is_causal: Query i sees keys up to key i, as in Flax; the spec must not say otherwise.
        input_positions: Integers [*batch, q_tokens]: where each query stands; as many keys stand there, too.
        implementation: As in `attend`.

    Returns:
        Output as query; rows that see no key are 0.

    Raises:
        NotImplementedError: Dropout, weights to sow, or an implementation that cannot.
        ValueError: Shapes or is_causal disagree, or nothing says where queries stand.
    """
    _check_nothing_else(0.0 if deterministic else dropout_rate, module)
    spec = _spec_for(query, key, value, spec, is_causal)
    per_head = _per_head(spec, sinks, alibi_slopes)
    arrays = query, key, value
    if bias is None and input_positions is None and _takes_tiles(query, key, spec, alibi_slopes):
        out = _by_tiles(arrays, mask, per_head, spec, is_causal, implementation)
    else:
        out = _by_scores(arrays, bias, mask, per_head, spec, is_causal, input_positions, implementation)
    return out.astype(query.dtype if dtype is None else dtype)


def _takes_tiles(query: Array, key: Array, spec: AttentionSpec, alibi_slopes: Array | None) -> bool:
    """Whether queries stand where `attention` has them. One query's scores are linear in keys anyway."""
    q_tokens, kv_tokens = query.shape[-3], key.shape[-3]
    is_positional = _is_positional(spec) or alibi_slopes is not None
    return q_tokens == kv_tokens or (q_tokens > 1 and not is_positional)


def _by_scores(
    arrays: tuple[Array, Array, Array],
    bias: Array | None,
    mask: Array | None,
    per_head: dict[str, Array | None],
    spec: AttentionSpec,
    is_causal: bool,
    input_positions: Array | None,
    implementation: str | Sequence[str] | None,
) -> Float[Array, "..."]:
    """With all scores at once."""
    reason = "there is no kernel with a bias, input_positions, or queries that stand elsewhere than keys"
    first_able(asked_for(implementation), {"mosaic_gpu": reason})
    query, key, value = arrays
    slopes = per_head["alibi_slopes"]
    scores = _masked_scores(query, key, spec, mask, bias, slopes, is_causal, input_positions)
    return _average(scores, value, per_head["sinks"], spec)


def _by_tiles(
    arrays: tuple[Array, Array, Array],
    mask: Array | None,
    per_head: dict[str, Array | None],
    spec: AttentionSpec,
    is_causal: bool,
    implementation: str | Sequence[str] | None,
) -> Float[Array, "..."]:
    """By `attention`, nothing of queries x keys but the mask itself."""
    spec = dataclasses.replace(spec, causal=spec.causal or is_causal)
    (*batch, q_tokens, q_heads, _), kv_tokens = arrays[0].shape, arrays[1].shape[-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in arrays)
    asked = implementation if isinstance(implementation, str | None) else tuple(implementation)
    rows, shown = Rows(None, None, None), None
    if mask is not None:
        _broadcast("mask", mask, (*batch, q_heads, q_tokens, kv_tokens))
        shown = _of_texts(mask, batch)
        sees = mask_of_array(shown.astype(bool), (len(q), q_heads, q_tokens, kv_tokens))
        rows = Rows(None, None, sees)
    out, _ = attend_arrays((q, k, v), rows, per_head, spec=spec, implementation=asked)
    if shown is not None and shown.dtype != bool:
        is_bias = jnp.moveaxis((shown < 0).any(axis=-1, keepdims=True), 1, 2)
        out = jnp.where(is_bias, jnp.nan, out)
    return out.reshape(arrays[0].shape)


def _of_texts(mask: Array, batch: list[int]) -> Shaped[Array, "texts heads queries keys"]:
    """A mask of a batch of any axes, of one; axes may be 1."""
    mask = mask.reshape((1,) * (len(batch) + 3 - mask.ndim) + mask.shape)
    if any(size != 1 for size in mask.shape[:-3]):
        mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    return mask.reshape(-1, *mask.shape[-3:])


def _check_nothing_else(dropout_rate: float, module: Any) -> None:
    if dropout_rate > 0:
        raise unsupported(f"dropout_rate={dropout_rate}", "attention_fn has no dropout", "Set it to 0")
    if module is not None:
        what, reason = f"module={type(module).__name__}", "attention_fn keeps no weights to sow"
        raise unsupported(what, reason, "Leave sow_weights=False, or use nnx.dot_product_attention")


def _masked_scores(
    query: Array,
    key: Array,
    spec: AttentionSpec,
    mask: Array | None,
    bias: Array | None,
    alibi_slopes: Array | None,
    is_causal: bool,
    input_positions: Array | None,
) -> Float[Array, "..."]:
    """Scores with all that is added to them, -inf where a key is not seen."""
    q_tokens, kv_tokens = query.shape[-3], key.shape[-3]
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    scores = _scores(query, key, spec, wide)  # [*batch, q_heads, q_tokens, kv_tokens]
    sees = jnp.ones(scores.shape, bool)
    if mask is not None:
        mask = _broadcast("mask", mask, scores.shape)
        sees = mask.astype(bool)
        scores = scores if mask.dtype == bool else jnp.where(mask < 0, jnp.nan, scores)
    if _is_positional(spec) or alibi_slopes is not None:
        shown = None if mask is None else sees
        positions = _positions(query.shape[:-2], kv_tokens, shown, input_positions)
        by_spec, slopes = _of_positions(spec, alibi_slopes, positions, wide)
        sees, scores = sees & _over_batch(by_spec, scores), scores + _over_batch(slopes, scores)
    if is_causal or (spec.causal and q_tokens == kv_tokens):
        sees &= jnp.broadcast_to(jnp.tri(q_tokens, kv_tokens, dtype=bool), scores.shape)
    if bias is not None:
        scores += _broadcast("bias", bias, scores.shape).astype(wide)
    return jnp.where(sees, scores, -jnp.inf)


def _spec_for(
    query: Array, key: Array, value: Array, spec: AttentionSpec | None, is_causal: bool
) -> AttentionSpec:
    """The spec, or the plainest one that these arrays fit; shapes and is_causal must agree with it."""
    for name, array in (("query", query), ("key", key)):
        rule = "have shape [*batch, tokens, heads, head_dim]"
        require(array.ndim >= 3, name, rule, array.shape)
    (*batch, q_tokens, q_heads, head_dim), (kv_tokens, kv_heads) = query.shape, key.shape[-3:-1]
    require_shape("key", key.shape, (*batch, kv_tokens, kv_heads, head_dim), "the query's batch, head_dim")
    require_shape("value", value.shape, key.shape, "as key")
    if spec is None:
        return AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, causal=False)
    want = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    require_shape("q_heads, kv_heads, head_dim", (q_heads, kv_heads, head_dim), want, "as spec")
    agrees = f"agree with spec.causal ({spec.causal})"
    require(spec.causal or not is_causal, "is_causal", agrees, is_causal)
    aligned = "(Flax aligns the first of them, a spec the last)"
    rule = f"be False with a spec, {q_tokens} queries and {kv_tokens} keys {aligned}"
    require(q_tokens == kv_tokens or not is_causal, "is_causal", rule, is_causal)
    return spec


def _per_head(
    spec: AttentionSpec, sinks: Array | None, alibi_slopes: Array | None
) -> dict[str, Array | None]:
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            require_shape(name, per_head.shape, (spec.num_q_heads,), "q_heads")
    has_slopes = alibi_slopes is not None or not spec.sqrt_alibi
    require(has_slopes, "alibi_slopes", "be given with spec.sqrt_alibi", None)
    return {"sinks": sinks, "alibi_slopes": alibi_slopes}


def _is_positional(spec: AttentionSpec) -> bool:
    """Whether it matters to the spec where a query stands."""
    return spec.causal or any(x is not None for x in (spec.window, spec.chunk_size, spec.sparsity))


def _scores(query: Array, key: Array, spec: AttentionSpec, dtype: DTypeLike) -> Array:
    """Scaled and soft-capped [*batch, q_heads, q_tokens, kv_tokens]."""
    keys = jnp.repeat(key, spec.q_heads_per_kv_head, axis=-2).astype(dtype)
    scores = jnp.einsum("...qhd,...khd->...hqk", query.astype(dtype), keys, precision="highest")
    scores = scores * spec.softmax_scale
    return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def _broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        rule = f"broadcast to {shape} (*batch, q_heads, q_tokens, kv_tokens)"
        require(False, name, rule, array.shape)
        raise


def _positions(
    queries: tuple[int, ...], kv_tokens: int, sees: Bool[Array, "..."] | None, given: Array | None
) -> tuple[Array, Array]:
    """Where queries and keys stand: each [tokens], or [*batch, tokens].

    Args:
        queries: (*batch, q_tokens).
        kv_tokens: Keys.
        sees: The mask.
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
    if q_tokens == kv_tokens or sees is None:
        return keys[:q_tokens] + (kv_tokens - q_tokens), keys
    rule = f"be given for {q_tokens} queries over {kv_tokens} keys with a mask (where each query stands)"
    require(q_tokens == 1, "input_positions", rule, None)
    last = jnp.max(jnp.where(sees.any(axis=-3), keys, 0), axis=-1)  # [*batch, 1]
    return last, jnp.broadcast_to(keys, (*batch, kv_tokens))


def _of_positions(
    spec: AttentionSpec, alibi_slopes: Array | None, positions: tuple[Array, Array], dtype: DTypeLike
) -> tuple[Bool[Array, "..."], Float[Array, "..."]]:
    """What a query sees by the spec, and ALiBi's bias: [*batch, q_heads, q_tokens, kv_tokens] or no batch."""
    slopes = jnp.zeros(spec.num_q_heads, dtype) if alibi_slopes is None else alibi_slopes.astype(dtype)
    slopes = slopes.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head)

    def of_row(q_positions: Array, k_positions: Array) -> tuple[Array, Array]:
        sees = visible(spec, q_positions, k_positions)
        if spec.sparsity is not None:
            pairs = pairs_of(spec, jnp.int32(0), q_positions, k_positions, is_prefill=True)
            sees = sees & spec.sparsity.sees(pairs)
        bias = alibi_bias(spec, slopes, q_positions, k_positions)
        shape = (spec.num_q_heads, *bias.shape[2:])
        return jnp.broadcast_to(sees, bias.shape).reshape(shape), bias.reshape(shape)

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
