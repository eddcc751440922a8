"""`attention_fn` for Flax's multi-head attention, with all features of an AttentionSpec.

Causality, windows, chunks, masks and ALiBi depend on the position of each query among the keys. The positions
are `input_positions`. Without them:

- If there are as many queries as keys, query i is at key i.
- A single query with a mask is at the last key that the mask shows, which is the cache index in Flax's decode
  mode.
- Without a mask, the last query is at the last key (bottom-right aligned). There must be at least as many
  keys as queries.

Calls with as many queries as keys, or without dependence on positions, run `attention`, whose memory is
linear in tokens. Other calls, and calls with a bias, need memory proportional to queries x keys.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jattn.cache.spec import require_query_dtype
from jattn.dense.arguments import NO_DROPOUT, MaskInputs, can_broadcast, mask_from_array
from jattn.dense.attention import attend_arrays
from jattn.dense.sharding import explicit_sharding, run_sharded
from jattn.dense.unfused_attention import FlaxInputs, attend_unfused, is_positional
from jattn.implementations.selection import (
    ImplementationArg,
    as_static_arg,
    first_supported,
    requested_implementations,
    unsupported_reasons,
)
from jattn.masks.checks import require_floats
from jattn.spec import AttentionSpec
from pallas_kernels.architectures import is_concrete
from pallas_kernels.checks import require, require_arrays, require_shape, require_type, unsupported


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
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: Shaped[Array, "..."] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Compute attention for `nnx.MultiHeadAttention(attention_fn=partial(attention_fn, spec=spec))`.

    Args:
        query: Queries [*batch, q_tokens, q_heads, head_dim].
        key: Keys [*batch, kv_tokens, kv_heads, head_dim].
        value: Values with the shape of key.
        bias: Bias added to the scores, broadcastable to [*batch, q_heads, q_tokens, kv_tokens].
        mask: Additional mask, broadcastable to the scores: bool, or numbers as in Flax, where 0 hides a key.
            A mask with a negative number, which is probably a bias, raises ValueError. If it is traced, its
            rows with a negative number become NaN instead.
        spec: Attention spec that states `causal=`; None = full attention with scale head_dim ** -0.5.
        sinks: Attention sinks [q_heads]; see `jattn.attend`.
        alibi_slopes: ALiBi slopes [q_heads]; see `jattn.attend`.
        dropout_rng: Ignored: dropout is not supported.
        dropout_rate: Dropout rate; must be 0 unless deterministic.
        broadcast_dropout: Ignored.
        deterministic: Whether to disable dropout whatever its rate.
        dtype: Dtype of the output; None = the query's. Accumulation is in f32, or f64 for f64 queries.
        precision: Ignored: products are never less precise than requested.
        module: Must be None: attention weights cannot be sown.
        is_causal: Whether query i attends to keys up to key i, as in Flax; must agree with spec.
        input_positions: Position of each query, int [*batch, q_tokens]. If there are as many keys, they have
            the same positions.
        implementation: Implementation name or names; see `jattn.attention`.

    Returns:
        Output with the shape of query; rows without a visible key are 0.

    Raises:
        NotImplementedError: If dropout or sown weights are requested, or no requested implementation supports
            the call.
        ValueError: If shapes, dtypes or is_causal do not match, the mask has negative numbers, or the
            positions of the queries are ambiguous.
    """
    _check_unsupported(0.0 if deterministic else dropout_rate, module)
    _check_arrays(query, key, value, bias=bias, mask=mask, input_positions=input_positions)
    spec = _spec_for(query, key, value, spec, is_causal)
    spec.check_query_quantization(key.dtype)
    per_head = spec.per_head(sinks, alibi_slopes)
    _check_scores_shape(query, key, bias=bias, mask=mask)
    inputs = FlaxInputs(query, key, value, bias, mask, input_positions, **per_head)
    is_sharded = explicit_sharding(query, key, value) is not None
    attend = _attend_sharded if is_sharded else _attend
    out = attend(inputs, spec, is_causal, as_static_arg(implementation))
    return out.astype(query.dtype if dtype is None else dtype)


