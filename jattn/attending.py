"""Attention: the one dispatcher. Every way to compute it meets the same contract (tests/contract.py)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata, RegionBatch, region_batch, rows_from
from jattn.cache import PackedKV, PagedCache, require_not_deleted
from jattn.cascade import CascadeMetadata, check_causal_rows, why_no_cascade
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
    """Attends each token of a step to the keys of its request. Write the step's own keys first (write_kv).

    Scores are `scale * q.k`, soft-capped, masked, ALiBi-biased; softmax in f32.

    Args:
        query: The step's queries, laid out as the metadata says; padding may be anything.
        cache: A paged cache, or the keys and values themselves.
        metadata: The step's metadata.
        spec: The layer's attention.
        plan: From `plan(metadata, ...)`, for layers like this one among others: what it says is done. Made
            here for this layer when None. A mask that it was made for holds here, too.
        sinks: One more score for each head, not scaled, without a value; f32.
        alibi_slopes: Bias `slope * (key position - query position)` of each head, or spec.sqrt_alibi's.
        mask: Which keys a query sees, on top of what the spec says; may hold arrays that change from step to
            step. Rows are those of the metadata. For one that all layers share: `plan(mask=)`; with a plan
            this is None.
        implementation: "mosaic_gpu", "xla" or "reference", or several in order of preference; None = what the
            plan says, without one the best that the device and the layer allow. What is named here wins over
            a plan, for this layer. Over PackedKV each has a derivative, whose memory is linear in tokens but
            for "reference", which alone has one over a paged cache.
        return_lse: Return the log-sum-exp too.

    Returns:
        Output in query.dtype; rows without a key and padding are 0. With return_lse also the natural log of
        the softmax's denominator, f32 [q_heads, tokens], sinks included: where all keys are masked it is the
        sink. -inf where the output is 0 without one, of requests without any keys, and of padding.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: No implementation asked for can serve this; the message says why.

    Source: vLLM V1 attention backends' `forward`.
    """
    require_bool(return_lse=return_lse)
    how: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes, "implementation": implementation}
    run = validated_attend(query, cache, metadata, spec, plan, mask=mask, return_lse=return_lse, **how)
    out, lse = run()
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
    """`attend`, yet to be called. Its log-sum-exp, or None, is f64 of f64 queries, as it was summed."""
    _check_types(query, cache, metadata, spec, plan, mask)
    per_head = PerHeadInputs(**spec.per_head(sinks, alibi_slopes))
    _check(query, cache, metadata, spec, per_head)
    no_mask = "be None with a plan (give it to plan, or leave plan=None)"
    require(plan is None or mask is None, "mask", no_mask, mask)
    has_prefix = plan is not None and plan.cascade is not None and isinstance(cache, PagedCache)
    if has_prefix and can_cascade(spec, per_head.alibi_slopes):
        check_plan_matches(plan, metadata)
        parts, plans = plan.cascade.metadata, (plan.cascade.prefix, plan.cascade.suffix)
        how: dict[str, Any] = {"sinks": sinks, "implementation": implementation}
        return functools.partial(attend_cascade, query, cache, parts, spec, plans, **how)
    chosen = _chosen(layer_config(spec, cache, query.dtype), metadata, plan, mask, implementation)
    require_unsharded(chosen.choices, query, cache)
    of_call: dict[str, Any] = {"layer": chosen, "return_lse": return_lse}
    return functools.partial(_attend_once, query, cache, metadata, plan, mask, per_head, **of_call)


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
    """`attend` with LSE over a prefix that all rows share, once, and over what each has besides, merged.

    The LSE is f64 of f64 queries: of its f32 the parts' weights would have no more digits.

    Args:
        query: As in `attend`.
        cache: As in `attend`.
        metadata: From build_cascade_metadata.
        spec: As in `attend`; one that `why_no_cascade` has nothing against.
        plans: Of the prefix, where causal is False, and of the suffix; None = made here.
        sinks: As in `attend`; they join the suffix, whether it has keys or none.
        implementation: As in `attend`.

    Raises:
        ValueError: Attention is causal, and a query is seen to stand before the prefix's last token.
    """
    if spec.causal:
        check_causal_rows(metadata)
    sinks = spec.per_head(sinks, None)["sinks"]
    how: dict[str, Any] = {"alibi_slopes": None, "mask": None, "implementation": implementation}
    run = lambda part, spec, plan, sinks: validated_attend(
        query, cache, part, spec, plan, sinks=sinks, return_lse=True, **how
    )()
    prefix = run(metadata.prefix, dataclasses.replace(spec, causal=False), plans[0], None)
    suffix = run(metadata.suffix, spec, plans[1], sinks)
    bare_sinks = None
    if sinks is not None:  # to attention a row without keys is padding, and has no sinks
        is_bare = metadata.is_valid_token & ~metadata.suffix.is_valid_token
        bare_sinks = jnp.where(is_bare[None, :], sinks.astype(suffix[1].dtype)[:, None], -jnp.inf)
    return _merge_once(prefix, suffix, bare_sinks, metadata.is_valid_token)


type Attended = tuple[Array, Array]  # an output and its log-sum-exp


@jax.jit
def _merge_once(prefix: Attended, suffix: Attended, bare_sinks: Array | None, is_live: Array) -> Attended:
    """The prefix, the suffix and sinks, which have no values, as one; padding without keys."""
    outs, lses = [prefix[0], suffix[0]], [prefix[1], suffix[1]]
    if bare_sinks is not None:
        outs, lses = [*outs, jnp.zeros_like(suffix[0])], [*lses, bare_sinks]
    out, lse = merge_attention_outputs(outs, lses)
    out = jnp.where(is_live[:, None, None], out, jnp.zeros_like(out))
    return out, jnp.where(is_live[None, :], lse, -jnp.inf)


class PerHeadInputs(NamedTuple):
    """What a layer has one of for each query head, f32 [q_heads], or None."""

    sinks: Array | None
    alibi_slopes: Array | None


def _chosen(
    layer: LayerConfig,
    metadata: BatchMetadata,
    plan: Plan | None,
    mask: Mask | None,
    implementation: ImplementationArg,
) -> LayerPlan:
    """What serves the layer: as the plan says, unless something else is asked for by name."""
    if plan is None:
        return plan_layers(metadata, (layer,), mask, implementation=implementation)[0]
    check_plan_matches(plan, metadata)
    chosen = plan.layer_plan(layer)
    if implementation is None or _is_asked_for(chosen, implementation):
        return chosen
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
    """Both regions by what was chosen for them."""
    spec = layer.layer.spec
    if plan is None:
        plan = build_plan(metadata, (layer,), mask)
        layer = plan.layers[0]
    outs: list[Array] = []
    lses: list[Any] = []  # None where it is not wanted
    for region, choice in layer.choices:
        part = region_batch(metadata, region)
        q, kv = region_queries(query, metadata, region), _keys_of(cache, part)
        how = differentiable_attention.make_static_args(
            spec, choice, kv, part.first_row, return_lse=return_lse
        )
        out, lse = _way_of(how, q, kv, part, plan, plan.kernel_plan(layer, region), per_head)()
        outs.append(out)
        lses.append(lse)
    if not outs:
        return query, jnp.zeros((spec.num_q_heads, 0), jnp.float32)
    if len(outs) == 1:
        return outs[0], lses[0]
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1) if return_lse else None


def _way_of(
    how: differentiable_attention.StaticArgs,
    query: Array,
    kv: PagedCache | PackedKV,
    part: RegionBatch,
    plan: Plan,
    work: KernelPlan | None,
    per_head: PerHeadInputs,
) -> Callable[[], tuple[Array, Array | None]]:
    """What attends one region, as was chosen for it."""
    spec, choice, mask = how.spec, how.choice, _mask_of(how.spec, plan.mask, part)
    options: dict[str, Any] = {"mask": mask, **per_head._asdict()}
    if choice.implementation == "reference":
        return functools.partial(reference.attend, query, kv, part.metadata, spec, **options)
    if isinstance(kv, PackedKV) and kv.k.dtype.itemsize > 1 and kv.v.dtype.itemsize > 1:
        context = differentiable_attention.NonDifferentiableArgs(
            kv.kv_start_loc, part.metadata, mask, plan.query_tiles, work
        )
        return functools.partial(
            differentiable_attention.attend,
            how,
            differentiable_attention.DifferentiableArgs(query, kv.k, kv.v, *per_head),
            context,
        )
    query, kv, per_head = reject_gradient_over_cache((query, kv, per_head), choice.implementation)
    given, options = (query, kv, part.metadata, spec), {"mask": mask, **per_head._asdict()}
    if choice.kernel is None:
        return functools.partial(xla.attend, *given, tiles=plan.query_tiles, **options)
    return functools.partial(
        mosaic_gpu.attend, *given, choice.kernel, work, return_lse=how.return_lse, **options
    )


# All layers of a kind in a step share a trace, a lowering and a run of ptxas; an eager call compiles once.
_attend_once = jax.jit(_attend, static_argnames=("layer", "return_lse"))


def region_queries(query: Array, metadata: BatchMetadata, region: str) -> Array:
    """The queries of one of REGIONS."""
    tokens = metadata.bucket.max_decode_tokens
    return query[:tokens] if region == "decode" else query[tokens:]


def _keys_of(cache: PagedCache | PackedKV, part: RegionBatch) -> PagedCache | PackedKV:
    """Where the keys of a region's rows are."""
    if isinstance(cache, PagedCache):
        return cache
    end = part.first_row + part.metadata.bucket.max_reqs
    return replace(cache, kv_start_loc=rows_from(cache.kv_start_loc, part.first_row, end))


