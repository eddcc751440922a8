"""Attention by the Mosaic GPU kernels, a region at a time: paged_decode, and varlen_prefill for the rest."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn.cache import PackedKV, PagedCache, has_token_axis
from jattn.implementations import tile_lists
from jattn.implementations.region_plans import (
    DecodePlan,
    PrefillPlan,
    RegionPlan,
    decode_plan,
    decode_tiles,
    listed_block_size,
    prefill_plan,
    score_of,
    sparse_tiles,
)
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.quantize import rounded_token_head
from jattn.spec import QUERY_DTYPES, AttentionSpec
from pallas_kernels import support
from pallas_kernels import varlen_prefill as prefill_kernel
from pallas_kernels.cache_read import cache_read, padded_len
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.varlen_prefill import varlen_prefill

MAX_READ_BYTES = 2**31  # memory that a step may take for an 8-bit cache's keys and values in 16 bits


def why_not(
    query: Array,
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None = None,
) -> str | None:
    """Why no kernel serves this region, on a GPU that they run on; None if one does.

    Args:
        query: The region's queries.
        kv: Where keys and values are.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: What it masks besides.
    """
    if mask is not None:
        is_packed = isinstance(kv, PackedKV)
        if isinstance(kv, PagedCache) and listed_block_size(metadata, spec, mask) is not None:
            return _why_not_decode(query.dtype, kv, metadata, spec)
        reason = _why_not_prefill(query.dtype, kv, metadata, spec)
        return reason or tile_lists.why_not_lists(mask, sparse_tiles(spec, mask), is_packed=is_packed)
    prefill_reason = _why_not_prefill(query.dtype, kv, metadata, spec)
    if prefill_reason is None or isinstance(kv, PackedKV) or not metadata.bucket.max_decodes:
        return prefill_reason
    return _why_not_decode(query.dtype, kv, metadata, spec)


def plan_decode(
    metadata: BatchMetadata, spec: AttentionSpec, mask: Mask | None = None
) -> tuple[RegionPlan, ...]:
    """Plans the decode region of a step, once for each of the tiles that a layer of this spec may want.

    Which it wants depends on how its cache is stored; inside a jit the others cost nothing. Traced.

    Args:
        metadata: The region as a step of its own.
        spec: The layer, or one with the same heads and mask.
        mask: What it masks beyond the spec's numbers.
    """
    if mask is not None and listed_block_size(metadata, spec, mask) is None:
        return _plan_lists_of_tiles(metadata, spec, mask)
    if not metadata.bucket.max_decodes or _why_not_decode(jnp.bfloat16, None, metadata, spec) is not None:
        return ()
    plans: tuple[DecodePlan, ...] = ()
    for dtypes in ((jnp.bfloat16, jnp.bfloat16), (jnp.int8, jnp.bfloat16), (jnp.int8, jnp.int8)):
        if support.why_not_head(spec.head_dim, dtypes) is None:
            plan = decode_plan(metadata, spec, dtypes, mask=mask, plans=plans)
            plans += () if plan in plans else (plan,)
    return plans


def plan_prefill(
    metadata: BatchMetadata, spec: AttentionSpec, mask: Mask | None = None
) -> tuple[PrefillPlan, ...]:
    """Plans the prefill region of a step.

    Args:
        metadata: The region as a step of its own.
        spec: The layer, or one with the same mask.
        mask: What it masks beyond the spec's numbers.
    """
    if mask is not None:
        return _plan_lists_of_tiles(metadata, spec, mask)
    if _why_not_prefill(jnp.bfloat16, None, metadata, spec) is not None:
        return ()
    return (prefill_plan(metadata, spec, prefill_kernel.default_tiles(spec.head_dim)),)


def _plan_lists_of_tiles(metadata: BatchMetadata, spec: AttentionSpec, mask: Mask) -> tuple[PrefillPlan, ...]:
    """Plans a region that varlen_prefill serves over lists, if it does."""
    has_cache = metadata.block_table.shape[1] > 0
    if not has_cache or _why_not_prefill(jnp.bfloat16, None, metadata, spec) is not None:
        return ()
    tiles = sparse_tiles(spec, mask)
    is_served = tile_lists.why_not_lists(mask, tiles, is_packed=False) is None
    return (prefill_plan(metadata, spec, tiles, mask=mask),) if is_served else ()


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    plans: Sequence[RegionPlan] = (),
    mask: Mask | None = None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    return_lse: bool = True,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Output and log-sum-exp of every token of a region, as `jattn.attend` defines them.

    Args:
        query: The region's queries.
        kv: Where keys and values are.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: Which keys a query sees beyond the spec's numbers; why_not is None.
        plans: The step's, under this mask; where none was made for a layer like this one, it is made here.
        sinks: One more score per head.
        alibi_slopes: Slope per head.
        return_lse: Whether the log-sum-exp is wanted; None comes back where the kernel can do without.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    if spec.query_quantization is not None:
        # In 16 bits again, in which the kernels multiply.
        query = rounded_token_head(query, QUERY_DTYPES[spec.query_quantization]).astype(query.dtype)
        spec = dataclasses.replace(spec, query_quantization=None)
    per_head: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    in_decode: dict[str, Any] = {"mask": mask, "plans": plans, "interpret": interpret}
    if mask is not None:
        if isinstance(kv, PagedCache) and listed_block_size(metadata, spec, mask) is not None:
            return _decode(query, kv, metadata, spec, **in_decode, **per_head)
        options = {"plans": plans, "return_lse": return_lse, "interpret": interpret}
        return _attend_sparsely(query, kv, metadata, spec, mask, **options, **per_head)
    if isinstance(kv, PackedKV):
        return varlen_prefill(
            query,
            kv.k,
            kv.v,
            metadata.query_start_loc,
            metadata.seq_lens,
            kv_start_loc=kv.kv_start_loc,
            score=score_of(spec),
            return_lse=return_lse,
            interpret=interpret,
            **per_head,
        )
    if metadata.bucket.max_decodes and _why_not_decode(query.dtype, kv, metadata, spec) is None:
        return _decode(query, kv, metadata, spec, **in_decode, **per_head)
    if _is_stored_otherwise(kv, query.dtype):
        packed = _read(kv, metadata, spec, query.dtype, interpret)
        options = {"return_lse": return_lse, "interpret": interpret}
        return attend(query, packed, metadata, spec, **per_head, **options)
    plan = prefill_plan(metadata, spec, prefill_kernel.default_tiles(spec.head_dim), plans=plans)
    return varlen_prefill(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.query_start_loc,
        metadata.seq_lens,
        block_table=metadata.block_table,
        layout=kv.layout,
        score=score_of(spec),
        schedule=plan.schedule,
        tiles=plan.tiles,
        return_lse=return_lse,
        interpret=interpret,
        **per_head,
    )


def _decode(
    query: Array,
    kv: PagedCache,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    mask: Mask | None,
    plans: Sequence[RegionPlan],
    **options: Any,
) -> tuple[Array, Array]:
    """A decode region by paged_decode."""
    k, v = jnp.asarray(kv.k), jnp.asarray(kv.v)
    dtypes = k.dtype, v.dtype
    plan = decode_plan(metadata, spec, dtypes, mask=mask, plans=plans)
    return paged_decode(
        query,
        k,
        v,
        metadata.block_table,
        metadata.seq_lens,
        score=score_of(spec),
        layout=kv.layout,
        decode_query_len=metadata.bucket.decode_query_len,
        k_scale=_as_jax(kv.stored_k_scale),
        v_scale=_as_jax(kv.stored_v_scale),
        block_list=plan.block_list,
        list_block_size=plan.list_block_size,
        lists_tell_heads=plan.lists_tell_heads,
        schedule=plan.schedule,
        tiles=decode_tiles(metadata, spec, dtypes, has_lists=mask is not None),
        **options,
    )


def _attend_sparsely(
    query: Array,
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask,
    *,
    plans: Sequence[RegionPlan],
    **options: Any,
) -> tuple[Array, Array | None]:
    """A region under a mask: varlen_prefill over lists of tiles."""
    tiles = sparse_tiles(spec, mask)
    where: dict[str, Any]
    max_seq_len, is_packed = metadata.block_table.shape[1] * metadata.block_size, isinstance(kv, PackedKV)
    if isinstance(kv, PackedKV):
        max_seq_len = kv.k.shape[0]
    elif _is_stored_otherwise(kv, query.dtype):
        kv = _read(kv, metadata, spec, query.dtype, options["interpret"])
    if isinstance(kv, PackedKV):
        where = {"kv_start_loc": kv.kv_start_loc}
    else:
        where = {"block_table": metadata.block_table, "layout": kv.layout}
    call: dict[str, Any] = {"max_seq_len": max_seq_len, "is_packed": is_packed}
    starts = where.get("kv_start_loc")
    plan = prefill_plan(metadata, spec, tiles, mask=mask, plans=plans, kv_start_loc=starts, **call)
    of_pairs = tile_lists.mask_of_pairs(
        mask, spec, tiles, **call, is_prefill=metadata.bucket.max_decodes == 0
    )
    return varlen_prefill(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.query_start_loc,
        metadata.seq_lens,
        score=score_of(spec),
        schedule=plan.schedule,
        lists=plan.lists,
        tiles=tiles,
        block_q=tile_lists.parts_of(mask, tiles, is_packed=is_packed).block_q,
        mask=None if of_pairs is None else of_pairs._replace(arrays=plan.mask_arrays),
        **where,
        **options,
    )


def _read(
    cache: PagedCache, metadata: BatchMetadata, spec: AttentionSpec, dtype: DTypeLike, interpret: Any
) -> PackedKV:
    """What a region needs of an 8-bit cache, in 16 bits: a prompt's queries share the cost of widening it."""
    positions = metadata.seq_lens - metadata.query_lens
    first_keys, _ = prefill_kernel.key_range(score_of(spec), positions, metadata.seq_lens)
    read = functools.partial(cache_read, dtype=dtype, layout=cache.layout, interpret=interpret)
    where = metadata.block_table, jnp.maximum(first_keys, 0), metadata.seq_lens
    k = read(jnp.asarray(cache.k), *where, scale=_as_jax(cache.stored_k_scale))
    v = read(jnp.asarray(cache.v), *where, scale=_as_jax(cache.stored_v_scale))
    rows = padded_len(metadata.block_table.shape[1], cache.block_size)
    starts = jnp.arange(metadata.bucket.max_reqs, dtype=jnp.int32) * rows
    return PackedKV(k=k, v=v, kv_start_loc=starts)


