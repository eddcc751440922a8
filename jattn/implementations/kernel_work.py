"""Which kernel serves a region of a step, by static facts, and what it is given, once for many layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jattn.implementations import block_lists, tile_lists
from jattn.implementations.layers import Layer, Region
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree
from jattn.spec import AttentionSpec
from pallas_kernels import paged_decode as decode_kernel
from pallas_kernels import support
from pallas_kernels import varlen_prefill as prefill_kernel
from pallas_kernels.shared.score import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeKernel:
    """paged_decode, of one size.

    Attributes:
        tiles: Its sizes.
        list_block_size: Keys of a listed block; None = it reads all that the spec's numbers let queries see.
        lists_tell_heads: Whether lists say which query heads see a block.
    """

    tiles: decode_kernel.Tiles
    list_block_size: int | None = None
    lists_tell_heads: bool = False

    def __str__(self) -> str:
        listed = "" if self.list_block_size is None else f" over lists of blocks of {self.list_block_size}"
        return f"paged_decode{listed}"

    @property
    def sizes(self) -> str:
        """Its tiles in few words."""
        return f"{self.tiles.max_rows} x {self.tiles.tile_kv} keys, {self.tiles.stages} stages"

    @property
    def split(self) -> str:
        """How the keys of a request are shared among thread blocks."""
        fixed = self.tiles.split_kv
        return f"{self.tiles.ctas} equal spans" if fixed is None else f"every {fixed} keys"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillKernel:
    """varlen_prefill, of one size.

    Attributes:
        tiles: Its sizes.
        has_lists: Whether it walks through lists of tiles.
        is_packed: Whether keys are outside a paged cache.
        is_widened: Whether an 8-bit cache is read into 16 bits first.
    """

    tiles: prefill_kernel.Tiles
    has_lists: bool = False
    is_packed: bool = False
    is_widened: bool = False

    def __str__(self) -> str:
        first = "cache_read, " if self.is_widened else ""
        return f"{first}varlen_prefill{' over lists of tiles' if self.has_lists else ''}"

    @property
    def sizes(self) -> str:
        """Its tiles in few words."""
        return f"{self.tiles.tile_q} x {self.tiles.tile_kv} keys, {self.tiles.stages} stages"

    @property
    def split(self) -> str:
        """How a request's work is shared among thread blocks."""
        return "by tiles of queries"


type Kernel = DecodeKernel | PrefillKernel


@pytree
class DecodeWork:
    """What paged_decode is given besides the batch.

    Attributes:
        schedule: Who computes what.
        block_list: The sparse blocks that each kv head visits; None without a mask.
    """

    schedule: decode_kernel.Schedule
    block_list: decode_kernel.BlockList | None


@pytree
class PrefillWork:
    """What varlen_prefill is given besides the batch.

    Attributes:
        schedule: The tiles of queries.
        lists: The tiles of keys that each of them visits; None without a mask.
        mask_arrays: What the kernel reads of the mask in tiles that are seen in part.
    """

    schedule: prefill_kernel.Schedule
    lists: prefill_kernel.TileLists | None
    mask_arrays: tuple[Array, ...]


type Work = DecodeWork | PrefillWork


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


# ---------------------------------------------------------------------------------------- choosing
def choose_kernel(layer: Layer, region: Region, mask: Mask | None) -> Kernel | str:
    """The kernel for a region on a GPU that has the kernels, or why there is none. Looks at shapes alone.

    Args:
        layer: The kind of layer.
        region: Its sizes.
        mask: What queries see beyond the spec's numbers.
    """
    declined = None
    if region.bucket.max_decodes and layer.cache is not None and region.max_blocks:
        decode = _choose_decode(layer, region, mask)
        if not isinstance(decode, str):
            return decode
        declined = decode
    prefill = _choose_prefill(layer, region, mask)
    return declined if isinstance(prefill, str) and declined is not None else prefill


def _choose_decode(layer: Layer, region: Region, mask: Mask | None) -> DecodeKernel | str:
    spec, cache = layer.spec, layer.cache
    assert cache is not None
    reason = support.why_not_decode(
        dtype=layer.query_dtype,
        k_dtype=cache.dtypes[0],
        v_dtype=cache.dtypes[1],
        head_dim=spec.head_dim,
        block_size=region.block_size,
        group=spec.q_heads_per_kv_head,
        decode_query_len=region.bucket.decode_query_len,
        layout=cache.layout,
        has_token_scales=cache.has_token_scales,
    )
    if reason is not None:
        return reason
    size, tells_heads = None, False
    if mask is not None:
        listed = block_lists.list_block_size(mask, spec, region)
        if isinstance(listed, str):
            return listed
        size, tells_heads = listed, block_lists.tells_heads(mask, spec)
    tiles = decode_kernel.default_tiles(
        spec.head_dim,
        rows=spec.q_heads_per_kv_head * region.bucket.decode_query_len,
        kv_dtypes=cache.dtypes,
        batch_invariant=spec.batch_invariant,
        has_lists=mask is not None,
    )
    return DecodeKernel(tiles=tiles, list_block_size=size, lists_tell_heads=tells_heads)


