"""Plans of layer configurations in the regions of a step, and their table."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jattn.batch.metadata import BatchMetadata, region_batch
from jattn.implementations.layer_config import LayerConfig, region_sizes
from jattn.implementations.mosaic_gpu import (
    DecodeKernelConfig,
    KernelPlan,
    kernel_plan_key,
    plan_decode_kernel,
    plan_prefill_kernel,
)
from jattn.implementations.selection import (
    ImplementationArg,
    ImplementationChoice,
    KernelFallbackWarning,
    choose_implementation,
    requested_implementations,
)
from jattn.implementations.xla import QueryTiles, prefill_tiles
from jattn.masks import Mask, check_batch_mask
from jattn.pytree import pytree, static
from pallas_kernels import architectures, support
from pallas_kernels.checks import warn_caller

COLUMNS = ("layer", "region", "implementation", "tiles", "split", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Implementations of a layer configuration.

    Attributes:
        layer: Layer configuration.
        is_for_any_cache: Whether the choice holds for any cache format, since no kernel was considered.
        decode: Implementation in the decode region; None without one.
        prefill: Implementation in the prefill region; None without one.
    """

    layer: LayerConfig
    is_for_any_cache: bool
    decode: ImplementationChoice | None
    prefill: ImplementationChoice | None

    def covers(self, layer: LayerConfig) -> bool:
        """Return whether this plan applies to a layer."""
        is_like = layer.spec == self.layer.spec and layer.score_function == self.layer.score_function
        # A plan for keys anywhere holds for aligned ones.
        aligned = dataclasses.replace(self.layer, has_aligned_keys=True)
        return layer in (self.layer, aligned) or (self.is_for_any_cache and is_like)

    @property
    def choices(self) -> tuple[tuple[str, ImplementationChoice], ...]:
        """Name and implementation of each region that the step has."""
        decode = () if self.decode is None else (("decode", self.decode),)
        return decode if self.prefill is None else (*decode, ("prefill", self.prefill))

    @property
    def region_keys(self) -> tuple[Hashable, ...]:
        """Key of the RegionPlan of each region that the step has; layers with equal keys share it."""
        spec, keys = self.layer.spec, []
        for name, choice in self.choices:
            kernel_key = None if choice.kernel is None else kernel_plan_key(choice.kernel, spec)
            keys.append((name, spec.sparsity, choice.implementation, kernel_key))
        return tuple(keys)

    def region_plans(self, plans: "Sequence[RegionPlan]") -> "tuple[RegionPlan, ...]":
        """Return the layer's plan of each region that the step has, from those of all layers."""
        plans_by_key = {plan.key: plan for plan in plans}
        return tuple(plans_by_key[key] for key in self.region_keys)


@pytree
class RegionPlan:
    """Per-step values of a region, which layers with equal masks and kernel sizes share.

    Attributes:
        mask: Mask of the region's rows in addition to the spec's window, chunk size and causality: the spec's
            sparsity and the step's mask. None adds none.
        kernel_plan: Schedule and lists of the kernel; None without a kernel, or if they depend on where the
            layer's keys are.
        query_tiles: Query tiles of the prefill region for XLA; None otherwise.
        key: One of the `region_keys` of the layers that share these values (static).
    """

    mask: Mask | None
    kernel_plan: KernelPlan | None
    query_tiles: QueryTiles | None
    key: Hashable = static()