def _mask_of(spec: AttentionSpec, mask: Mask | None, part: RegionBatch) -> Mask | None:
    """What the queries of a region see beyond the spec's numbers."""
    whole = spec.mask_with(mask)
    return None if whole is None else whole.slice_rows(part.first_row)


def _check_types(query: Any, cache: Any, metadata: Any, spec: Any, plan: Any, mask: Any) -> None:
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    require_type("cache", cache, (PagedCache, PackedKV), "PagedCache.create makes one")
    require_type("plan", plan, (Plan, type(None)), "plan makes it; a mask is given as mask=")
    require_type("mask", mask, (Mask, type(None)), "of jattn.masks: MaskFunction(f), BlockMask(blocks=)")
    shape = getattr(query, "shape", type(query).__name__)
    require(hasattr(query, "dtype"), "query", "be an array [tokens, q_heads, head_dim]", shape)
    is_real = jnp.issubdtype(query.dtype, jnp.floating) and jnp.dtype(query.dtype).itemsize > 1
    require(is_real, "query", "be of a floating-point type of 16 bits or more", query.dtype)


def _is_asked_for(chosen: LayerPlan, implementation: str | Sequence[str]) -> bool:
    """Whether a plan has what is asked for by name."""
    return all(
        choice.implementation in requested_implementations(implementation) for _, choice in chosen.choices
    )