def _choose_prefill(layer: Layer, region: Region, mask: Mask | None) -> PrefillKernel | str:
    spec, cache, dtype = layer.spec, layer.cache, layer.query_dtype
    is_packed, is_widened = cache is None, cache is not None and not cache.is_plain(dtype)
    if is_packed and spec.batch_invariant:
        return "there is no batch-invariant kernel for keys outside a paged cache"
    reasons = []
    if is_widened:
        assert cache is not None
        reasons = [
            support.why_not_read(
                dtype=dtype,
                cache_dtype=stored,
                head_dim=spec.head_dim,
                block_size=region.block_size,
                layout=cache.layout,
            )
            for stored in cache.dtypes
        ]
    reasons.append(
        support.why_not_prefill(
            dtype=dtype,
            kv_dtype=dtype,
            head_dim=spec.head_dim,
            block_size=None if is_packed else region.block_size,
            layout="NHD" if cache is None else cache.layout,
        )
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        return reason
    if mask is None:
        tiles = prefill_kernel.default_tiles(spec.head_dim)
    else:
        tiles = sparse_tiles(spec, mask)
        reason = tile_lists.why_not_lists(mask, tiles, is_packed=is_packed)
        if reason is not None:
            return reason
    return PrefillKernel(tiles=tiles, has_lists=mask is not None, is_packed=is_packed, is_widened=is_widened)


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


# -------------------------------------------------------------------------------------------- work
def work_key(kernel: Kernel, spec: AttentionSpec) -> tuple[Any, ...] | None:
    """Layers of equal keys share their work under one more mask; None: it depends on the layer's own keys."""
    mask = *score_of(spec).mask, spec.sparsity
    if isinstance(kernel, DecodeKernel):
        heads = spec.num_kv_heads, spec.q_heads_per_kv_head, spec.head_dim
        return "decode", *heads, spec.batch_invariant, *mask, kernel.tiles.spans, kernel.list_block_size
    if kernel.is_packed or kernel.is_widened:
        return None
    of_lists = (spec.num_q_heads, spec.num_kv_heads) if kernel.has_lists else ()
    return "prefill", *of_lists, *mask, kernel.tiles, kernel.has_lists


def decode_work(
    kernel: DecodeKernel,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    *,
    block_list: decode_kernel.BlockList | None = None,
) -> DecodeWork:
    """What paged_decode is given. Traced.

    Args:
        kernel: choose_kernel's.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: What it masks beyond the spec's numbers.
        block_list: Of these heads and this mask, where another kind of layer has one.
    """
    size, blocks = kernel.list_block_size, block_list
    if size is not None and blocks is None:
        assert mask is not None
        blocks = block_lists.block_list(mask, spec, metadata, size)
    schedule = decode_kernel.schedule_for(
        metadata.seq_lens,
        score=score_of(spec),
        tiles=kernel.tiles,
        kv_heads=spec.num_kv_heads,
        group=spec.q_heads_per_kv_head,
        decode_query_len=metadata.bucket.decode_query_len,
        block_list=blocks,
        list_block_size=size,
    )
    return DecodeWork(schedule=schedule, block_list=blocks)


def prefill_work(
    kernel: PrefillKernel,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    mask: Mask | None,
    *,
    kv_start_loc: Int32[Array, " reqs"] | None = None,
    max_seq_len: int | None = None,
) -> PrefillWork:
    """What varlen_prefill is given. Traced.

    Args:
        kernel: choose_kernel's.
        metadata: The region as a step of its own.
        spec: The layer.
        mask: What it masks beyond the spec's numbers.
        kv_start_loc: First key of each request where keys are not read from a paged cache.
        max_seq_len: Static bound of the requests' lengths; the block table's when None.
    """
    seq_lens = metadata.seq_lens
    if kv_start_loc is None:  # what the block table has no column for has no block
        seq_lens = jnp.minimum(seq_lens, metadata.block_table.shape[1] * metadata.block_size)
    schedule = prefill_kernel.make_schedule(
        metadata.query_start_loc,
        seq_lens,
        kv_start_loc,
        num_tokens=metadata.bucket.max_tokens,
        score=score_of(spec),
        tiles=kernel.tiles,
        has_lists=kernel.has_lists,
    )
    if mask is None:
        return PrefillWork(schedule=schedule, lists=None, mask_arrays=())
    call = list_call(kernel, metadata, max_seq_len)
    lists = tile_lists.tile_lists(mask, spec, schedule, kernel.tiles, **call)
    of_pairs = tile_lists.mask_of_pairs(mask, spec, kernel.tiles, **call)
    return PrefillWork(
        schedule=schedule, lists=lists, mask_arrays=() if of_pairs is None else of_pairs.arrays
    )


def list_call(kernel: PrefillKernel, metadata: BatchMetadata, max_seq_len: int | None) -> dict[str, Any]:
    """What is static of a call over lists."""
    return {
        "max_seq_len": max_seq_len or metadata.block_table.shape[1] * metadata.block_size,
        "is_packed": kernel.is_packed,
        "is_prefill": metadata.bucket.max_decodes == 0,
    }
