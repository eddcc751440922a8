"""Attention over a paged cache or packed keys: check the arguments, choose an implementation and run it.

All implementations satisfy the same contract (tests/contract.py).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata, region_batch, rows_from
from jattn.cache import PackedKV, PagedCache, require_not_deleted
from jattn.cache.spec import require_query_dtype
from jattn.cascade import CascadeMetadata, check_causal_rows, why_not_cascade
from jattn.implementations import differentiable_attention, mosaic_gpu, reference, xla
from jattn.implementations.differentiable_attention import reject_gradient_over_cache
from jattn.implementations.layer_config import layer_config
from jattn.implementations.region_inputs import RegionInputs
from jattn.implementations.selection import ImplementationArg
from jattn.masks import Mask
from jattn.masks.base import check_is_mask
from jattn.merge import merge_attention_outputs
from jattn.planning import CascadePlan, LayerPlan, Plan, RegionPlan, check_plan_matches, plan_of_layer
from jattn.pytree import replace
from jattn.score_mod import ScoreFunction, ScoreMod, as_score_mod
from jattn.spec import OTHER_NAMES, AttentionSpec
from pallas_kernels.checks import (
    require,
    require_bool,
    require_shape,
    require_type,
    suggest_argument_names,
    unsupported,
)

# The layer's spec has what other libraries take as arguments of each call.
_FIELDS = {**OTHER_NAMES, **{name: f"{name}=" for name in ("scale", "causal", "window", "soft_cap")}}
_HINTS = {name: f"Use AttentionSpec({field})" for name, field in _FIELDS.items()}


@overload
def attend(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    plan: Plan | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def attend(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    plan: Plan | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
@suggest_argument_names("attend", _HINTS)
def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    plan: Plan | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend from every token of a step to the keys of its request.

    Call `write_kv` first: a token attends to its own key, too.

    Scores are `scale * q.k`, then soft-capped, ALiBi-biased, changed by `score_mod`, and masked. The
    softmax is computed in f32.

    Args:
        query: Queries of the step in the order of the metadata's tokens. Padding tokens may hold anything.
        cache: Paged cache, or keys and values outside a cache.
        metadata: Metadata of the step.
        spec: Attention of the layer.
        plan: Plan of the step from `plan(metadata, ...)` that covers this layer; its mask applies here, too.
            None plans this layer alone.
        sinks: Attention sinks, f32 [q_heads]: one more score per head, not scaled, that has no value.
        alibi_slopes: ALiBi slopes, f32 [q_heads]. The bias is `slope * (key position - query position)`; see
            `AttentionSpec.sqrt_alibi` for the other form.
        mask: Mask in addition to the spec's, whose rows are the metadata's rows; may hold arrays that change
            from step to step. Pass a mask that all layers share to `plan(mask=)` instead; None with a plan.
        score_mod: Function `f(score, batch, head, q_idx, kv_idx)` that returns the new score of a pair, or a
            `ScoreMod` with arrays to look up. Pass it to `plan`, too, if there is a plan.
        implementation: "mosaic_gpu", "xla" or "reference", or a sequence of them in order of preference. None
            uses the plan's choice, or without a plan the best one that device and layer support. A name
            overrides the plan for this layer. Over PackedKV all implementations are differentiable, with
            memory linear in tokens except for "reference", which alone is differentiable over a paged cache.
        return_lse: Return the log-sum-exp, too.

    Returns:
        Output in query.dtype, 0 for tokens without a visible key and for padding. With return_lse also the
        natural logarithm of the softmax's denominator, f32 [q_heads, tokens], which includes sinks: if all
        keys are masked it is the sink. It is -inf for padding, for requests without keys, and if all keys are
        masked and there is no sink.

    Raises:
        ValueError: If the arguments do not fit together.
        NotImplementedError: If no requested implementation supports this call; the message has the reasons.

    Source: vLLM V1 attention backends' `forward`.
    """
    require_bool(return_lse=return_lse)
    sinks, alibi_slopes = check_attend(query, cache, metadata, spec, plan, sinks, alibi_slopes, mask)
    mod = as_score_mod(score_mod)
    cascade = None if plan is None or mod is not None else plan.cascade_of(cache, spec, alibi_slopes)
    if plan is not None and cascade is not None:
        check_plan_matches(plan, metadata)
        out, lse = attend_cascade(query, cache, spec, cascade, sinks=sinks, implementation=implementation)
    else:
        config = layer_config(spec, cache, query.dtype, mod)
        layer, regions = plan_of_layer(plan, metadata, config, mask, implementation)
        out, lse = attend_regions(
            query, cache, metadata, regions, sinks, alibi_slopes, mod, layer=layer, return_lse=return_lse
        )
    return (out, lse.astype(jnp.float32)) if return_lse else out


