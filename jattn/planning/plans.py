"""The plan of a step: which implementation serves each kind of layer, and what is made once for all."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import REGIONS, BatchMetadata
from jattn.cascade import CascadeMetadata, build_cascade_metadata, can_cascade
from jattn.implementations.layer_config import CacheOrSpec, LayerConfig, layer_config
from jattn.implementations.mosaic_gpu import KernelPlan
from jattn.implementations.selection import ImplementationArg
from jattn.implementations.xla import QueryTiles
from jattn.masks import Mask
from jattn.planning.kernel_plans import (
    make_kernel_plans,
    make_kernel_plans_eagerly,
    numbered,
    shared_kernel_plans,
)
from jattn.planning.layer_plans import LayerPlan, plan_layers, table
from jattn.pytree import pytree, replace, static
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_type, unsupported


@pytree
class Plan:
    """A step's choices, schedules and lists. `print(plan)` is a table.

    Attributes:
        works: What kernels are given: schedules and lists, one for all layers that agree in them.
        query_tiles: The prefill region's tiles for XLA; None where no layer wants them.
        mask: Which keys the queries of all layers see, besides what their specs say; None = no such mask.
        seq_lens: Those of the batch that it was made for.
        cascade: For layers that attend to a prefix of all rows once; None = no layer does.
        of_rank: For a step over the keys of one rank: all else is of no use then. None = all keys are here.
        layers: Static: the kinds of layers, and what serves each.
        bucket: Static: the bucket that it was made for.
    """

    kernel_plans: tuple[KernelPlan, ...]
    query_tiles: QueryTiles | None
    mask: Mask | None
    seq_lens: Int32[Array, " reqs"]
    cascade: Optional["CascadePlan"] = None
    context_parallel: Optional["ContextParallelPlan"] = None
    layers: tuple[LayerPlan, ...] = static()
    bucket: Bucket = static()

    def layer_plan(self, layer: LayerConfig) -> LayerPlan:
        """What serves a layer.

        Raises:
            ValueError: The plan was made for others.
        """
        for one in self.layers:
            if one.covers(layer):
                return one
        kinds = " or ".join(f"({one.layer})" for one in self.layers)
        raise ValueError(f"the layer must be one that the plan was made for, {kinds}, got ({layer}).")

    def kernel_plan(self, layer: LayerPlan, region: str) -> KernelPlan | None:
        """What was made for a layer of this plan in one of REGIONS; None = nothing."""
        number = layer.kernel_plans[REGIONS.index(region)]
        return None if number is None else self.kernel_plans[number]

    def __str__(self) -> str:
        return table(self.layers)


@pytree
class CascadePlan:
    """How layers attend to a prefix of all rows once, and to what each row has besides.

    Attributes:
        metadata: The step in two.
        prefix: Plan of the prefix, of layers that are not causal.
        suffix: Plan of the rest.
    """

    metadata: CascadeMetadata
    prefix: Plan
    suffix: Plan


@pytree
class ContextParallelRegion:
    """A region of a step, for one kind of layer, over the keys of one rank.

    Attributes:
        metadata: The region as a step of its own, over these keys.
        plan: Of that step, with the mask of the keys' positions where the spec does not say it all.
        spec: Static: what the layer is for these keys.
    """

    metadata: BatchMetadata
    plan: Plan
    spec: AttentionSpec = static()


@pytree
class ContextParallelPlan:
    """How layers attend to the keys of one rank.

    Attributes:
        regions: Of each of the plan's layers, in REGIONS' order; None where the step has none.
    """

    regions: tuple[tuple[ContextParallelRegion | None, ContextParallelRegion | None], ...]


def plan(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: CacheOrSpec | Sequence[CacheOrSpec | None] | None = None,
    *,
    mask: Mask | None = None,
    implementation: ImplementationArg = None,
    query_dtype: DTypeLike | None = None,
    common_prefix_len: int | Int[Array, ""] | None = None,
) -> Plan:
    """Chooses what serves each layer of a step, and makes what the layers share. Traced.

    `attend` does the same for its one layer where it is given no plan. A layer on a GPU that no kernel serves
    is warned of (KernelFallbackWarning), unless `implementation` says that this is wanted.

    Args:
        metadata: The step's metadata.
        specs: A layer, or the layers of a model. Equal ones are one kind.
        cache_specs: How keys are stored: one for all layers or one for each; a CacheSpec, or the PagedCache
            itself. None = keys that are not in a paged cache (PackedKV).
        mask: A mask of this step that holds in every layer, on top of the layers' own; may have arrays. Its
            lists are made here, once; `attend` takes it from the plan.
        implementation: "mosaic_gpu", "xla" or "reference", or several in order of preference; None = the best
            that the device and the layer allow.
        query_dtype: Of the layers' queries; None = the dtype of their caches, as their CacheSpecs have it.
        common_prefix_len: Tokens that all rows have in the same blocks, as in build_cascade_metadata; may be
            traced. Layers over a paged cache without window, chunks, sparsity and ALiBi attend to them once.

    Raises:
        ValueError: Specs and cache specs, or metadata and cache specs, do not belong together.
        NotImplementedError: No implementation asked for can serve a layer, or there is both a common prefix
            and a mask; the message says why.
    """
    layers = _kinds(metadata, specs, cache_specs, query_dtype)
    chosen = plan_layers(metadata, layers, mask, implementation=implementation)
    whole = build_plan(metadata, chosen, mask)
    if common_prefix_len is None:
        return whole
    if mask is not None:
        reason = "a row's mask tells its own keys apart, not those of a prefix of all"
        raise unsupported("common_prefix_len with a mask", reason, "Leave common_prefix_len=None")
    parts = build_cascade_metadata(metadata, common_prefix_len)
    return replace(whole, cascade=_cascade_plan(parts, layers, implementation))


def _cascade_plan(
    parts: CascadeMetadata, layers: Sequence[LayerConfig], implementation: ImplementationArg
) -> CascadePlan | None:
    """The plans of both parts, for the layers that can."""
    able = tuple(layer for layer in layers if layer.cache is not None and can_cascade(layer.spec))
    if not able:
        return None
    blind = (dataclasses.replace(one, spec=dataclasses.replace(one.spec, causal=False)) for one in able)
    each = ((parts.prefix, tuple(dict.fromkeys(blind))), (parts.suffix, able))
    chosen = [(part, plan_layers(part, kinds, None, implementation=implementation)) for part, kinds in each]
    prefix, suffix = (build_plan(part, layers, None) for part, layers in chosen)
    return CascadePlan(metadata=parts, prefix=prefix, suffix=suffix)


def build_plan(metadata: BatchMetadata, layers: tuple[LayerPlan, ...], mask: Mask | None) -> Plan:
    """The plan of these choices. Eagerly it is one call of a compiled function, which jax keeps."""
    make = make_kernel_plans_eagerly if support.is_concrete(metadata, mask) else make_kernel_plans
    shared = shared_kernel_plans(layers)
    needs_query_tiles = any(one.prefill is not None and one.prefill.implementation == "xla" for one in layers)
    kernel_plans, tiles = make(metadata, mask, shared, needs_query_tiles=needs_query_tiles)
    return Plan(
        kernel_plans=kernel_plans,
        query_tiles=tiles,
        mask=mask,
        seq_lens=metadata.seq_lens,
        layers=numbered(layers, shared),
        bucket=metadata.bucket,
    )


def _kinds(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: CacheOrSpec | Sequence[CacheOrSpec | None] | None,
    query_dtype: DTypeLike | None,
) -> tuple[LayerConfig, ...]:
    """The kinds of the layers, each once."""
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    each = tuple(specs) if isinstance(specs, Iterable) else (specs,)
    require(len(each) > 0, "specs", "be a layer or at least one", each)
    for one in each:
        require_type("specs", one, AttentionSpec, "one, or one a layer")
    if isinstance(cache_specs, list | tuple):
        caches = tuple(cache_specs)
        require(len(caches) == len(each), "cache_specs", f"be one or {len(each)}, as specs", len(caches))
    else:
        caches = (cache_specs,) * len(each)
    for spec, cache in zip(each, caches, strict=True):
        _check_cache(metadata, spec, cache)
    layers = (layer_config(spec, cache, query_dtype) for spec, cache in zip(each, caches, strict=True))
    return tuple(dict.fromkeys(layers))


def _check_cache(metadata: BatchMetadata, spec: AttentionSpec, cache: Any) -> None:
    owners = [("num_kv_heads", "spec's", spec.num_kv_heads), ("head_dim", "spec's", spec.head_dim)]
    if hasattr(cache, "block_size"):
        owners.append(("block_size", "metadata's", metadata.block_size))
    for name, owner, want in owners if cache is not None else ():
        got = getattr(cache, name, None)
        require(got is not None, "cache_specs", "be of CacheSpec, PagedCache or None", type(cache).__name__)
        require(got == want, f"cache_spec.{name}", f"be the {owner} ({want})", got)


def check_plan_matches(plan: Plan, metadata: BatchMetadata) -> None:
    """A plan must have been made for this batch: told by its bucket and, where they can be seen, its lengths.

    Raises:
        ValueError: It was made for another.
    """
    require(plan.bucket == metadata.bucket, "plan.bucket", f"be {metadata.bucket}", plan.bucket)
    if plan.seq_lens is metadata.seq_lens or not support.is_concrete(plan.seq_lens, metadata.seq_lens):
        return
    mine, theirs = np.asarray(plan.seq_lens), np.asarray(metadata.seq_lens)
    rule, got = f"be made for this batch (seq_lens {theirs})", f"one for seq_lens {mine}"
    require(np.array_equal(mine, theirs), "plan", rule, got)