def _why_not_read(
    dtype: DTypeLike, cache: PagedCache, metadata: BatchMetadata, spec: AttentionSpec
) -> str | None:
    """Why an 8-bit cache cannot be widened for the prefill kernel."""
    for stored in (cache.k, cache.v):
        reason = support.why_not_read(
            dtype=dtype,
            cache_dtype=stored.dtype,
            head_dim=spec.head_dim,
            block_size=cache.block_size,
            layout=cache.layout,
        )
        if reason is not None:
            return reason
    rows = metadata.bucket.max_reqs * padded_len(metadata.block_table.shape[1], cache.block_size)
    needed = 2 * rows * spec.num_kv_heads * spec.head_dim * 2
    if needed > MAX_READ_BYTES:
        sizes = f"{needed / 2**30:.1f} GiB, and the limit is {MAX_READ_BYTES / 2**30:.0f}"
        return f"the keys and values of {rows} positions of an 8-bit cache would take {sizes} in 16 bits"
    return None


def _why_not_decode(
    dtype: DTypeLike, cache: PagedCache | None, metadata: BatchMetadata, spec: AttentionSpec
) -> str | None:
    """Why paged_decode does not serve a layer; with cache=None: whatever its dtype and its layout."""
    return support.why_not_decode(
        dtype=dtype,
        k_dtype=dtype if cache is None else cache.k.dtype,
        v_dtype=dtype if cache is None else cache.v.dtype,
        head_dim=spec.head_dim,
        block_size=metadata.block_size,
        group=spec.q_heads_per_kv_head,
        decode_query_len=metadata.bucket.decode_query_len,
        layout="NHD" if cache is None else cache.layout,
        has_token_scales=(
            cache is not None and has_token_axis(cache.stored_k_scale),
            cache is not None and has_token_axis(cache.stored_v_scale),
        ),
    )


