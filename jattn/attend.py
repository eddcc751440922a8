"""Attention: the one dispatcher. Every way to compute it meets the same contract (tests/contract.py)."""

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.cache import PackedKV, PagedCache
from jattn.implementations import mosaic_gpu, reference, xla
from jattn.implementations.region_plans import RegionPlan
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.plan import Plan
from jattn.pytree import replace
from jattn.spec import QUERY_DTYPES, AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_one_of, require_shape, unsupported

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # best first


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
        plan: From `plan(metadata, ...)`; made here when None. A mask that it was made for holds here, too.
        sinks: One more score for each head, not scaled, without a value; f32.
        alibi_slopes: Bias `slope * (key position - query position)` of each head, or spec.sqrt_alibi's.
        mask: Which keys a query sees, on top of what the spec says; may hold arrays that change from step to
            step. Rows are those of the metadata. One that all layers share: `plan(mask=)`.
        implementation: "mosaic_gpu", "xla" or "reference", or several in order of preference; None = the best
            that this machine and this request allow. Only "reference" has a reverse-mode derivative.
        return_lse: Return the log-sum-exp too.

    Returns:
        Output in query.dtype; rows without a key and padding are 0. With return_lse also the natural log of
        the softmax's denominator, f32 [q_heads, tokens], sinks included; -inf where the output is 0 for want
        of keys.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: No implementation asked for can serve this; the message says why.

    Source: vLLM V1 attention backends' `forward`.
    """
    _check(query, cache, metadata, spec, plan, mask, sinks, alibi_slopes)
    if plan is not None and mask is None:
        mask = plan.mask
    elif plan is not None:
        plan = replace(plan, decode=(), prefill=())  # made without this mask
    mask = spec.mask_with(mask)
    bucket, tokens = metadata.bucket, metadata.bucket.max_decode_tokens
    regions: list[tuple[Array, BatchMetadata, slice]] = []
    if bucket.max_decodes:
        regions.append((query[:tokens], metadata.decode_part, slice(0, bucket.max_decodes)))
    if bucket.max_prefill_tokens:
        regions.append((query[tokens:], metadata.prefill_part, slice(bucket.max_decodes, bucket.max_reqs)))
    if not regions:
        nothing = jnp.zeros((spec.num_q_heads, 0), jnp.float32)
        return (query, nothing) if return_lse else query
    results = []
    for part, of_part, rows in regions:
        kv = cache
        if isinstance(cache, PackedKV):
            kv = replace(cache, kv_start_loc=cache.kv_start_loc[rows])
        results.append(
            _attend_region(
                part,
                kv,
                of_part,
                spec,
                plan,
                None if mask is None else mask.of_rows_from(rows.start),
                implementation,
                return_lse=return_lse,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            )
        )
    outs, lses = zip(*results, strict=True)
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    return (out, jnp.concatenate(lses, axis=1)) if return_lse else out


def _attend_region(
    query: Array,
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    plan: Plan | None,
    mask: Mask | None,
    implementation: str | Sequence[str] | None,
    *,
    return_lse: bool,
    **per_head: Array | None,
) -> tuple[Array, Array | None]:
    """One region, by the best implementation for it."""
    reasons = {
        "mosaic_gpu": mosaic_gpu.why_not(query, kv, metadata, spec, mask),
        "reference": reference.why_not(spec),
    }
    name = choose_implementation(implementation, reasons)
    if name == "mosaic_gpu":
        plans: tuple[RegionPlan, ...] = ()
        if plan is not None:
            plans = plan.decode if metadata.bucket.max_decodes else plan.prefill
        return mosaic_gpu.attend(
            query, kv, metadata, spec, plans=plans, mask=mask, return_lse=return_lse, **per_head
        )
    if name == "xla":
        tiles = None if plan is None else plan.query_tiles
        return xla.attend(query, kv, metadata, spec, tiles=tiles, mask=mask, **per_head)
    return reference.attend(query, kv, metadata, spec, mask=mask, **per_head)


def choose_implementation(
    implementation: str | Sequence[str] | None = None,
    reasons: Mapping[str, str | None] | None = None,
) -> str:
    """The first implementation of those asked for that can serve; None asks for the best.

    Args:
        implementation: A name, several in order of preference, or None.
        reasons: Why an implementation cannot serve this request, wherever it runs; by name.

    Raises:
        ValueError: There is no implementation of that name.
        NotImplementedError: None of them can; the message has each one's reason.
    """
    asked = IMPLEMENTATIONS if implementation is None else implementation
    asked = (asked,) if isinstance(asked, str) else tuple(asked)
    require(len(asked) > 0, "implementation", "name at least one of " + ", ".join(IMPLEMENTATIONS), asked)
    declined = []
    for name in asked:
        require_one_of("implementation", name, IMPLEMENTATIONS)
        is_kernel = name == "mosaic_gpu"
        reason = support.why_not(platform=jax.default_backend()) if is_kernel else None
        reason = reason or (reasons or {}).get(name)
        if reason is None:
            return name
        declined.append(f"{name}: {reason}")
    raise unsupported("attend", "; ".join(declined), "Leave implementation=None or ask for 'xla'")


def _listed(plan: Plan | None) -> str:
    """The masks of the layers that a plan was made for."""
    return ", ".join(map(str, () if plan is None else plan.sparsity))


def _check(
    query: Array,
    cache: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    plan: Plan | None,
    mask: Mask | None,
    sinks: Array | None,
    alibi_slopes: Array | None,
) -> None:
    want = (metadata.bucket.max_tokens, spec.num_q_heads, spec.head_dim)
    require_shape("query", query.shape, want, "tokens of the bucket, q_heads, head_dim")
    got = (cache.num_kv_heads, cache.head_dim)
    require_shape("cache's kv_heads and head_dim", got, (spec.num_kv_heads, spec.head_dim), "as spec")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            require_shape(name, per_head.shape, (spec.num_q_heads,), "q_heads")
    require(
        alibi_slopes is not None or not spec.sqrt_alibi, "alibi_slopes", "be given with spec.sqrt_alibi", None
    )
    require(
        plan is None or plan.bucket == metadata.bucket,
        "plan.bucket",
        f"be {metadata.bucket}",
        plan and plan.bucket,
    )
    require(
        plan is None or plan.mask is None or mask is None,
        "mask",
        "be None with a plan that was made for a mask",
        type(mask).__name__,
    )
    require(
        plan is None or spec.sparsity is None or spec.sparsity in plan.sparsity,
        "spec.sparsity",
        f"be that of a layer the plan was made for ({_listed(plan)})",
        spec.sparsity,
    )
    require(
        QUERY_DTYPES[spec.query_quantization] in (None, cache.k.dtype),
        "spec.query_quantization",
        f"be None with keys of {cache.k.dtype}",
        repr(spec.query_quantization),
    )
    if isinstance(cache, PackedKV):
        require_shape("cache.v", cache.v.shape, cache.k.shape, "as cache.k")
        rows = (metadata.bucket.max_reqs,)
        require_shape("cache.kv_start_loc", cache.kv_start_loc.shape, rows, "rows of the metadata")
        return
    size = cache.block_size
    require(
        metadata.block_size == size, "metadata.block_size", f"be the cache's ({size})", metadata.block_size
    )
    has_blocks = metadata.block_table.shape[1] > 0
    require(
        has_blocks,
        "metadata.block_table",
        "have columns to attend over a paged cache",
        metadata.block_table.shape,
    )
