"""Plans of layer configurations, and their table."""

import dataclasses
import pathlib
import warnings
from collections.abc import Sequence

from jattn.batch.metadata import REGIONS, BatchMetadata
from jattn.implementations.layer_config import LayerConfig, region_sizes
from jattn.implementations.selection import (
    ImplementationArg,
    ImplementationChoice,
    KernelFallbackWarning,
    choose_implementation,
    requested_implementations,
)
from jattn.masks import Mask, check_batch_mask
from pallas_kernels import support

COLUMNS = ("layer", "region", "implementation", "tiles", "split", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Implementations of a layer configuration.

    Attributes:
        layer: Layer configuration.
        is_for_any_cache: Whether the choice holds for any cache format, since no kernel was considered.
        decode: Implementation in the decode region; None without one.
        prefill: Implementation in the prefill region; None without one.
        kernel_plans: Index into `Plan.kernel_plans` for the decode and the prefill region; None without a
            shared kernel plan.
    """

    layer: LayerConfig
    is_for_any_cache: bool
    decode: ImplementationChoice | None
    prefill: ImplementationChoice | None
    kernel_plans: tuple[int | None, int | None] = (None, None)

    def covers(self, layer: LayerConfig) -> bool:
        """Return whether this plan applies to a layer."""
        return layer == self.layer or (self.is_for_any_cache and layer.spec == self.layer.spec)

    @property
    def choices(self) -> tuple[tuple[str, ImplementationChoice], ...]:
        """Name and implementation of each region that the step has."""
        pairs = zip(REGIONS, (self.decode, self.prefill), strict=True)
        return tuple((name, choice) for name, choice in pairs if choice is not None)


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
    regions, no_kernels = region_sizes(metadata), support.why_not_on(metadata)
    is_for_any = no_kernels is not None or "mosaic_gpu" not in requested_implementations(implementation)
    layer_plans = []
    for layer in layers:
        if mask is not None:
            heads, causal = layer.spec.num_q_heads, layer.spec.causal
            has_cache = layer.cache is not None
            check_batch_mask(mask, metadata, num_q_heads=heads, causal=causal, has_cache=has_cache)
        layer_mask = layer.spec.mask_with(mask)
        choices = {
            region.name: choose_implementation(
                layer, region, layer_mask, implementation=implementation, no_kernels=no_kernels
            )
            for region in regions
        }
        layer_plan = LayerPlan(
            layer=layer,
            is_for_any_cache=is_for_any,
            decode=choices.get("decode"),
            prefill=choices.get("prefill"),
        )
        if implementation is None and support.is_gpu(metadata):
            _warn_of_fallbacks(layer_plan)
        layer_plans.append(layer_plan)
    return tuple(layer_plans)


def _warn_of_fallbacks(layer_plan: LayerPlan) -> None:
    """Warn about each region that the kernels do not serve."""
    for region, choice in layer_plan.choices:
        if choice.implementation != "mosaic_gpu":
            warnings.warn(
                f"Attention falls back to {choice.implementation} on a GPU, which is slow: {region} of "
                f"({layer_plan.layer}): {choice.reason}. Pass implementation={choice.implementation!r} to "
                "silence this warning, or 'mosaic_gpu' to make it an error.",
                KernelFallbackWarning,
                skip_file_prefixes=(str(pathlib.Path(__file__).parents[1]),),
            )
