"""Kernel plans of a step, computed once for all layers with the same key."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jattn.batch.metadata import REGIONS, BatchMetadata, region_batch
from jattn.implementations.mosaic_gpu import (
    DecodeKernelConfig,
    DecodeKernelPlan,
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
    for one in layers:
        for region, choice in one.choices:
            key = _key(choice, one.layer.spec, region)
            if key is not None:
                shared.setdefault(key, SharedKernelPlan(key, one.layer.spec, choice, region))
    return tuple(shared.values())


def _key(choice: ImplementationChoice, spec: AttentionSpec, region: str) -> KernelPlanKey | None:
    key = None if choice.kernel is None else kernel_plan_key(choice.kernel, spec)
    return None if key is None else (region, *key)


def numbered(layers: tuple[LayerPlan, ...], shared: tuple[SharedKernelPlan, ...]) -> tuple[LayerPlan, ...]:
    """Return the layer plans with the indices of their kernel plans."""
    places: dict[KernelPlanKey | None, int] = {work.key: nth for nth, work in enumerate(shared)}
    made = []
    for one in layers:
        numbers = {region: places.get(_key(choice, one.layer.spec, region)) for region, choice in one.choices}
        in_decode, in_prefill = map(numbers.get, REGIONS)
        made.append(dataclasses.replace(one, kernel_plans=(in_decode, in_prefill)))
    return tuple(made)


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
        whole = spec.mask_with(mask)
        whole = None if whole is None else whole.slice_rows(part.first_row)
        assert kernel is not None
        if isinstance(kernel, DecodeKernelConfig):
            sizes = kernel.list_block_size, spec.num_q_heads, spec.num_kv_heads, spec.sparsity
            blocks = block_lists.get(sizes)
            work: KernelPlan = plan_decode_kernel(kernel, part.metadata, spec, whole, block_list=blocks)
            assert isinstance(work, DecodeKernelPlan)
            block_lists[sizes] = work.block_list
        else:
            work = plan_prefill_kernel(kernel, part.metadata, spec, whole)
        kernel_plans.append(work)
    return tuple(kernel_plans), prefill_tiles(
        region_batch(metadata, "prefill").metadata
    ) if needs_query_tiles else None


make_kernel_plans_eagerly = jax.jit(make_kernel_plans, static_argnames=("shared", "needs_query_tiles"))