@functools.partial(jax.jit, static_argnames=("spec", "is_causal", "implementation"))
def _attend_sharded(
    inputs: FlaxInputs, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """Compute `attention_fn` of arrays sharded over Explicit mesh axes."""
    sharding = explicit_sharding(inputs.query, inputs.key, inputs.value)
    assert sharding is not None
    spec_by_name: dict[str, P] = {
        "query": sharding.query_spec,
        "key": sharding.kv_spec,
        "value": sharding.kv_spec,
        "input_positions": P(*sharding.batch_axes),
        "sinks": P(sharding.heads),
        "alibi_slopes": P(sharding.heads),
    }
    for name, array in (("bias", inputs.bias), ("mask", inputs.mask)):
        if array is not None:
            spec_by_name[name] = sharding.scores_spec(array)
    specs: Any = (None if x is None else spec_by_name[name] for name, x in inputs._asdict().items())

    def attend_local(inputs: FlaxInputs) -> Array:
        key, value = sharding.local_kv_heads(inputs.key), sharding.local_kv_heads(inputs.value)
        inputs = inputs._replace(key=key, value=value)
        return _attend(inputs, sharding.local_spec(spec), is_causal, implementation)

    out: Array = run_sharded(sharding, attend_local, (inputs,), (FlaxInputs(*specs),), sharding.query_spec)
    return out


def _attend(
    inputs: FlaxInputs, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """Compute `attention_fn` on one device."""
    has_positions_or_bias = inputs.bias is not None or inputs.input_positions is not None
    if not has_positions_or_bias and _can_use_attention(inputs, spec):
        return _attend_tiled(inputs, spec, is_causal, implementation)
    reason = "the kernels do not support a bias, input_positions, or queries at other positions than keys"
    first_supported(requested_implementations(implementation), unsupported_reasons(spec, reason))
    return attend_unfused(inputs, spec, is_causal)


def _can_use_attention(inputs: FlaxInputs, spec: AttentionSpec) -> bool:
    """Return whether the queries have the positions that `attention` assumes.

    A single query is computed unfused: its scores are linear in keys anyway.
    """
    q_tokens, kv_tokens = inputs.query.shape[-3], inputs.key.shape[-3]
    return q_tokens == kv_tokens or (q_tokens > 1 and not is_positional(inputs, spec))


def _attend_tiled(
    inputs: FlaxInputs, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """Compute the output with `attention`, which materializes no scores."""
    spec = dataclasses.replace(spec, causal=spec.causal or is_causal)
    *batch, q_tokens, q_heads, _ = inputs.query.shape
    flat_batch = math.prod(batch)
    q, k, v = (x.reshape(flat_batch, *x.shape[-3:]) for x in (inputs.query, inputs.key, inputs.value))
    mask_inputs, mask = MaskInputs(None, None, None), None
    if inputs.mask is not None:
        mask = _flatten_batch(inputs.mask, batch)
        visible = mask_from_array(mask.astype(bool), (len(q), q_heads, q_tokens, k.shape[1]))
        mask_inputs = MaskInputs(None, None, visible)
    per_head = {"sinks": inputs.sinks, "alibi_slopes": inputs.alibi_slopes}
    out, _ = attend_arrays((q, k, v), mask_inputs, per_head, spec=spec, implementation=implementation)
    if mask is not None and mask.dtype != bool:
        is_bias = jnp.moveaxis((mask < 0).any(axis=-1, keepdims=True), 1, 2)
        out = jnp.where(is_bias, jnp.nan, out)
    return out.reshape(inputs.query.shape)


def _flatten_batch(mask: Array, batch: list[int]) -> Shaped[Array, "flat_batch heads queries keys"]:
    """Flatten the batch axes of a mask; axes of size 1 may stay."""
    mask = mask.reshape((1,) * (len(batch) + 3 - mask.ndim) + mask.shape)
    if any(size != 1 for size in mask.shape[:-3]):
        mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


def _check_arrays(query: Any, key: Any, value: Any, **optional_arrays: Any) -> None:
    """Raise ValueError unless queries, keys and values are float arrays and the bias is real."""
    require_floats(query=query, key=key, value=value)
    require_query_dtype("query", query.dtype)
    require_arrays(**optional_arrays)
    if (bias := optional_arrays["bias"]) is not None:
        is_real = bias.dtype != jnp.bool_ and not jnp.issubdtype(bias.dtype, jnp.complexfloating)
        require(is_real, "bias", "have a real dtype (pass a bool array as mask=)", bias.dtype)
    mask = optional_arrays["mask"]
    if mask is not None and mask.dtype != bool and is_concrete(mask):
        with jax.ensure_compile_time_eval():  # The mask may be a constant of a traced function.
            is_additive = bool((mask < 0).any())
        if is_additive:
            raise ValueError(
                "mask has negative numbers, so it is an additive mask, but attention_fn hides the keys whose "
                "number is 0. Pass it as bias=, or pass the boolean array mask == 0."
            )


def _check_scores_shape(query: Array, key: Array, **arrays: Array | None) -> None:
    """Raise ValueError unless bias and mask broadcast to the scores."""
    *batch, q_tokens, q_heads, _ = query.shape
    shape = (*batch, q_heads, q_tokens, key.shape[-3])
    for name, array in arrays.items():
        if array is not None:
            rule = f"broadcast to {shape} (*batch, q_heads, q_tokens, kv_tokens)"
            require(can_broadcast(array.shape, shape), name, rule, array.shape)


def _check_unsupported(dropout_rate: float, module: Any) -> None:
    if dropout_rate > 0:
        raise unsupported(f"dropout_rate={dropout_rate}", NO_DROPOUT, "Pass dropout_rate=0")
    if module is not None:
        feature, reason = f"module={type(module).__name__}", "attention_fn cannot sow attention weights"
        raise unsupported(feature, reason, "Pass sow_weights=False, or use nnx.dot_product_attention")


def _spec_for(
    query: Array, key: Array, value: Array, spec: AttentionSpec | None, is_causal: bool
) -> AttentionSpec:
    """Return the spec, by default full attention; check that the shapes and is_causal match it."""
    for name, array in (("query", query), ("key", key)):
        rule = "have shape [*batch, tokens, heads, head_dim]"
        require(array.ndim >= 3, name, rule, array.shape)
    (*batch, q_tokens, q_heads, head_dim), (kv_tokens, kv_heads) = query.shape, key.shape[-3:-1]
    require_shape("key", key.shape, (*batch, kv_tokens, kv_heads, head_dim), "query's batch and head_dim")
    require_shape("value", value.shape, key.shape, "the shape of key")
    if spec is None:
        return AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, causal=False)
    require_type("spec", spec, AttentionSpec, "or None for full attention")
    if not spec.states_causality:
        raise ValueError(
            "spec does not state causality: an AttentionSpec is causal by default, but attention_fn is not. "
            "Pass AttentionSpec(..., causal=True) for a decoder or causal=False for an encoder."
        )
    expected = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
    actual = (q_heads, kv_heads, head_dim)
    if actual != expected:
        raise ValueError(
            f"query and key have (q_heads, kv_heads, head_dim) {actual}, but spec has {expected}. "
            "Pass a spec with the sizes of the arrays."
        )
    if is_causal and not spec.causal:
        raise ValueError(
            "is_causal=True contradicts spec.causal=False. Pass a causal spec or is_causal=False."
        )
    if is_causal and q_tokens != kv_tokens:
        raise ValueError(
            f"is_causal=True is ambiguous with a spec, {q_tokens} queries and {kv_tokens} keys: Flax aligns "
            "the first query with the first key, but a spec aligns the last query with the last key. "
            "Pass is_causal=False."
        )
    return spec
