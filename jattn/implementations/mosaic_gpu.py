"""Attention by the Mosaic GPU kernels: decode by paged_decode, prefill by XLA as yet."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.cache import PackedKV, PagedCache
from jattn.implementations import xla
from jattn.implementations.tiles import QueryTiles
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree, replace, static
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.paged_decode import Schedule, Tiles, default_tiles, paged_decode, schedule_for
from pallas_kernels.shared.score import Score


@pytree
class DecodePlan:
    """The decode kernel's schedule, for every layer with the heads and the mask that it was made for.

    Attributes:
        schedule: Who computes what.
        layer: Static: heads, and the mask that shortens the requests' ranges of keys.
        tiles: Static: the kernel's sizes.
    """

    schedule: Schedule
    layer: tuple[Any, ...] = static()
    tiles: Tiles = static()


def why_not(
    query: Array, kv: PagedCache | PackedKV, spec: AttentionSpec, decode_query_len: int
) -> str | None:
    """Why the kernels cannot serve this request, on a GPU that they run on; None if they can."""
    cache = kv if isinstance(kv, PagedCache) else None
    return support.why_not_decode(
        dtype=query.dtype,
        cache_dtype=kv.k.dtype,
        head_dim=spec.head_dim,
        block_size=None if cache is None else cache.block_size,
        group=spec.q_heads_per_kv_head,
        decode_query_len=decode_query_len,
        layout=None if cache is None else cache.layout,
        is_scaled=cache is not None and (cache.k_scale is not None or cache.v_scale is not None),
        is_sparse=spec.sparsity is not None,
    )


def why_not_plan_decode(metadata: BatchMetadata, spec: AttentionSpec) -> str | None:
    """Why no layer of this spec can have a decode schedule, whatever its dtypes and its cache's layout."""
    if not metadata.bucket.max_decodes:
        return "the bucket has no decode region"
    return support.why_not_decode(
        dtype=jnp.bfloat16,
        cache_dtype=jnp.bfloat16,
        head_dim=spec.head_dim,
        block_size=metadata.block_size,
        group=spec.q_heads_per_kv_head,
        decode_query_len=metadata.bucket.decode_query_len,
        is_sparse=spec.sparsity is not None,
    )


def plan_decode(metadata: BatchMetadata, spec: AttentionSpec, tiles: Tiles | None = None) -> DecodePlan:
    """Schedules the decode region of a step. Traced."""
    decodes, query_len = metadata.bucket.max_decodes, metadata.bucket.decode_query_len
    group, score = spec.q_heads_per_kv_head, score_of(spec)
    tiles = default_tiles(spec.head_dim, rows=group * query_len) if tiles is None else tiles
    schedule = schedule_for(
        metadata.seq_lens[:decodes],
        score=score,
        tiles=tiles,
        kv_heads=spec.num_kv_heads,
        group=group,
        decode_query_len=query_len,
    )
    return DecodePlan(schedule=schedule, layer=_layer(spec), tiles=tiles)


def score_of(spec: AttentionSpec) -> Score:
    """The part of a spec that kernels compute scores by."""
    return Score(
        scale=spec.softmax_scale,
        causal=spec.causal,
        window=spec.window or (None, None),
        chunk_size=spec.chunk_size,
        soft_cap=spec.soft_cap,
        sqrt_alibi=spec.sqrt_alibi,
    )


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    decode_plan: DecodePlan | None,
    query_tiles: QueryTiles | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Output and log-sum-exp of every token, as `jattn.attend` defines them.

    Args:
        query: The step's queries.
        kv: Where keys and values are.
        metadata: The step's metadata.
        spec: The layer.
        decode_plan: The decode region's schedule; made here when None or made for another kind of layer.
        query_tiles: The prefill region's tiles; made here when None.
        sinks: One more score per head.
        alibi_slopes: Slope per head.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    bucket = metadata.bucket
    regions = []
    if bucket.max_decodes:
        if decode_plan is None or decode_plan.layer != _layer(spec):
            decode_plan = plan_decode(metadata, spec)
        decode = paged_decode(
            query[: bucket.max_decode_tokens],
            jnp.asarray(kv.k),
            jnp.asarray(kv.v),
            metadata.block_table[: bucket.max_decodes],
            metadata.seq_lens[: bucket.max_decodes],
            score=score_of(spec),
            layout=kv.layout,
            decode_query_len=bucket.decode_query_len,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            schedule=decode_plan.schedule,
            tiles=decode_plan.tiles,
            interpret=interpret,
        )
        regions.append(decode)
    if bucket.max_prefill_tokens or not regions:
        tiles = query_tiles and replace(query_tiles, rows=query_tiles.rows - bucket.max_decodes)
        prefill = xla.attend(
            query[bucket.max_decode_tokens :],
            kv,
            _prefill_part(metadata),
            spec,
            tiles=tiles,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        regions.append(prefill)
    outs, lses = zip(*regions, strict=True)
    if len(regions) == 1:
        return outs[0], lses[0]
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def _layer(spec: AttentionSpec) -> tuple[Any, ...]:
    return spec.num_kv_heads, spec.q_heads_per_kv_head, spec.head_dim, *score_of(spec).mask


def _prefill_part(metadata: BatchMetadata) -> BatchMetadata:
    """The step's prefill region as a step of its own."""
    bucket, first = metadata.bucket, metadata.bucket.max_decodes
    return replace(
        metadata,
        seq_lens=metadata.seq_lens[first:],
        query_start_loc=metadata.query_start_loc[first:] - bucket.max_decode_tokens,
        block_table=metadata.block_table[first:],
        slot_mapping=metadata.slot_mapping[bucket.max_decode_tokens :],
        num_decodes=jnp.zeros_like(metadata.num_decodes),
        bucket=dataclasses.replace(bucket, max_decodes=0),
    )
