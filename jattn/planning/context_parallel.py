"""Plans of steps over the keys of one rank.

The last query of a row attends to all of the rank's keys, and a window or chunk that is a multiple of the
round size contains equally many keys of each rank: an adjusted spec expresses this without a mask. With
several queries per row, the number of the rank's keys between two queries varies, so a mask of global
positions is needed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jattn.batch.context_parallel import ContextParallelAxis, metadata_on_rank
from jattn.batch.metadata import REGIONS, BatchMetadata, region_batch
from jattn.cascade import can_cascade, check_prefix
from jattn.implementations.layer_config import CacheOrSpec, LayerConfig, layer_config, region_sizes
from jattn.implementations.selection import ImplementationArg
from jattn.masks import InterleavedMask, Mask
from jattn.planning.layer_plans import LayerPlan
from jattn.planning.plans import ContextParallelPlan, ContextParallelRegion, Plan, plan
from jattn.pytree import replace
from jattn.spec import AttentionSpec


def plan_on_rank(
    metadata: BatchMetadata,
    specs: Sequence[AttentionSpec],
    caches: Sequence[CacheOrSpec | None],
    ranks: ContextParallelAxis,
    *,
    implementation: ImplementationArg = None,
    query_dtype: DTypeLike | None = None,
    common_prefix_len: int | Int[Array, ""] | None = None,
) -> Plan:
    """Plan a step over the keys that this rank stores. Runs inside shard_map.

    Args:
        metadata: Metadata of the step over the global KV sequence.
        specs: Attention of each layer.
        caches: Cache of this rank for each layer.
        ranks: Mesh axis over which the keys are distributed.
        implementation: Requested implementations; see `plan`.
        query_dtype: Dtype of the queries; see `plan`.
        common_prefix_len: Number of leading tokens that all rows share; see `plan`. Each rank stores an equal
            part of them. Only rows with one query use it.

    Raises:
        ValueError: If arguments do not match, or block_size is not a multiple of the round size.
        NotImplementedError: If no requested implementation supports a layer.
    """
    if common_prefix_len is not None:
        check_prefix(metadata, common_prefix_len)
        common_prefix_len = common_prefix_len // ranks.size
    names = [region.name for region in region_sizes(metadata)]
    layer_caches: dict[LayerConfig, CacheOrSpec | None] = {}
    for spec, cache in zip(specs, caches, strict=True):
        layer_caches.setdefault(layer_config(spec, cache, query_dtype), cache)
    layers: list[LayerPlan] = []
    regions: list[tuple[ContextParallelRegion | None, ContextParallelRegion | None]] = []
    for layer, cache in layer_caches.items():
        prefix = common_prefix_len if can_cascade(layer.spec) else None
        plan_region = functools.partial(
            _region,
            metadata,
            spec=layer.spec,
            cache=cache,
            ranks=ranks,
            prefix_len=prefix,
            implementation=implementation,
            query_dtype=query_dtype,
        )
        decode, prefill = (plan_region(name) if name in names else None for name in REGIONS)
        regions.append((decode, prefill))
        layers.append(_layer_plan(layer, decode, prefill))
    return Plan(
        regions=(),
        mask=None,
        seq_lens=metadata.seq_lens,
        context_parallel=ContextParallelPlan(regions=tuple(regions)),
        layers=tuple(layers),
        bucket=metadata.bucket,
    )


def _layer_plan(
    layer: LayerConfig, decode: ContextParallelRegion | None, prefill: ContextParallelRegion | None
) -> LayerPlan:
    """Combine the plans of both regions into the layer's plan."""
    chosen = [None if region is None else region.plan.layers[0] for region in (decode, prefill)]
    return LayerPlan(
        layer=layer,
        is_for_any_cache=all(layer_plan.is_for_any_cache for layer_plan in chosen if layer_plan is not None),
        decode=None if chosen[0] is None else chosen[0].decode,
        prefill=None if chosen[1] is None else chosen[1].prefill,
    )


