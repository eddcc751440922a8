"""What kernels are given, made once a step for all layers that agree in it."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jattn.batch.metadata import REGIONS, BatchMetadata, part_of
from jattn.implementations.mosaic_gpu import (
    DecodeKernel,
    DecodeWork,
    Work,
    decode_work,
    prefill_work,
    work_key,
)
from jattn.implementations.selection import Choice
from jattn.implementations.xla import QueryTiles, prefill_tiles
from jattn.masks import Mask
from jattn.planning.layer_plans import LayerPlan
from jattn.spec import AttentionSpec

type WorkKey = tuple[Any, ...]


class SharedWork(NamedTuple):
    """A work that layers share: its key, and the layer and region that it is made by."""

    key: WorkKey
    spec: AttentionSpec
    choice: Choice
    region: str


def shared_works(layers: tuple[LayerPlan, ...]) -> tuple[SharedWork, ...]:
    """The works of a plan, in their order."""
    shared: dict[WorkKey, SharedWork] = {}
    for one in layers:
        for region, choice in one.choices:
            key = _key(choice, one.layer.spec, region)
            if key is not None:
                shared.setdefault(key, SharedWork(key, one.layer.spec, choice, region))
    return tuple(shared.values())


def _key(choice: Choice, spec: AttentionSpec, region: str) -> WorkKey | None:
    key = None if choice.kernel is None else work_key(choice.kernel, spec)
    return None if key is None else (region, *key)


def numbered(layers: tuple[LayerPlan, ...], shared: tuple[SharedWork, ...]) -> tuple[LayerPlan, ...]:
    """The layers with the numbers of their works."""
    places: dict[WorkKey | None, int] = {work.key: nth for nth, work in enumerate(shared)}
    made = []
    for one in layers:
        numbers = {region: places.get(_key(choice, one.layer.spec, region)) for region, choice in one.choices}
        in_decode, in_prefill = map(numbers.get, REGIONS)
        made.append(dataclasses.replace(one, works=(in_decode, in_prefill)))
    return tuple(made)


def make_works(
    metadata: BatchMetadata, mask: Mask | None, shared: tuple[SharedWork, ...], *, wants_tiles: bool
) -> tuple[tuple[Work, ...], QueryTiles | None]:
    """The works of a plan, and XLA's tiles."""
    works: list[Work] = []
    block_lists: dict[Any, Any] = {}
    for _, spec, choice, region in shared:
        part, kernel = part_of(metadata, region), choice.kernel
        whole = spec.mask_with(mask)
        whole = None if whole is None else whole.slice_rows(part.first_row)
        assert kernel is not None
        if isinstance(kernel, DecodeKernel):
            sizes = kernel.list_block_size, spec.num_q_heads, spec.num_kv_heads, spec.sparsity
            blocks = block_lists.get(sizes)
            work: Work = decode_work(kernel, part.metadata, spec, whole, block_list=blocks)
            assert isinstance(work, DecodeWork)
            block_lists[sizes] = work.block_list
        else:
            work = prefill_work(kernel, part.metadata, spec, whole)
        works.append(work)
    return tuple(works), prefill_tiles(part_of(metadata, "prefill").metadata) if wants_tiles else None


make_works_eagerly = jax.jit(make_works, static_argnames=("shared", "wants_tiles"))
