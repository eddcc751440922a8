"""Who computes what of a region, and which keys it visits: made once for all layers that agree in it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jattn.implementations import block_lists, tile_lists
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree, static
from jattn.spec import AttentionSpec
from pallas_kernels import paged_decode as decode_kernel
from pallas_kernels import varlen_prefill as prefill_kernel
from pallas_kernels.shared.score import Score


@pytree
class DecodePlan:
    """paged_decode's schedule, for every layer with the heads and the mask that it was made for.

    Attributes:
        schedule: Who computes what.
        block_list: The sparse blocks that each kv head visits; None without a sparse mask.
        layer: Static: heads, and the mask that shortens the requests' ranges of keys.
        spans: Static: what of the kernel's sizes the schedule depends on.
        list_block_size: Static: keys of a sparse block.
        lists_tell_heads: Static: whether lists say which query heads see a block.
    """

    schedule: decode_kernel.Schedule
    block_list: decode_kernel.BlockList | None
    layer: tuple[Any, ...] = static()
    spans: tuple[int, ...] = static()
    list_block_size: int | None = static()
    lists_tell_heads: bool = static()

    @property
    def key(self) -> tuple[Any, ...]:
        """Plans of equal keys are the same."""
        return self.layer, self.spans


@pytree
class PrefillPlan:
    """varlen_prefill's schedule over a paged cache, for every layer with the mask that it was made for.

    Attributes:
        schedule: The tiles of queries.
        lists: The tiles of keys that each of them visits; None without a sparse mask.
        mask_arrays: What the kernel reads of the mask in tiles that are seen in part.
        layer: Static: the mask that says how long a tile takes; with lists the heads, too.
        tiles: Static: the kernel's sizes.
    """

    schedule: prefill_kernel.Schedule
    lists: prefill_kernel.TileLists | None
    mask_arrays: tuple[Array, ...]
    layer: tuple[Any, ...] = static()
    tiles: prefill_kernel.Tiles = static()

    @property
    def key(self) -> tuple[Any, ...]:
        """Plans of equal keys are the same."""
        return self.layer, self.tiles


type RegionPlan = DecodePlan | PrefillPlan


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


def decode_tiles(
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kv_dtypes: tuple[DTypeLike, DTypeLike],
    *,
    has_lists: bool,
) -> decode_kernel.Tiles:
    """The decode kernel's sizes for a cache stored as these dtypes."""
    return decode_kernel.default_tiles(
        spec.head_dim,
        rows=spec.q_heads_per_kv_head * metadata.bucket.decode_query_len,
        kv_dtypes=kv_dtypes,
        batch_invariant=spec.batch_invariant,
        has_lists=has_lists,
    )


def listed_block_size(metadata: BatchMetadata, spec: AttentionSpec, mask: Mask) -> int | None:
    """Keys of a block where paged_decode walks through lists of a mask's blocks; None where it does not."""
    if not metadata.bucket.max_decodes or not metadata.block_table.shape[1]:
        return None
    size = block_lists.list_block_size(mask, spec, metadata)
    return size if isinstance(size, int) else None


def decode_plan(
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kv_dtypes: tuple[DTypeLike, DTypeLike],
    *,
    mask: Mask | None = None,
    plans: Sequence[RegionPlan] = (),
) -> DecodePlan:
    """The plan for these dtypes and a layer like this among `plans`, or a new one.

    Args:
        metadata: The region as a step of its own.
        spec: The layer.
        kv_dtypes: Of the cache's keys and values.
        mask: What it masks beyond the spec's numbers; listed_block_size is an int.
        plans: The step's, under this mask; a block list is taken from any of them.
    """
    tiles = decode_tiles(metadata, spec, kv_dtypes, has_lists=mask is not None)
    layer = _decode_layer(spec, mask)
    alike = [plan for plan in plans if isinstance(plan, DecodePlan) and plan.layer == layer]
    for plan in alike:
        if plan.spans == tiles.spans:
            return plan
    size, blocks = None, None
    if mask is not None:
        size = listed_block_size(metadata, spec, mask)
        assert size is not None
        is_made = bool(alike)
        blocks = alike[0].block_list if is_made else block_lists.block_list(mask, spec, metadata, size)
    schedule = decode_kernel.schedule_for(
        metadata.seq_lens,
        score=score_of(spec),
        tiles=tiles,
        kv_heads=spec.num_kv_heads,
        group=spec.q_heads_per_kv_head,
        decode_query_len=metadata.bucket.decode_query_len,
        block_list=blocks,
        list_block_size=size,
    )
    return DecodePlan(
        schedule=schedule,
        block_list=blocks,
        layer=layer,
        spans=tiles.spans,
        list_block_size=size,
        lists_tell_heads=mask is not None and block_lists.tells_heads(mask, spec),
    )


