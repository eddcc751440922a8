"""Attention over a paged cache or packed keys: check the arguments, choose an implementation and run it.

All implementations satisfy the same contract (tests/contract.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata, RegionBatch, region_batch, rows_from
from jattn.cache import PackedKV, PagedCache, require_not_deleted
from jattn.cascade import CascadeMetadata, check_causal_rows, why_not_cascade
from jattn.implementations import differentiable_attention, mosaic_gpu, reference, xla
from jattn.implementations.differentiable_attention import reject_gradient_over_cache
from jattn.implementations.layer_config import LayerConfig, layer_config
from jattn.implementations.mosaic_gpu import KernelPlan
from jattn.implementations.selection import ImplementationArg, ImplementationChoice, requested_implementations
from jattn.masks import Mask
from jattn.merge import merge_attention_outputs
from jattn.planning import LayerPlan, Plan, build_plan, can_cascade, check_plan_matches, plan_layers
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_bool, require_shape, require_type, unsupported


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
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
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
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend from every token of a step to the keys of its request.

    Call `write_kv` first: a token attends to its own key, too.

    Scores are `scale * q.k`, then soft-capped, masked and ALiBi-biased. The softmax is computed in f32.

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
    out, lse = validated_attend(
        query,
        cache,
        metadata,
        spec,
        plan,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        mask=mask,
        implementation=implementation,
        return_lse=return_lse,
    )()
    return (out, lse.astype(jnp.float32)) if return_lse else out


def validated_attend(
    query: Any,
    cache: Any,
    metadata: Any,
    spec: Any,
    plan: Any = None,
    *,
    sinks: Any,
    alibi_slopes: Any,
    mask: Any,
    implementation: ImplementationArg,
    return_lse: bool,
) -> Callable[[], tuple[Array, Any]]:
    """Validate the arguments of `attend` and return the call that computes it.

    The call returns the output and the log-sum-exp or None. The log-sum-exp of f64 queries is f64.
    """
    _check_types(query, cache, metadata, spec, plan, mask)
    per_head = PerHeadInputs(**spec.per_head(sinks, alibi_slopes))
    _check(query, cache, metadata, spec, per_head)
    if plan is not None and mask is not None:
        raise ValueError("attend has both a mask and a plan. Pass the mask to plan() instead.")
    has_prefix = plan is not None and plan.cascade is not None and isinstance(cache, PagedCache)
    if has_prefix and can_cascade(spec, per_head.alibi_slopes):
        check_plan_matches(plan, metadata)
        cascade, plans = plan.cascade.metadata, (plan.cascade.prefix, plan.cascade.suffix)
        return functools.partial(
            attend_cascade, query, cache, cascade, spec, plans, sinks=sinks, implementation=implementation
        )
    layer_plan = _resolve_layer_plan(
        layer_config(spec, cache, query.dtype), metadata, plan, mask, implementation
    )
    require_unsharded(layer_plan.choices, query, cache)
    return functools.partial(
        _attend_jitted, query, cache, metadata, plan, mask, per_head, layer=layer_plan, return_lse=return_lse
    )


def attend_cascade(
    query: Array,
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    plans: tuple[Plan | None, Plan | None] = (None, None),
    *,
    sinks: Array | None = None,
    implementation: ImplementationArg = None,
) -> tuple[Array, Array]:
    """Attend once to a prefix that all rows share and per row to the rest, and merge both results.

    Returns the output and the log-sum-exp, which is f64 for f64 queries: the weights of the merge need it.

    Args:
        query: Queries of the step; see `attend`.
        cache: Paged cache of the layer.
        metadata: Prefix and suffix of the step, from build_cascade_metadata.
        spec: Attention of the layer, for which `why_not_cascade` returns None.
        plans: Plan of the prefix (not causal) and plan of the suffix; None plans here.
        sinks: Attention sinks, f32 [q_heads]. They join the suffix, even if it has no keys.
        implementation: Implementation to use; see `attend`.

    Raises:
        ValueError: If attention is causal and a query stands before the last token of the prefix.
    """
    if spec.causal:
        check_causal_rows(metadata)
    sinks = spec.per_head(sinks, None)["sinks"]

    def attend_part(
        part: BatchMetadata, spec: AttentionSpec, plan: Plan | None, sinks: Array | None
    ) -> tuple[Array, Array]:
        return validated_attend(
            query,
            cache,
            part,
            spec,
            plan,
            sinks=sinks,
            alibi_slopes=None,
            mask=None,
            implementation=implementation,
            return_lse=True,
        )()

    prefix = attend_part(metadata.prefix, dataclasses.replace(spec, causal=False), plans[0], None)
    suffix = attend_part(metadata.suffix, spec, plans[1], sinks)
    missing_sinks = None
    if sinks is not None:  # `attend` takes a row without suffix keys for padding and leaves its sinks out
        has_no_suffix = metadata.is_valid_token & ~metadata.suffix.is_valid_token
        missing_sinks = jnp.where(has_no_suffix[None, :], sinks.astype(suffix[1].dtype)[:, None], -jnp.inf)
    return _merge_cascade(prefix, suffix, missing_sinks, metadata.is_valid_token)


type OutputAndLse = tuple[Array, Array]


@jax.jit
def _merge_cascade(
    prefix: OutputAndLse, suffix: OutputAndLse, missing_sinks: Array | None, is_valid: Array
) -> OutputAndLse:
    """Merge prefix, suffix and the sinks that the suffix lacks; clear padding tokens."""
    outs, lses = [prefix[0], suffix[0]], [prefix[1], suffix[1]]
    if missing_sinks is not None:
        outs, lses = [*outs, jnp.zeros_like(suffix[0])], [*lses, missing_sinks]
    out, lse = merge_attention_outputs(outs, lses)
    out = jnp.where(is_valid[:, None, None], out, jnp.zeros_like(out))
    return out, jnp.where(is_valid[None, :], lse, -jnp.inf)


class PerHeadInputs(NamedTuple):
    """Per-head inputs of a layer, f32 [q_heads] or None."""

    sinks: Array | None
    alibi_slopes: Array | None


def _resolve_layer_plan(
    layer: LayerConfig,
    metadata: BatchMetadata,
    plan: Plan | None,
    mask: Mask | None,
    implementation: ImplementationArg,
) -> LayerPlan:
    """Return the plan of a layer; an implementation requested by name overrides the step's plan."""
    if plan is None:
        return plan_layers(metadata, (layer,), mask, implementation=implementation)[0]
    check_plan_matches(plan, metadata)
    layer_plan = plan.layer_plan(layer)
    if implementation is None or _uses_requested(layer_plan, implementation):
        return layer_plan
    return plan_layers(metadata, (layer,), plan.mask, implementation=implementation)[0]