def check_attend(
    query: Any,
    cache: Any,
    metadata: Any,
    spec: Any,
    plan: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Any = None,
) -> tuple[Array | None, Array | None]:
    """Check the arguments of `attend`; return the sinks and the ALiBi slopes as arrays.

    Raises:
        ValueError: If the arguments do not fit together.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    require_type("cache", cache, (PagedCache, PackedKV), "PagedCache.create makes one")
    require_type("plan", plan, (Plan, type(None)), "plan makes it; a mask is given as mask=")
    if mask is not None:
        check_is_mask("mask", mask)
    shape = getattr(query, "shape", type(query).__name__)
    require(hasattr(query, "dtype"), "query", "be an array [tokens, q_heads, head_dim]", shape)
    require_query_dtype("query", query.dtype)
    per_head = spec.per_head(sinks, alibi_slopes)
    expected = (metadata.bucket.max_tokens, spec.num_q_heads, spec.head_dim)
    require_shape("query", query.shape, expected, "tokens of the bucket, q_heads, head_dim")
    cache_shape = (cache.num_kv_heads, cache.head_dim)
    require_shape("cache's kv_heads and head_dim", cache_shape, (spec.num_kv_heads, spec.head_dim), "as spec")
    spec.check_query_quantization(cache.k.dtype)
    if isinstance(cache, PackedKV):
        rows = (metadata.bucket.max_reqs,)
        require_shape("cache.kv_start_loc", cache.kv_start_loc.shape, rows, "rows of the metadata")
        cache.check_rows(metadata.seq_lens, metadata.query_lens)
        if cache.is_aligned:
            cache.check_is_aligned(metadata.row_starts, metadata.query_lens, metadata.seq_lens)
    else:
        require_not_deleted(cache)
        block_size, rule = metadata.block_size, f"equal the cache's block_size ({cache.block_size})"
        require(block_size == cache.block_size, "metadata.block_size", rule, block_size)
        shape, rule = metadata.block_table.shape, "have at least one column to attend over a paged cache"
        require(shape[1] > 0, "metadata.block_table", rule, shape)
    if plan is not None and mask is not None:
        raise ValueError("attend has both a mask and a plan. Pass the mask to plan() instead.")
    return per_head["sinks"], per_head["alibi_slopes"]


# Layers with the same configuration share a trace, a lowering and a ptxas run. An eager call compiles once.
@functools.partial(jax.jit, static_argnames=("layer", "return_lse"))
def attend_regions(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    regions: Sequence[RegionPlan],
    sinks: Array | None,
    alibi_slopes: Array | None,
    score_mod: ScoreMod | None = None,
    saved_outputs: tuple[Array, Array] | None = None,
    *,
    layer: LayerPlan,
    return_lse: bool,
) -> tuple[Array, Any]:
    """Attend in each region of the step as planned; return the output and the log-sum-exp or None.

    Args:
        query: Queries of the step.
        cache: Keys and values of the layer.
        metadata: Metadata of the step.
        regions: Plan of each region that the step has.
        sinks: Attention sinks, [q_heads].
        alibi_slopes: ALiBi slopes, [q_heads].
        score_mod: Score function of the layer; None without one.
        saved_outputs: Output and log-sum-exp that an earlier call returned for packed keys of a step with one
            region. They are returned with attention's gradient instead of being computed again.
        layer: Plan of the layer (static).
        return_lse: Return the log-sum-exp (static). That of f64 queries is f64.

    Raises:
        NotImplementedError: If an array is sharded over Explicit mesh axes.
    """
    spec, tokens = layer.layer.spec, metadata.bucket.max_decode_tokens
    _require_unsharded(layer, query, cache)
    outs: list[Array] = []
    lses: list[Any] = []  # None without return_lse
    for (name, choice), region in zip(layer.choices, regions, strict=True):
        batch = region_batch(metadata, name)
        q, kv = query[:tokens] if name == "decode" else query[tokens:], cache
        if isinstance(kv, PackedKV):
            end = batch.first_row + batch.metadata.bucket.max_reqs
            starts = rows_from(kv.kv_start_loc, batch.first_row, end)
            kv = replace(kv, kv_start_loc=starts, is_in_order=kv.is_in_order and batch.first_row == 0)
        inputs = RegionInputs(
            query=q,
            kv=kv,
            metadata=batch.metadata,
            spec=spec,
            mask=region.mask,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            score_mod=None if score_mod is None else score_mod.from_row(batch.first_row),
        )
        lse: Array | None
        if choice.implementation == "reference":
            out, lse = reference.attend(inputs)
        elif isinstance(kv, PackedKV) and kv.k.dtype.itemsize > 1 and kv.v.dtype.itemsize > 1:
            out, lse = differentiable_attention.attend(
                inputs,
                choice,
                region.query_tiles,
                region.kernel_plan,
                return_lse=return_lse,
                saved_outputs=saved_outputs,
            )
        else:
            inputs = reject_gradient_over_cache(inputs, choice.implementation)
            if choice.kernel is None:
                out, lse = xla.attend(inputs, region.query_tiles)
            else:
                out, lse = mosaic_gpu.attend(inputs, choice.kernel, region.kernel_plan, return_lse=return_lse)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return query, jnp.zeros((spec.num_q_heads, 0), jnp.float32)
    if len(outs) == 1:
        return outs[0], lses[0]
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1) if return_lse else None


def _require_unsharded(layer: LayerPlan, query: Array, cache: PagedCache | PackedKV) -> None:
    """Check that queries, keys and values are not sharded over Explicit mesh axes; the reference may be.

    Raises:
        NotImplementedError: If one of the arrays is sharded over an Explicit axis.
    """
    if {choice.implementation for _, choice in layer.choices} <= {"reference"}:
        return
    for name, array in {"query": query, "cache.k": cache.k, "cache.v": cache.v}.items():
        sharding = jax.typeof(array).sharding
        if any(sharding.spec):
            reason = "attend does not support Explicit mesh axes"
            fix = "Call attend inside jax.shard_map, or use a mesh with AxisType.Auto"
            raise unsupported(f"{name} on a mesh as {sharding.spec}", reason, fix)


@overload
def cascade_attend(
    query: Array,
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def cascade_attend(
    query: Array,
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def cascade_attend(
    query: Float[Array, "tokens q_heads head_dim"],
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend in a step whose requests share a prefix, reading the prefix once.

    The result equals `attend` over the whole step.

    Args:
        query: Queries of the step; see `attend`.
        cache: Paged cache of the layer.
        metadata: Prefix and suffix of the step, from build_cascade_metadata.
        spec: Attention of the layer: without window, chunks, ALiBi or sparsity.
        sinks: Attention sinks, f32 [q_heads]; counted once.
        implementation: Implementation to use; see `attend`.
        return_lse: Return the log-sum-exp, too; see `attend`.

    Raises:
        ValueError: If the arguments do not fit together.
        NotImplementedError: If the spec is batch-invariant or has a window, chunks or sparsity, which depend
            on the distance of query and key.

    Source: vLLM `cascade_attention`; unlike it, soft caps and sinks are supported.
    """
    require_bool(return_lse=return_lse)
    require_type("metadata", metadata, CascadeMetadata, "build_cascade_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    # A PackedKV has no block table, so prefix and suffix would both read its first keys.
    require_type("cache", cache, PagedCache, "attend takes a PackedKV")
    if (reason := why_not_cascade(spec)) is not None:
        raise unsupported(*reason, "Call attend with the metadata of the whole step")
    sinks, _ = check_attend(query, cache, metadata.prefix, spec, sinks=sinks)
    check_attend(query, cache, metadata.suffix, spec)
    cascade = CascadePlan(metadata=metadata, prefix=None, suffix=None)
    out, lse = attend_cascade(query, cache, spec, cascade, sinks=sinks, implementation=implementation)
    return (out, lse.astype(jnp.float32)) if return_lse else out


def attend_cascade(
    query: Array,
    cache: PagedCache | PackedKV,
    spec: AttentionSpec,
    cascade: CascadePlan,
    *,
    sinks: Array | None,
    implementation: ImplementationArg,
) -> tuple[Array, Array]:
    """Attend once to a prefix that all rows share and per row to the rest, and merge both results.

    Returns the output and the log-sum-exp, which is f64 for f64 queries: the weights of the merge need it.

    Args:
        query: Queries of the step; see `attend`.
        cache: Paged cache of the layer.
        spec: Attention of the layer, for which `why_not_cascade` returns None.
        cascade: Metadata of prefix and suffix, and their plans.
        sinks: Attention sinks, [q_heads]. They join the suffix, even if it has no keys.
        implementation: Implementation to use; see `attend`.

    Raises:
        ValueError: If attention is causal and a query stands before the last token of the prefix.
    """
    metadata = cascade.metadata
    if spec.causal:
        check_causal_rows(metadata)
    suffix_config = layer_config(spec, cache, query.dtype)
    prefix_config = dataclasses.replace(suffix_config, spec=dataclasses.replace(spec, causal=False))
    layer, regions = plan_of_layer(cascade.prefix, metadata.prefix, prefix_config, None, implementation)
    prefix = attend_regions(query, cache, metadata.prefix, regions, None, None, layer=layer, return_lse=True)
    layer, regions = plan_of_layer(cascade.suffix, metadata.suffix, suffix_config, None, implementation)
    suffix = attend_regions(query, cache, metadata.suffix, regions, sinks, None, layer=layer, return_lse=True)
    return _merge_cascade(prefix, suffix, sinks, metadata)


@jax.jit
def _merge_cascade(
    prefix: tuple[Array, Array],
    suffix: tuple[Array, Array],
    sinks: Array | None,
    metadata: CascadeMetadata,
) -> tuple[Array, Array]:
    """Merge the outputs and log-sum-exps of prefix and suffix; clear padding tokens."""
    outs, lses = [prefix[0], suffix[0]], [prefix[1], suffix[1]]
    if sinks is not None:  # Attention takes a row without suffix keys for padding and leaves its sinks out.
        has_no_suffix = metadata.is_valid_token & ~metadata.suffix.is_valid_token
        sinks = jnp.where(has_no_suffix[None, :], sinks.astype(suffix[1].dtype)[:, None], -jnp.inf)
        outs, lses = [*outs, jnp.zeros_like(suffix[0])], [*lses, sinks]
    out, lse = merge_attention_outputs(outs, lses)
    out = jnp.where(metadata.is_valid_token[:, None, None], out, jnp.zeros_like(out))
    return out, jnp.where(metadata.is_valid_token[None, :], lse, -jnp.inf)
