"""Attention with all that a spec can say, as the attention_fn of Flax's multi-head attention.

Where a query stands among the keys matters to causality, windows, chunks, patterns and ALiBi. It is what
`input_positions` says, or else: query i at key i where there are as many; a single query with a mask at
the last key that the mask shows it, which in Flax's decode mode is the cache's index; without a mask the
last query at the last key (bottom-right aligned), of which there must be as many or more.

`attention` does what it can, in memory linear in tokens: as many queries as keys, or where it does not matter
where they stand. What is left, and what has a bias, takes memory that grows with queries x keys.
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

from jattn.dense.arguments import Rows, mask_of_array
from jattn.dense.attention import attend_arrays
from jattn.dense.sharding import cut_of, on_each_device
from jattn.dense.unfused_attention import Given, by_scores, is_positional
from jattn.implementations.selection import (
    ImplementationArg,
    as_static_arg,
    first_supported,
    requested_implementations,
    unsupported_reasons,
)
from jattn.masks.checks import require_floats
from jattn.spec import AttentionSpec
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
        deterministic: No dropout, whatever its rate; False unless said, as in Flax.
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
        ValueError: Shapes, dtypes or is_causal disagree, or nothing says where queries stand.
    """
    _check_nothing_else(0.0 if deterministic else dropout_rate, module)
    _check_arrays(query, key, value, bias=bias, mask=mask, input_positions=input_positions)
    spec = _spec_for(query, key, value, spec, is_causal)
    per_head = _per_head(spec, sinks, alibi_slopes)
    _check_scores_shape(query, key, bias=bias, mask=mask)
    given = Given(query, key, value, bias, mask, input_positions, **per_head)
    is_cut = cut_of(query, key, value) is not None
    out = (_attend_on_devices if is_cut else _attend)(given, spec, is_causal, as_static_arg(implementation))
    return out.astype(query.dtype if dtype is None else dtype)


@functools.partial(jax.jit, static_argnames=("spec", "is_causal", "implementation"))
def _attend_on_devices(
    given: Given, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """`attention_fn` of arrays that Explicit axes of a mesh cut."""
    cut = cut_of(given.query, given.key, given.value)
    assert cut is not None
    places: dict[str, Any] = {name: cut.of_keys for name in ("key", "value")} | {"query": cut.of_queries}
    places |= {name: P(cut.heads) for name in ("sinks", "alibi_slopes")}
    places |= {name: cut.of_scores(x) for name in ("bias", "mask") if (x := getattr(given, name)) is not None}
    places["input_positions"] = P(*cut.texts)
    specs: Any = (None if x is None else places[name] for name, x in given._asdict().items())

    def run(given: Given) -> Array:
        given = given._replace(key=cut.keys_of_part(given.key), value=cut.keys_of_part(given.value))
        return _attend(given, cut.part_of(spec), is_causal, implementation)

    out: Array = on_each_device(cut, run, (given,), (Given(*specs),), cut.of_queries)
    return out


def _attend(
    given: Given, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """`attention_fn` of what one device has."""
    has_places = given.bias is not None or given.input_positions is not None
    if not has_places and _takes_tiles(given, spec):
        return _by_tiles(given, spec, is_causal, implementation)
    reason = "there is no kernel with a bias, input_positions, or queries that stand elsewhere than keys"
    spec.check_keys(given.key.dtype)
    first_supported(requested_implementations(implementation), unsupported_reasons(spec, reason))
    return by_scores(given, spec, is_causal)


def _takes_tiles(given: Given, spec: AttentionSpec) -> bool:
    """Whether queries stand where `attention` has them. One query's scores are linear in keys anyway."""
    q_tokens, kv_tokens = given.query.shape[-3], given.key.shape[-3]
    return q_tokens == kv_tokens or (q_tokens > 1 and not is_positional(given, spec))


def _by_tiles(
    given: Given, spec: AttentionSpec, is_causal: bool, implementation: ImplementationArg
) -> Float[Array, "..."]:
    """By `attention`, nothing of queries x keys but the mask itself."""
    spec = dataclasses.replace(spec, causal=spec.causal or is_causal)
    *batch, q_tokens, q_heads, _ = given.query.shape
    texts = math.prod(batch)
    q, k, v = (x.reshape(texts, *x.shape[-3:]) for x in (given.query, given.key, given.value))
    rows, shown = Rows(None, None, None), None
    if given.mask is not None:
        shown = _of_texts(given.mask, batch)
        visible = mask_of_array(shown.astype(bool), (len(q), q_heads, q_tokens, k.shape[1]))
        rows = Rows(None, None, visible)
    per_head = {"sinks": given.sinks, "alibi_slopes": given.alibi_slopes}
    out, _ = attend_arrays((q, k, v), rows, per_head, spec=spec, implementation=implementation)
    if shown is not None and shown.dtype != bool:
        is_bias = jnp.moveaxis((shown < 0).any(axis=-1, keepdims=True), 1, 2)
        out = jnp.where(is_bias, jnp.nan, out)
    return out.reshape(given.query.shape)


def _of_texts(mask: Array, batch: list[int]) -> Shaped[Array, "texts heads queries keys"]:
    """A mask of a batch of any axes, of one; axes may be 1."""
    mask = mask.reshape((1,) * (len(batch) + 3 - mask.ndim) + mask.shape)
    if any(size != 1 for size in mask.shape[:-3]):
        mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


def _check_arrays(query: Any, key: Any, value: Any, **others: Any) -> None:
    """Queries, keys and values must be arrays of floats; of the others, where given, a bias of numbers.

    Of a query of ints the output is of ints, too, and cut off; a bias of bool is a mask in the wrong place.
    """
    require_floats(query=query)
    rule = "be of a floating-point type of 16 bits or more"
    require(jnp.dtype(query.dtype).itemsize > 1, "query", rule, query.dtype)
    require_floats(key=key, value=value)
    require_arrays(**others)
    if (bias := others["bias"]) is not None:
        is_real = bias.dtype != jnp.bool_ and not jnp.issubdtype(bias.dtype, jnp.complexfloating)
        require(is_real, "bias", "be of real numbers (an array of bool is a mask=)", bias.dtype)


def _check_scores_shape(query: Array, key: Array, **arrays: Array | None) -> None:
    """Bias and mask must broadcast to the scores."""
    *batch, q_tokens, q_heads, _ = query.shape
    shape = (*batch, q_heads, q_tokens, key.shape[-3])
    for name, array in arrays.items():
        if array is not None:
            given = (1,) * (len(shape) - array.ndim) + array.shape
            fits = array.ndim <= len(shape) and all(a in (1, b) for a, b in zip(given, shape, strict=True))
            rule = f"broadcast to {shape} (*batch, q_heads, q_tokens, kv_tokens)"
            require(fits, name, rule, array.shape)


def _check_nothing_else(dropout_rate: float, module: Any) -> None:
    if dropout_rate > 0:
        raise unsupported(f"dropout_rate={dropout_rate}", "attention_fn has no dropout", "Set it to 0")
    if module is not None:
        what, reason = f"module={type(module).__name__}", "attention_fn keeps no weights to sow"
        raise unsupported(what, reason, "Leave sow_weights=False, or use nnx.dot_product_attention")


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
    require_type("spec", spec, AttentionSpec, "or None, for the plainest that the arrays fit")
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
    per_head = spec.per_head(sinks, alibi_slopes)
    has_slopes = alibi_slopes is not None or not spec.sqrt_alibi
    require(has_slopes, "alibi_slopes", "be given with spec.sqrt_alibi", None)
    return per_head