def _attend(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    plan: Plan | None,
    mask: Mask | None,
    per_head: PerHeadInputs,
    *,
    layer: LayerPlan,
    return_lse: bool,
) -> tuple[Array, Any]:
    """Attend in each region of the step with the implementation chosen for it."""
    spec = layer.layer.spec
    if plan is None:
        plan = build_plan(metadata, (layer,), mask)
        layer = plan.layers[0]
    outs: list[Array] = []
    lses: list[Any] = []  # None without return_lse
    for region, choice in layer.choices:
        batch = region_batch(metadata, region)
        q, kv = region_queries(query, metadata, region), _region_kv(cache, batch)
        static_args = differentiable_attention.make_static_args(
            spec, choice, kv, batch.first_row, return_lse=return_lse
        )
        kernel_plan = plan.kernel_plan(layer, region)
        out, lse = _bind_region(static_args, q, kv, batch, plan, kernel_plan, per_head)()
        outs.append(out)
        lses.append(lse)
    if not outs:
        return query, jnp.zeros((spec.num_q_heads, 0), jnp.float32)
    if len(outs) == 1:
        return outs[0], lses[0]
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1) if return_lse else None


def _bind_region(
    static_args: differentiable_attention.StaticArgs,
    query: Array,
    kv: PagedCache | PackedKV,
    batch: RegionBatch,
    plan: Plan,
    kernel_plan: KernelPlan | None,
    per_head: PerHeadInputs,
) -> Callable[[], tuple[Array, Array | None]]:
    """Return the call that attends in one region with the implementation chosen for it."""
    spec, choice = static_args.spec, static_args.choice
    mask = _region_mask(spec, plan.mask, batch)
    options: dict[str, Any] = {"mask": mask, **per_head._asdict()}
    if choice.implementation == "reference":
        return functools.partial(reference.attend, query, kv, batch.metadata, spec, **options)
    if isinstance(kv, PackedKV) and kv.k.dtype.itemsize > 1 and kv.v.dtype.itemsize > 1:
        return functools.partial(
            differentiable_attention.attend,
            static_args,
            differentiable_attention.DifferentiableArgs(query, kv.k, kv.v, *per_head),
            differentiable_attention.NonDifferentiableArgs(
                kv.kv_start_loc, batch.metadata, mask, plan.query_tiles, kernel_plan
            ),
        )
    query, kv, per_head = reject_gradient_over_cache((query, kv, per_head), choice.implementation)
    options = {"mask": mask, **per_head._asdict()}
    if choice.kernel is None:
        return functools.partial(
            xla.attend, query, kv, batch.metadata, spec, tiles=plan.query_tiles, **options
        )
    return functools.partial(
        mosaic_gpu.attend,
        query,
        kv,
        batch.metadata,
        spec,
        choice.kernel,
        kernel_plan,
        return_lse=static_args.return_lse,
        **options,
    )


