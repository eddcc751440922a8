"""The plan of a step: the implementation of each layer configuration and what is computed once per step."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.cache.spec import require_float_dtype, require_query_dtype
from jattn.cascade import CascadeMetadata, build_cascade_metadata, can_cascade
from jattn.implementations.layer_config import CacheOrSpec, LayerConfig, layer_config
from jattn.implementations.selection import ImplementationArg, requested_implementations
from jattn.masks import Mask
from jattn.planning.layer_plans import (
    LayerPlan,
    RegionPlan,
    plan_layers,
    plan_regions,
    plan_regions_jitted,
    table,
)
from jattn.pytree import pytree, replace, static
from jattn.score_mod import ScoreFunction, ScoreMod, as_score_mod
from jattn.spec import AttentionSpec
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_type, unsupported


@pytree
class Plan:
    """Implementation choices, schedules and lists of a step. `print(plan)` shows a table.

    Attributes:
        regions: Masks, schedules and lists of the regions, which the layers find by `LayerPlan.region_keys`.
        mask: Mask of the step for every layer, in addition to the layers' specs; None adds none.
        seq_lens: Sequence lengths of the batch that the plan was built for.
        cascade: Plans of prefix and suffix for layers that use cascade attention; None if no layer does.
        context_parallel: Plans over the keys of one rank, used instead of the other fields; None without
            context parallelism.
        layers: Layer configurations and their implementations (static).
        bucket: Bucket that the plan was built for (static).
    """

    regions: tuple[RegionPlan, ...]
    mask: Mask | None
    seq_lens: Int32[Array, " reqs"]
    cascade: Optional["CascadePlan"] = None
    context_parallel: Optional["ContextParallelPlan"] = None
    layers: tuple[LayerPlan, ...] = static()
    bucket: Bucket = static()

    def layer_plan(self, layer: LayerConfig) -> LayerPlan:
        """Return the plan of a layer.

        Raises:
            ValueError: If the plan was built for other layers.
        """
        for layer_plan in self.layers:
            if layer_plan.covers(layer):
                return layer_plan
        planned = " or ".join(f"({layer_plan.layer})" for layer_plan in self.layers)
        fix = "Build the plan with the specs and cache_specs of all layers."
        if any(
            layer_plan.covers(dataclasses.replace(layer, query_dtype=layer_plan.layer.query_dtype))
            for layer_plan in self.layers
        ):
            fix = f"Pass query_dtype={layer.query_dtype} to plan."
        raise ValueError(f"The plan was built for {planned}, but the layer is ({layer}). {fix}")

    def cascade_of(
        self, cache: PagedCache | PackedKV, spec: AttentionSpec, alibi_slopes: Array | None
    ) -> "CascadePlan | None":
        """Return the plan of a layer that uses cascade attention; None for other layers."""
        is_supported = isinstance(cache, PagedCache) and can_cascade(spec, alibi_slopes)
        return self.cascade if is_supported else None

    def __str__(self) -> str:
        return table(self.layers)


@pytree
class CascadePlan:
    """Plans of cascade attention: a prefix that all rows share, and the suffix of each row.

    Attributes:
        metadata: Metadata of prefix and suffix.
        prefix: Plan of the prefix, for layers that are not causal; None plans each layer by itself.
        suffix: Plan of the suffix; None plans each layer by itself.
    """

    metadata: CascadeMetadata
    prefix: Plan | None
    suffix: Plan | None


@pytree
class ContextParallelRegion:
    """One region of a step over the keys of one rank, for one layer configuration.

    Attributes:
        metadata: Metadata of the region over the rank's keys.
        plan: Plan of the region; has a mask of key positions if the spec cannot express the visible keys.
        spec: Attention of the layer over the rank's keys (static).
    """

    metadata: BatchMetadata
    plan: Plan
    spec: AttentionSpec = static()


@pytree
class ContextParallelPlan:
    """Plans of layers over the keys of one rank.

    Attributes:
        regions: Decode and prefill region of each of the plan's layers; None for a region the step lacks.
    """

    regions: tuple[tuple[ContextParallelRegion | None, ContextParallelRegion | None], ...]


def plan(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: CacheOrSpec | Sequence[CacheOrSpec | None] | None = None,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    implementation: ImplementationArg = None,
    query_dtype: DTypeLike | None = None,
    common_prefix_len: int | Int[Array, ""] | None = None,
    device: str | None = None,
) -> Plan:
    """Choose the implementation of each layer of a step and compute what the layers share. Works inside jit.

    `attend` does the same for one layer if it gets no plan. A layer on a GPU that no kernel supports raises a
    KernelFallbackWarning, unless `implementation` is passed.

    Args:
        metadata: Metadata of the step.
        specs: Attention of a layer, or of all layers of a model. Equal layers share their plan.
        cache_specs: Caches of the layers, one for all layers or one per layer: a CacheSpec or PagedCache. For
            keys outside a paged cache, None or a PackedKV. A plan for one with `is_aligned` serves only such.
        mask: Mask of this step for every layer, in addition to the layers' masks; may have arrays. Its tile
            lists are computed once here, and `attend` takes the mask from the plan.
        score_mod: Score function of every layer; `attend` gets it, too. The elements of its arrays may differ
            between layers.
        implementation: "mosaic_gpu", "xla" or "reference", or a sequence of them in order of preference; None
            uses the best one that device and layer support.
        query_dtype: Dtype of the layers' queries; None uses the dtype of their caches or CacheSpecs, and
            bfloat16 for a PagedCache with 8 bits, whose queries may have another dtype.
        common_prefix_len: Number of leading tokens that all rows share in the same blocks, see
            build_cascade_metadata; may be traced. Layers over a paged cache without window, chunks, sparsity
            and ALiBi attend to them once.
        device: GPU to plan for, such as "h100" or a compute capability such as "9.0". Print the plan to see
            what layers would get there. None plans for the metadata's device.

    Raises:
        ValueError: If specs, cache specs and metadata do not match, or the device is unknown.
        NotImplementedError: If no requested implementation supports a layer, or both a common prefix and a
            mask are passed; the message has the reason.
    """
    if device is not None:
        architectures.require_known_gpu(device=device)
    layers = _distinct_layer_configs(metadata, specs, cache_specs, query_dtype, as_score_mod(score_mod))
    with architectures.target(device):
        full_plan = build_plan(
            metadata, plan_layers(metadata, layers, mask, implementation=implementation), mask
        )
        if common_prefix_len is None:
            return full_plan
        if mask is not None:
            reason, fix = "masks are not supported over a shared prefix", "Pass one of them"
            raise unsupported("common_prefix_len with a mask", reason, fix)
        parts = build_cascade_metadata(metadata, common_prefix_len)
        return replace(full_plan, cascade=_cascade_plan(parts, layers, implementation))


def _cascade_plan(
    parts: CascadeMetadata, layers: Sequence[LayerConfig], implementation: ImplementationArg
) -> CascadePlan | None:
    """Return the plans of prefix and suffix for the layers that support cascade attention, or None."""
    layers = tuple(
        layer
        for layer in layers
        if layer.cache is not None and can_cascade(layer.spec) and layer.score_function is None
    )
    if not layers:
        return None
    prefix_layers = dict.fromkeys(  # all queries follow the prefix, so attention to it is not causal
        dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, causal=False)) for layer in layers
    )
    prefix_plans = plan_layers(parts.prefix, tuple(prefix_layers), None, implementation=implementation)
    suffix_plans = plan_layers(parts.suffix, layers, None, implementation=implementation)
    prefix = build_plan(parts.prefix, prefix_plans, None)
    suffix = build_plan(parts.suffix, suffix_plans, None)
    return CascadePlan(metadata=parts, prefix=prefix, suffix=suffix)


def plan_of_layer(
    plan: Plan | None,
    metadata: BatchMetadata,
    layer: LayerConfig,
    mask: Mask | None,
    implementation: ImplementationArg,
) -> tuple[LayerPlan, tuple[RegionPlan, ...]]:
    """Return the plan of a layer and of each region that the step has.

    Args:
        plan: Plan of the step; None plans the layer here.
        metadata: Metadata of the step.
        layer: Configuration of the layer.
        mask: Mask of the step; None with a plan.
        implementation: Requested implementations. If the plan uses others, the layer is planned here.

    Raises:
        ValueError: If the plan was built for another step or for other layers.
        NotImplementedError: If no requested implementation supports the layer.
    """
    if plan is not None:
        check_plan_matches(plan, metadata)
        layer_plan, mask = plan.layer_plan(layer), plan.mask
        requested = requested_implementations(implementation)
        if implementation is None or all(
            choice.implementation in requested for _, choice in layer_plan.choices
        ):
            return layer_plan, layer_plan.region_plans(plan.regions)
    (layer_plan,) = plan_layers(metadata, (layer,), mask, implementation=implementation)
    return layer_plan, layer_plan.region_plans(plan_regions_jitted(metadata, mask, (layer_plan,)))


def build_plan(metadata: BatchMetadata, layers: tuple[LayerPlan, ...], mask: Mask | None) -> Plan:
    """Build the plan of a step from its layer plans; outside jit with one call of a compiled function."""
    build = plan_regions_jitted if architectures.is_concrete(metadata, mask) else plan_regions
    return Plan(
        regions=build(metadata, mask, layers),
        mask=mask,
        seq_lens=metadata.seq_lens,
        layers=layers,
        bucket=metadata.bucket,
    )


def _distinct_layer_configs(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: CacheOrSpec | Sequence[CacheOrSpec | None] | None,
    query_dtype: DTypeLike | None,
    score_mod: ScoreMod | None,
) -> tuple[LayerConfig, ...]:
    """Validate the layers and return their distinct configurations."""
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    layer_specs = tuple(specs) if isinstance(specs, Iterable) else (specs,)
    if not layer_specs:
        raise ValueError("specs must contain at least one AttentionSpec.")
    for spec in layer_specs:
        require_type("specs", spec, AttentionSpec, "one, or one per layer")
    if isinstance(cache_specs, list | tuple):
        caches = tuple(cache_specs)
        if len(caches) != len(layer_specs):
            raise ValueError(
                f"cache_specs has {len(caches)} entries for {len(layer_specs)} specs. Pass one entry per "
                "spec, or a single one for all layers."
            )
    else:
        caches = (cache_specs,) * len(layer_specs)
    for spec, cache in zip(layer_specs, caches, strict=True):
        _check_cache(metadata, spec, cache)
    if query_dtype is not None:
        query_dtype = require_float_dtype("query_dtype", query_dtype)
        require_query_dtype("query_dtype", query_dtype)
    layers = (
        layer_config(spec, cache, query_dtype, score_mod)
        for spec, cache in zip(layer_specs, caches, strict=True)
    )
    return tuple(dict.fromkeys(layers))


def _check_cache(metadata: BatchMetadata, spec: AttentionSpec, cache: Any) -> None:
    expected_values = [("num_kv_heads", "spec", spec.num_kv_heads), ("head_dim", "spec", spec.head_dim)]
    if hasattr(cache, "block_size"):
        expected_values.append(("block_size", "metadata", metadata.block_size))
    for name, owner, expected in expected_values if cache is not None else ():
        value = getattr(cache, name, None)
        require(value is not None, "cache_specs", "be CacheSpec, PagedCache or None", type(cache).__name__)
        require(value == expected, f"cache_spec.{name}", f"equal {owner}.{name} ({expected})", value)


def check_plan_matches(plan: Plan, metadata: BatchMetadata) -> None:
    """Check that a plan was built for a batch: by the bucket and, if not traced, by the lengths.

    Raises:
        ValueError: If it was built for another batch.
    """
    if plan.bucket != metadata.bucket:
        raise ValueError(
            f"The plan was built for {plan.bucket}, but the metadata has {metadata.bucket}. "
            "Build a plan from this metadata."
        )
    if plan.seq_lens is metadata.seq_lens or not architectures.is_concrete(plan.seq_lens, metadata.seq_lens):
        return
    planned, seq_lens = np.asarray(plan.seq_lens), np.asarray(metadata.seq_lens)
    if not np.array_equal(planned, seq_lens):
        raise ValueError(
            f"The plan was built for a batch with seq_lens {planned}, but the batch has seq_lens {seq_lens}. "
            "Build a plan for each batch."
        )
