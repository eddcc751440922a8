"""Kernel plans of a step, computed once for all layers with the same key."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jattn.batch.metadata import REGIONS, BatchMetadata, region_batch
from jattn.implementations.mosaic_gpu import (
    DecodeKernelConfig,
    KernelPlan,
    kernel_plan_key,
    plan_decode_kernel,
    plan_prefill_kernel,
)
from jattn.implementations.selection import ImplementationChoice
from jattn.implementations.xla import QueryTiles, prefill_tiles
from jattn.masks import Mask
from jattn.planning.layer_plans import LayerPlan
from jattn.spec import AttentionSpec

type KernelPlanKey = tuple[Any, ...]


class SharedKernelPlan(NamedTuple):
    """Kernel plan to build: its key, and a layer and region that use it."""

    key: KernelPlanKey
    spec: AttentionSpec
    choice: ImplementationChoice
    region: str


def shared_kernel_plans(layers: tuple[LayerPlan, ...]) -> tuple[SharedKernelPlan, ...]:
    """Return the distinct kernel plans that layers need, in order."""
    shared: dict[KernelPlanKey, SharedKernelPlan] = {}
    for layer_plan in layers:
        spec = layer_plan.layer.spec
        for region, choice in layer_plan.choices:
            key = _key(choice, spec, region)
            if key is not None:
                shared.setdefault(key, SharedKernelPlan(key, spec, choice, region))
    return tuple(shared.values())


def _key(choice: ImplementationChoice, spec: AttentionSpec, region: str) -> KernelPlanKey | None:
    key = None if choice.kernel is None else kernel_plan_key(choice.kernel, spec)
    return None if key is None else (region, *key)


def numbered(layers: tuple[LayerPlan, ...], shared: tuple[SharedKernelPlan, ...]) -> tuple[LayerPlan, ...]:
    """Return the layer plans with the indices of their kernel plans."""
    indices: dict[KernelPlanKey | None, int] = {plan.key: index for index, plan in enumerate(shared)}
    numbered_layers = []
    for layer_plan in layers:
        spec = layer_plan.layer.spec
        numbers = {region: indices.get(_key(choice, spec, region)) for region, choice in layer_plan.choices}
        decode, prefill = map(numbers.get, REGIONS)
        numbered_layers.append(dataclasses.replace(layer_plan, kernel_plans=(decode, prefill)))
    return tuple(numbered_layers)


def make_kernel_plans(
    metadata: BatchMetadata,
    mask: Mask | None,
    shared: tuple[SharedKernelPlan, ...],
    *,
    needs_query_tiles: bool,
) -> tuple[tuple[KernelPlan, ...], QueryTiles | None]:
    """Build the kernel plans of a step, and XLA's query tiles if needed."""
    kernel_plans: list[KernelPlan] = []
    block_lists: dict[Any, Any] = {}
    for _, spec, choice, region in shared:
        part, kernel = region_batch(metadata, region), choice.kernel
        layer_mask = spec.mask_with(mask)
        layer_mask = None if layer_mask is None else layer_mask.slice_rows(part.first_row)
        assert kernel is not None
        if isinstance(kernel, DecodeKernelConfig):
            sizes = kernel.list_block_size, spec.num_q_heads, spec.num_kv_heads, spec.sparsity
            blocks = block_lists.get(sizes)
            decode_plan = plan_decode_kernel(kernel, part.metadata, spec, layer_mask, block_list=blocks)
            block_lists[sizes] = decode_plan.block_list
            kernel_plans.append(decode_plan)
        else:
            kernel_plans.append(plan_prefill_kernel(kernel, part.metadata, spec, layer_mask))
    query_tiles = prefill_tiles(region_batch(metadata, "prefill").metadata) if needs_query_tiles else None
    return tuple(kernel_plans), query_tiles


make_kernel_plans_eagerly = jax.jit(make_kernel_plans, static_argnames=("shared", "needs_query_tiles"))