def _why_not_prefill(
    dtype: DTypeLike, kv: PagedCache | PackedKV | None, metadata: BatchMetadata, spec: AttentionSpec
) -> str | None:
    """Why varlen_prefill does not serve a layer; with kv=None: over any cache, whatever its dtype."""
    is_packed = isinstance(kv, PackedKV)
    if is_packed and spec.batch_invariant:
        return "there is no batch-invariant kernel for keys outside a paged cache"
    if isinstance(kv, PagedCache) and _is_stored_otherwise(kv, dtype):
        reason = _why_not_read(dtype, kv, metadata, spec)
        if reason is not None:
            return reason
        kv = None  # widened, it is as any other
    return support.why_not_prefill(
        dtype=dtype,
        kv_dtype=dtype if kv is None else kv.k.dtype,
        head_dim=spec.head_dim,
        block_size=None if is_packed else metadata.block_size,
        layout="NHD" if kv is None or isinstance(kv, PackedKV) else kv.layout,
    )


def _is_stored_otherwise(cache: PagedCache, dtype: DTypeLike) -> bool:
    """Whether keys or values are not what a query of this dtype meets as they are."""
    is_scaled = cache.stored_k_scale is not None or cache.stored_v_scale is not None
    return is_scaled or any(x.dtype != jnp.dtype(dtype) for x in (cache.k, cache.v))


def _as_jax(scale: Any) -> Array | None:
    return None if scale is None else jnp.asarray(scale)