def _region(
    metadata: BatchMetadata,
    name: str,
    *,
    spec: AttentionSpec,
    cache: CacheOrSpec | None,
    ranks: ContextParallelAxis,
    prefix_len: int | Int[Array, ""] | None,
    implementation: ImplementationArg,
    query_dtype: DTypeLike | None,
) -> ContextParallelRegion:
    """Plan a region of a layer over the keys of this rank."""
    global_metadata = region_batch(metadata, name).metadata
    local, mask = metadata_on_rank(global_metadata, ranks), None
    if (
        name == "decode"
        and global_metadata.bucket.decode_query_len == 1
        and is_expressible_on_rank(spec, ranks)
    ):
        if spec.chunk_size is not None:
            local = _without_empty_chunks(local, global_metadata, spec.chunk_size, ranks)
        local_spec = spec_on_rank(spec, ranks)
    else:
        local_spec, mask = _mask_on_rank(spec, ranks)
        shift = global_metadata.seq_lens - local.seq_lens
        mask = InterleavedMask(
            mask=mask, rank=ranks.rank, shift=shift, num_ranks=ranks.size, interleave=ranks.interleave
        )
        prefix_len = None  # cascade attention does not support masks
    region_plan = plan(
        local,
        local_spec,
        cache,
        mask=mask,
        common_prefix_len=prefix_len,
        implementation=implementation,
        query_dtype=query_dtype,
    )
    return ContextParallelRegion(metadata=local, plan=region_plan, spec=local_spec)


def is_expressible_on_rank(spec: AttentionSpec, ranks: ContextParallelAxis) -> bool:
    """Return whether an adjusted spec can express which of a rank's keys a row's last query attends to."""
    left = None if spec.window is None else spec.window[0]
    sizes = (None if left is None else left + 1, spec.chunk_size)
    return spec.sparsity is None and all(n is None or n % ranks.round_size == 0 for n in sizes)


def spec_on_rank(spec: AttentionSpec, ranks: ContextParallelAxis) -> AttentionSpec:
    """Return the spec for the last query of a row over a rank's keys; see is_expressible_on_rank."""
    left, right = spec.window or (None, None)
    window = None if left is None else ((left + 1) // ranks.size - 1, right)
    chunk_size = None if spec.chunk_size is None else spec.chunk_size // ranks.size
    return dataclasses.replace(spec, window=window, chunk_size=chunk_size)


def _without_empty_chunks(
    local: BatchMetadata, global_metadata: BatchMetadata, chunk_size: int, ranks: ContextParallelAxis
) -> BatchMetadata:
    """Make rows padding whose last query's chunk has no key on this rank."""
    first = jnp.maximum(global_metadata.seq_lens - 1, 0) // chunk_size * chunk_size
    return replace(local, seq_lens=jnp.where(local.seq_lens > ranks.num_keys(first), local.seq_lens, 0))


def _mask_on_rank(spec: AttentionSpec, ranks: ContextParallelAxis) -> tuple[AttentionSpec, Mask]:
    """Return a spec without causality and chunks, and a mask of global positions that replaces them.

    The spec keeps a window over the rank's keys, so that keys far before the layer's window are skipped. It
    masks out no key of the layer's window: a query's last key on the rank is at most one local position
    before the query, and the window contains at most as many of the rank's keys as the rounds that cover it.
    """
    left = None if spec.window is None else spec.window[0]
    rounds = None if left is None else -(-(left + 1) // ranks.round_size)
    window = None if rounds is None else (rounds * ranks.interleave - 1, None)
    plain: dict[str, Any] = {"causal": False, "window": window, "chunk_size": None, "sparsity": None}
    return dataclasses.replace(spec, **plain), _full_mask(spec)


def _full_mask(spec: AttentionSpec) -> Mask:
    """Return the mask of a layer, including its window, chunk size and causality."""
    numbers = spec.mask_of_numbers
    return numbers if spec.sparsity is None else spec.sparsity & numbers
