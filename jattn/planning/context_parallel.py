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
    """Plan a step over the keys that this rank stores. Traced, inside shard_map.

    Args:
        metadata: Metadata of the step over the global KV sequence.
        specs: Attention of each layer.
        caches: Cache of this rank for each layer.
        ranks: Mesh axis over which the keys are distributed.
        implementation: Requested implementations; see `plan`.
        query_dtype: Dtype of the queries; see `plan`.
        common_prefix_len: As in `plan`. Of rows of one token each, which have 1 / size of it on each rank;
            others attend to it as to the rest.

    Raises:
        ValueError: If arguments do not match, or block_size is not a multiple of the round size.
        NotImplementedError: If no requested implementation supports a layer.
    """
    how: dict[str, Any] = {"implementation": implementation, "query_dtype": query_dtype}
    if common_prefix_len is not None:
        check_prefix(metadata, common_prefix_len)
        common_prefix_len = common_prefix_len // ranks.size
    there = [region.name for region in region_sizes(metadata)]
    kinds: dict[Any, Any] = {}
    for spec, cache in zip(specs, caches, strict=True):
        kinds.setdefault(layer_config(spec, cache, query_dtype), cache)
    layers: list[LayerPlan] = []
    regions: list[tuple[ContextParallelRegion | None, ContextParallelRegion | None]] = []
    for layer, cache in kinds.items():
        prefix = common_prefix_len if can_cascade(layer.spec) else None
        of = functools.partial(
            _region, metadata, spec=layer.spec, cache=cache, ranks=ranks, prefix_len=prefix, how=how
        )
        decode, prefill = (of(name) if name in there else None for name in REGIONS)
        regions.append((decode, prefill))
        layers.append(_layer_plan(layer, decode, prefill))
    return Plan(
        kernel_plans=(),
        query_tiles=None,
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
        is_for_any_cache=all(one.is_for_any_cache for one in chosen if one is not None),
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
    how: dict[str, Any],
) -> ContextParallelRegion:
    whole = region_batch(metadata, name).metadata
    local, mask = metadata_on_rank(whole, ranks), None
    if name == "decode" and whole.bucket.decode_query_len == 1 and is_expressible_on_rank(spec, ranks):
        if spec.chunk_size is not None:
            local = _of_chunks(local, whole, spec.chunk_size, ranks)
        of_rank = spec_on_rank(spec, ranks)
    else:
        of_rank, mask = _masked(spec, ranks)
        shift = whole.seq_lens - local.seq_lens
        sizes: dict[str, int] = {"num_ranks": ranks.size, "interleave": ranks.interleave}
        mask = InterleavedMask(mask=mask, rank=ranks.rank, shift=shift, **sizes)
        prefix_len = None  # where a prefix ends among a rank's keys, the mask's positions do not say
    made = plan(local, of_rank, cache, mask=mask, common_prefix_len=prefix_len, **how)
    return ContextParallelRegion(metadata=local, plan=made, spec=of_rank)


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


def _of_chunks(
    local: BatchMetadata, whole: BatchMetadata, chunk_size: int, ranks: ContextParallelAxis
) -> BatchMetadata:
    """Make rows padding whose last query's chunk has no key on this rank."""
    first = jnp.maximum(whole.seq_lens - 1, 0) // chunk_size * chunk_size
    return replace(local, seq_lens=jnp.where(local.seq_lens > ranks.num_keys(first), local.seq_lens, 0))


def _masked(spec: AttentionSpec, ranks: ContextParallelAxis) -> tuple[AttentionSpec, Mask]:
    """What a layer is whose queries are told their keys by a mask, and the mask of true positions.

    The window that is left spares the keys far before the layer's, and hides none of them: a query's last key
    is no further before it than one place, and of the window's positions no rank has more than of as many
    whole rounds.
    """
    left = None if spec.window is None else spec.window[0]
    rounds = None if left is None else -(-(left + 1) // ranks.round_size)
    window = None if rounds is None else (rounds * ranks.interleave - 1, None)
    plain: dict[str, Any] = {"causal": False, "window": window, "chunk_size": None, "sparsity": None}
    return dataclasses.replace(spec, **plain), _whole(spec)


def _whole(spec: AttentionSpec) -> Mask:
    numbers = spec.mask_of_numbers
    return numbers if spec.sparsity is None else spec.sparsity & numbers