def plan_layers(
    metadata: BatchMetadata,
    layers: Sequence[LayerConfig],
    mask: Mask | None,
    *,
    implementation: ImplementationArg,
) -> tuple[LayerPlan, ...]:
    """Choose the implementation of each layer configuration from shapes and the metadata's device.

    Args:
        metadata: Metadata of the step, or its shapes.
        layers: Distinct layer configurations.
        mask: Mask for every layer; see `plan`.
        implementation: Requested implementations; see `plan`.

    Raises:
        ValueError: If the mask does not match the step or a layer.
        NotImplementedError: If no requested implementation supports a layer.
    """
    no_kernels, requested = support.why_not_on(metadata), requested_implementations(implementation)
    is_for_any = no_kernels is not None or "mosaic_gpu" not in requested
    layer_plans: list[LayerPlan] = []
    for layer in layers:
        spec = layer.spec
        if mask is not None:
            heads, has_cache = spec.num_q_heads, layer.cache is not None
            check_batch_mask(mask, metadata, num_q_heads=heads, causal=spec.causal, has_cache=has_cache)
        choices: dict[str, ImplementationChoice] = {}
        for region in region_sizes(metadata):
            choices[region.name] = choose_implementation(
                layer,
                region,
                spec.mask_with(mask),
                requested=requested,
                is_named=implementation is not None,
                no_kernels=no_kernels,
                gpu=architectures.kernel_architecture(metadata),
            )
        layer_plan = LayerPlan(
            layer=layer,
            is_for_any_cache=is_for_any,
            decode=choices.get("decode"),
            prefill=choices.get("prefill"),
        )
        if implementation is None and architectures.is_gpu(metadata):
            _warn_of_fallbacks(layer_plan)
        layer_plans.append(layer_plan)
    return tuple(layer_plans)


def plan_regions(
    metadata: BatchMetadata, mask: Mask | None, layers: tuple[LayerPlan, ...]
) -> tuple[RegionPlan, ...]:
    """Build one region plan for each distinct region key of the layers. Traced.

    Args:
        metadata: Metadata of the step.
        mask: Mask for every layer; see `plan`.
        layers: Result of plan_layers for this step and mask.
    """
    plans: dict[Hashable, RegionPlan] = {}
    block_lists: dict[Hashable, Any] = {}
    query_tiles: QueryTiles | None = None
    for layer_plan in layers:
        spec = layer_plan.layer.spec
        for key, (name, choice) in zip(layer_plan.region_keys, layer_plan.choices, strict=True):
            if key in plans:
                continue
            batch, kernel = region_batch(metadata, name), choice.kernel
            region_mask = spec.mask_with(mask)
            if region_mask is not None:
                region_mask = region_mask.slice_rows(batch.first_row)
            kernel_plan: KernelPlan | None = None
            if isinstance(kernel, DecodeKernelConfig):
                list_key = kernel.list_block_size, spec.num_q_heads, spec.num_kv_heads, spec.sparsity
                kernel_plan = plan_decode_kernel(
                    kernel, batch.metadata, spec, region_mask, block_list=block_lists.get(list_key)
                )
                block_lists[list_key] = kernel_plan.block_list
            elif kernel is not None and kernel_plan_key(kernel, spec) is not None:
                kernel_plan = plan_prefill_kernel(kernel, batch.metadata, spec, region_mask)
            has_tiles = choice.implementation == "xla" and name == "prefill"
            if has_tiles and query_tiles is None:
                query_tiles = prefill_tiles(batch.metadata)
            tiles = query_tiles if has_tiles else None
            plans[key] = RegionPlan(mask=region_mask, kernel_plan=kernel_plan, query_tiles=tiles, key=key)
    return tuple(plans.values())


plan_regions_jitted = jax.jit(plan_regions, static_argnames="layers")


def table_rows(layers: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """Return the table rows, one per layer configuration and region; see COLUMNS."""
    return [
        (
            str(layer_plan.layer),
            region,
            choice.implementation if choice.kernel is None else f"{choice.implementation} {choice.kernel}",
            "" if choice.kernel is None else choice.kernel.tiles,
            "" if choice.kernel is None else choice.kernel.split,
            choice.reason or "",
        )
        for layer_plan in layers
        for region, choice in layer_plan.choices
    ]


def table(layers: Sequence[LayerPlan]) -> str:
    """Format layer plans as a table with a row per layer configuration and region."""
    return format_table([COLUMNS, *table_rows(layers)])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as an aligned text table; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _warn_of_fallbacks(layer_plan: LayerPlan) -> None:
    """Warn about each region that the kernels do not serve."""
    for region, choice in layer_plan.choices:
        if choice.implementation != "mosaic_gpu":
            warn_caller(
                f"Attention falls back to {choice.implementation} on a GPU, which is slow: {region} of "
                f"({layer_plan.layer}): {choice.reason}. Pass implementation={choice.implementation!r} to "
                "silence this warning, or 'mosaic_gpu' to make it an error.",
                KernelFallbackWarning,
            )