# Layers with the same configuration share a trace, a lowering and a ptxas run. An eager call compiles once.
_attend_jitted = jax.jit(_attend, static_argnames=("layer", "return_lse"))


def region_queries(query: Array, metadata: BatchMetadata, region: str) -> Array:
    """Return the queries of a region, one of REGIONS."""
    tokens = metadata.bucket.max_decode_tokens
    return query[:tokens] if region == "decode" else query[tokens:]


def _region_kv(cache: PagedCache | PackedKV, batch: RegionBatch) -> PagedCache | PackedKV:
    """Return the keys and values of a region's rows."""
    if isinstance(cache, PagedCache):
        return cache
    end = batch.first_row + batch.metadata.bucket.max_reqs
    return replace(cache, kv_start_loc=rows_from(cache.kv_start_loc, batch.first_row, end))


def _region_mask(spec: AttentionSpec, mask: Mask | None, batch: RegionBatch) -> Mask | None:
    """Return the mask of a region's rows in addition to the spec's window, chunk size and causality."""
    combined = spec.mask_with(mask)
    return None if combined is None else combined.slice_rows(batch.first_row)


def _check_types(query: Any, cache: Any, metadata: Any, spec: Any, plan: Any, mask: Any) -> None:
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    require_type("cache", cache, (PagedCache, PackedKV), "PagedCache.create makes one")
    require_type("plan", plan, (Plan, type(None)), "plan makes it; a mask is given as mask=")
    require_type("mask", mask, (Mask, type(None)), "of jattn.masks: MaskFunction(f), BlockMask(blocks=)")
    shape = getattr(query, "shape", type(query).__name__)
    require(hasattr(query, "dtype"), "query", "be an array [tokens, q_heads, head_dim]", shape)
    is_float = jnp.issubdtype(query.dtype, jnp.floating) and jnp.dtype(query.dtype).itemsize > 1
    require(is_float, "query", "have a floating-point dtype of 16 bits or more", query.dtype)


def _uses_requested(layer_plan: LayerPlan, implementation: str | Sequence[str]) -> bool:
    """Return whether a layer plan uses the requested implementations in all regions."""
    return all(
        choice.implementation in requested_implementations(implementation) for _, choice in layer_plan.choices
    )


def _check(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    per_head: PerHeadInputs,
) -> None:
    expected = (metadata.bucket.max_tokens, spec.num_q_heads, spec.head_dim)
    require_shape("query", query.shape, expected, "tokens of the bucket, q_heads, head_dim")
    cache_shape = (cache.num_kv_heads, cache.head_dim)
    require_shape("cache's kv_heads and head_dim", cache_shape, (spec.num_kv_heads, spec.head_dim), "as spec")
    has_slopes = per_head.alibi_slopes is not None or not spec.sqrt_alibi
    if not has_slopes:
        raise ValueError("spec.sqrt_alibi=True requires ALiBi slopes. Pass alibi_slopes.")
    spec.check_query_quantization(cache.k.dtype)
    if isinstance(cache, PackedKV):
        rows = (metadata.bucket.max_reqs,)
        require_shape("cache.kv_start_loc", cache.kv_start_loc.shape, rows, "rows of the metadata")
        cache.check_rows(metadata.seq_lens, metadata.query_lens)
        return
    require_not_deleted(cache)
    block_size, rule = metadata.block_size, f"equal the cache's block_size ({cache.block_size})"
    require(block_size == cache.block_size, "metadata.block_size", rule, block_size)
    shape, rule = metadata.block_table.shape, "have at least one column to attend over a paged cache"
    require(shape[1] > 0, "metadata.block_table", rule, shape)


def require_unsharded(
    choices: Iterable[tuple[str, ImplementationChoice]], query: Array, cache: PagedCache | PackedKV
) -> None:
    """Check that queries, keys and values are not sharded over Explicit mesh axes.

    Args:
        choices: Implementation chosen for each region; "reference" alone supports sharded arrays.
        query: Queries of the step.
        cache: Keys and values of the layer.

    Raises:
        NotImplementedError: If one of the arrays is sharded over an Explicit axis.
    """
    if all(choice.implementation == "reference" for _, choice in choices):
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
    out, lse = attend_cascade(query, cache, metadata, spec, sinks=sinks, implementation=implementation)
    return (out, lse.astype(jnp.float32)) if return_lse else out