def _check(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    per_head: PerHeadInputs,
) -> None:
    want = (metadata.bucket.max_tokens, spec.num_q_heads, spec.head_dim)
    require_shape("query", query.shape, want, "tokens of the bucket, q_heads, head_dim")
    got = (cache.num_kv_heads, cache.head_dim)
    require_shape("cache's kv_heads and head_dim", got, (spec.num_kv_heads, spec.head_dim), "as spec")
    has_slopes = per_head.alibi_slopes is not None or not spec.sqrt_alibi
    require(has_slopes, "alibi_slopes", "be given with spec.sqrt_alibi", None)
    spec.check_keys(cache.k.dtype)
    if isinstance(cache, PackedKV):
        rows = (metadata.bucket.max_reqs,)
        require_shape("cache.kv_start_loc", cache.kv_start_loc.shape, rows, "rows of the metadata")
        cache.check_rows(metadata.seq_lens, metadata.query_lens)
        return
    require_not_deleted(cache)
    own, rule = metadata.block_size, f"be the cache's ({cache.block_size})"
    require(own == cache.block_size, "metadata.block_size", rule, own)
    shape, rule = metadata.block_table.shape, "have columns to attend over a paged cache"
    require(shape[1] > 0, "metadata.block_table", rule, shape)


def require_unsharded(
    choices: Iterable[tuple[str, ImplementationChoice]], query: Array, cache: PagedCache | PackedKV
) -> None:
    """Explicit axes of a mesh must cut nothing that `attend` is given: what serves it is not told of them.

    Args:
        choices: What serves each region; the reference, which is plain products, takes arrays that agree.
        query: The queries.
        cache: Keys and values.

    Raises:
        NotImplementedError: They do.
    """
    if all(choice.implementation == "reference" for _, choice in choices):
        return
    for name, array in {"query": query, "cache.k": cache.k, "cache.v": cache.v}.items():
        sharding = jax.typeof(array).sharding
        if any(sharding.spec):
            reason = "attend is not told of axes that are Explicit"
            way_out = "Cut it by jax.shard_map, or by a mesh with AxisType.Auto"
            raise unsupported(f"{name} on a mesh as {sharding.spec}", reason, way_out)


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
    """`attend` over a step whose requests share a prefix: the same result with the prefix read once.

    Args:
        query: As in `attend`.
        cache: As in `attend`.
        metadata: From build_cascade_metadata.
        spec: As in `attend`; causal, without what depends on the distance of query and key.
        sinks: As in `attend`; they join the suffix, once.
        implementation: As in `attend`.
        return_lse: As in `attend`.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: The spec is batch-invariant, or has a window, chunks, ALiBi or sparsity:
            positions within the shared prefix mean something else in every request.

    Source: vLLM `cascade_attention`; unlike it, soft caps and sinks are served.
    """
    require_bool(return_lse=return_lse)
    require_type("metadata", metadata, CascadeMetadata, "build_cascade_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    # Both parts would read the first keys of a PackedKV, which has no block table to tell them apart.
    require_type("cache", cache, PagedCache, "attend takes a PackedKV")
    if (found := why_no_cascade(spec)) is not None:
        raise unsupported(*found, "Use attend with the step's own metadata")
    out, lse = attend_cascade(query, cache, metadata, spec, sinks=sinks, implementation=implementation)
    return (out, lse.astype(jnp.float32)) if return_lse else out