def prefill_plan(
    metadata: BatchMetadata,
    spec: AttentionSpec,
    tiles: prefill_kernel.Tiles,
    *,
    mask: Mask | None = None,
    plans: Sequence[RegionPlan] = (),
    kv_start_loc: Int32[Array, " reqs"] | None = None,
    max_seq_len: int | None = None,
    is_packed: bool = False,
) -> PrefillPlan:
    """The plan for these tiles and a layer like this among `plans`, or a new one.

    Args:
        metadata: The region as a step of its own.
        spec: The layer.
        tiles: The kernel's sizes.
        mask: What it masks beyond the spec's numbers; why_not_lists is None.
        plans: The step's, under this mask, of keys in a paged cache.
        kv_start_loc: First key of each request where keys are not read from a paged cache.
        max_seq_len: Static bound of the requests' lengths; the block table's when None.
        is_packed: Static: whether kv_start_loc is the caller's, so that tiles of keys may begin anywhere.
    """
    score, layer = score_of(spec), _prefill_layer(spec, mask)
    for plan in plans:
        if isinstance(plan, PrefillPlan) and plan.key == (layer, tiles) and kv_start_loc is None:
            return plan
    schedule = prefill_kernel.make_schedule(
        metadata.query_start_loc,
        metadata.seq_lens,
        kv_start_loc,
        num_tokens=metadata.bucket.max_tokens,
        score=score,
        tiles=tiles,
        has_lists=mask is not None,
    )
    lists, of_pairs = None, None
    if mask is not None:
        call: dict[str, Any] = {
            "max_seq_len": max_seq_len or metadata.block_table.shape[1] * metadata.block_size,
            "is_packed": is_packed,
            "is_prefill": metadata.bucket.max_decodes == 0,
        }
        lists = tile_lists.tile_lists(mask, spec, schedule, tiles, **call)
        of_pairs = tile_lists.mask_of_pairs(mask, spec, tiles, **call)
    return PrefillPlan(
        schedule=schedule,
        lists=lists,
        mask_arrays=() if of_pairs is None else of_pairs.arrays,
        layer=layer,
        tiles=tiles,
    )


def sparse_tiles(spec: AttentionSpec, mask: Mask) -> prefill_kernel.Tiles:
    """The prefill kernel's tiles under a mask: no larger than the mask's blocks where there is a choice."""
    tiles = prefill_kernel.default_tiles(spec.head_dim, has_lists=True)
    if tiles.tile_kv == 128:
        narrow = dataclasses.replace(tiles, tile_kv=64, stages=2 * tiles.stages)
        if tile_lists.has_narrow_queries(mask, tiles.tile_q):
            return dataclasses.replace(narrow, teams=narrow.warpgroups, stages=tiles.stages)
        if tile_lists.has_narrow_blocks(mask, tiles.tile_kv):
            return narrow
    return tiles


def _decode_layer(spec: AttentionSpec, mask: Mask | None) -> tuple[Any, ...]:
    """What layers that share a decode schedule agree in."""
    heads = spec.num_kv_heads, spec.q_heads_per_kv_head, spec.head_dim
    return *heads, spec.batch_invariant, *score_of(spec).mask, spec.sparsity, mask is not None


def _prefill_layer(spec: AttentionSpec, mask: Mask | None) -> tuple[Any, ...]:
    """What layers that share a prefill schedule agree in."""
    heads = () if mask is None else (spec.num_q_heads, spec.num_kv_heads)
    return *heads, *score_of(spec).mask, spec.sparsity, mask is not None
