"""Masks of a kernel call: the tiles that a mask leaves, and the mask of the pairs in partial tiles."""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from jattn.implementations.mosaic_gpu.gathered_columns import gathers_columns
from jattn.implementations.mosaic_gpu.kernel_config import score_of
from jattn.implementations.mosaic_gpu.query_rows import mask_of_rows, share_mask
from jattn.masks import Coverage, KernelTiling, Mask, tile_coverage
from jattn.masks.base import factors, leaves
from jattn.masks.in_kernel import Formula
from jattn.pytree import pytree
from jattn.spec import AttentionSpec
from pallas_kernels import varlen_backward as backward
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS, MAX_TILES, encode_tiles
from pallas_kernels.shared import Score, floor_div
from pallas_kernels.varlen_prefill import (
    ALIGN,
    COLUMNS,
    LIST_BLOCK_SIZES,
    PACK_GQA_CHOICES,
    WORD_BITS,
    Joined,
    KernelMask,
    MaskBlocks,
    PrefillSchedule,
    PrefillSizes,
    PrefillTileLists,
    make_tile_lists,
    num_query_blocks,
)

# Keys per listed block of masks with `has_short_runs`: the smallest size with which a request has at most
# MAX_RUN_BLOCKS blocks, because its lists take memory for each block.
RUN_BLOCK_SIZES = (32, 64)
MAX_RUN_BLOCKS = 4096
# Maximum number of splits of a list of queries. With as many splits as query heads per KV head, gradients of
# keys and values take as much memory as those of queries before they are added up.
MAX_LIST_SPLITS = 16
# Maximum memory of the lists of blocks of queries in the dk/dv kernel, which have an entry for each pair of a
# block and 64 keys: enough for 64k tokens in blocks of 32, with 32 heads.
MAX_QUERY_LIST_BYTES = 300 * 10**6


class MaskBounds(NamedTuple):
    """Static bounds of the call of a kernel over tile lists.

    Attributes:
        max_seq_len: Maximum number of tokens per request; 0 if unknown.
        is_aligned: Whether KV tiles begin at multiples of their size: over a paged cache, and over a PackedKV
            with `is_aligned`. In gradients, query tiles do, too.
        is_prefill: Whether the queries are in the prefill region.
        rows_per_token: Number of consecutive query rows of a token, see query_rows.py.
    """

    max_seq_len: int
    is_aligned: bool = True
    is_prefill: bool = True
    rows_per_token: int = 1

    def max_kv_tiles(self, tile_kv: int) -> int:
        """Return the maximum number of tiles, or blocks, of `tile_kv` keys per request; at least 1."""
        return max(-(-(self.max_seq_len + (ALIGN - 1) * (not self.is_aligned)) // tile_kv), 1)


@pytree
class MaskPlan:
    """A mask in the form that varlen_prefill takes.

    Attributes:
        lists: KV tiles that each query tile visits.
        pair_mask: Mask that the kernel evaluates pair by pair in partial tiles; None if there is none.
    """

    lists: PrefillTileLists
    pair_mask: KernelMask | None


class MaskFactors(NamedTuple):
    """A mask as the intersection of a part evaluated pair by pair and of block masks.

    Attributes:
        pairs: Mask that the kernel evaluates pair by pair in partial tiles; None if there is none.
        blocks: Masks with arrays that are full or empty for each block of queries and KV tile; None without.
        block_q: Queries per block of `blocks`; None if one block holds all queries.
    """

    pairs: Mask | None
    blocks: Mask | None
    block_q: int | None


def split_factors(mask: Mask, sizes: PrefillSizes, bounds: MaskBounds, keys: int) -> MaskFactors:
    """Split a mask into a part evaluated pair by pair and masks of blocks that list entries do not cut.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        sizes: Sizes of the kernel.
        bounds: Static bounds of the call.
        keys: Number of keys per list entry.
    """
    pairs: list[Mask] = []
    blocks: list[Mask] = []
    block_q: int | None = None
    tile_tokens = sizes.tile_tokens // bounds.rows_per_token
    for factor in factors(mask):
        queries, block_kv = factor.block_shape or (None, 0)
        if (
            block_kv
            and block_kv % keys == 0
            and not factor.is_static
            and bounds.is_aligned
            and (block_q is None or queries in (None, block_q))
            and (queries is None or num_query_blocks(tile_tokens, queries) <= MAX_QUERY_BLOCKS)
        ):
            blocks.append(factor)
            block_q = block_q or queries
        else:
            pairs.append(factor)
    pair_part, block_part = (
        functools.reduce(operator.and_, part) if part else None for part in (pairs, blocks)
    )
    return MaskFactors(pair_part, block_part, block_q)


def mask_blocks(mask: Mask, spec: AttentionSpec, rows_per_token: int = 1) -> MaskBlocks:
    """Return the blocks of queries, in rows, and of keys of a mask, which tiles should not cut."""
    shapes = [(leaf, *leaf.block_shape) for leaf in leaves(mask) if leaf.block_shape is not None]
    # A formula is evaluated pair by pair anyway, so tiles of queries may cut its blocks.
    queries = tuple(
        rows_per_token * size for leaf, size, _ in shapes if size is not None and not leaf.is_static
    )
    # The bits of a row depend on the tokens of its tile, of which fewer heads leave more.
    has_heads = spec.batch_invariant or rows_per_token > 1
    shared_heads = 1 if has_heads else heads_with_equal_masks(mask, spec)
    keys = tuple(size for _, _, size in shapes)
    # Layers that gather columns are taken to have slashes as isolated as their columns.
    return MaskBlocks(queries, keys, gathers_columns(mask, spec), shared_heads)


def heads_with_equal_masks(mask: Mask, spec: AttentionSpec) -> int:
    """Return how many consecutive query heads of a KV head, of those that a tile may hold, share a mask."""
    return max(num for num in PACK_GQA_CHOICES if share_mask(mask, spec, num))


def kernel_tiling(spec: AttentionSpec, sizes: PrefillSizes, keys: int, bounds: MaskBounds) -> KernelTiling:
    """Return the tiles in which a warpgroup of varlen_prefill, or of the dq kernel, evaluates a mask."""
    num_heads = spec.num_q_heads // bounds.rows_per_token, spec.num_kv_heads
    return KernelTiling(
        num_heads, sizes.warpgroup_rows, keys, bounds.max_seq_len, bounds.is_aligned, bounds.is_prefill
    )


def block_tiling(spec: AttentionSpec, sizes: PrefillSizes, keys: int, bounds: MaskBounds) -> KernelTiling:
    """Return the tiles in which varlen_prefill evaluates a mask over lists of blocks of `keys` keys."""
    tiling = kernel_tiling(spec, sizes, max(keys, WORD_BITS), bounds)
    return tiling._replace(is_aligned=bounds.is_aligned and keys >= WORD_BITS, needs_words=True)


def packed_sizes(
    mask: Mask, spec: AttentionSpec, bounds: MaskBounds, gpu: str
) -> tuple[PrefillSizes, int] | None:
    """Return sizes of varlen_prefill for tiles that hold several blocks of a mask, and the keys per block.

    None if the kernel visits whole tiles, see packed_block_size.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        spec: Attention of the layer.
        bounds: Static bounds of the call.
        gpu: Compute capability that the kernel is built for.
    """
    if spec.batch_invariant:
        # The bits of a row would depend on the blocks that other rows of its tile select.
        return None
    blocks, run_size = mask_blocks(mask, spec, bounds.rows_per_token), _run_block_size(mask, bounds)
    if run_size:
        blocks = blocks._replace(keys=(*blocks.keys, run_size))
    # Tiles may be larger than blocks. Where the first visible key may be in any tile, tiles of eight blocks
    # spill 160 to 280 bytes, so tiles of 64 keys hold four.
    score = score_of(spec)
    has_low_end = not bounds.is_aligned or score.window[0] is not None or score.chunk_size is not None
    if not has_low_end or min(blocks.keys, default=0) > min(LIST_BLOCK_SIZES):
        blocks = blocks._replace(keys=())
    sizes = prefill.default_sizes(spec.head_dim, has_lists=True, blocks=blocks, gpu=gpu)
    keys = packed_block_size(mask, spec, sizes, bounds, run_size)
    return None if keys is None else (sizes, keys)


def _run_block_size(mask: Mask, bounds: MaskBounds) -> int:
    """Return the keys per listed block of a mask with `has_short_runs`; 0 if there are none, or too many."""
    if not has_short_runs(mask):
        return 0
    return next((size for size in RUN_BLOCK_SIZES if bounds.max_seq_len <= size * MAX_RUN_BLOCKS), 0)


def has_short_runs(mask: Mask) -> bool:
    """Return whether queries attend to runs of keys that fill no tiles."""
    return any(factor.has_short_runs for factor in factors(mask))


def packed_block_size(
    mask: Mask, spec: AttentionSpec, sizes: PrefillSizes, bounds: MaskBounds, run_size: int = 0
) -> int | None:
    """Return the keys per block of a mask of which tiles hold several blocks; see packed_sizes.

    None if tiles are not larger than blocks, or if not all of the mask can be evaluated as words of bits.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        spec: Attention of the layer.
        sizes: Sizes of the kernel.
        bounds: Static bounds of the call.
        run_size: Keys per block for factors of the mask without blocks; 0 for masks of blocks only.
    """
    keys = _common_block_size(mask, 1, run_size)
    if keys not in LIST_BLOCK_SIZES or keys >= sizes.tile_kv or sizes.per_warp_mma:
        return None
    if bounds.max_kv_tiles(keys) > MAX_TILES:
        return None
    pairs = split_factors(mask.for_kernels(), sizes, bounds, keys).pairs
    return keys if pairs is None or _has_words(pairs, block_tiling(spec, sizes, keys, bounds)) else None


def _common_block_size(mask: Mask, axis: int, run_size: int) -> int:
    """Return the greatest common divisor of `run_size` and the queries (axis 0) or keys (1) of all blocks.

    0 if there are none.
    """
    shapes = [factor.block_shape for factor in factors(mask)]
    return math.gcd(run_size, *[shape[axis] or 0 for shape in shapes if shape is not None])


def _has_words(mask: Mask, tiling: KernelTiling) -> bool:
    """Return whether a kernel can evaluate a mask as words."""
    if mask.why_no_kernel(tiling) is not None:
        return False
    return bool(jax.eval_shape(lambda mask: word_mask(mask, tiling), mask).is_words)


def word_mask(mask: Mask, tiling: KernelTiling) -> KernelMask:
    """Return the mask that a kernel evaluates as words, if `is_words`; see kernel_mask."""
    operands = tuple(factor.kernel_mask(tiling) for factor in factors(mask))
    return operands[0] if len(operands) == 1 else Joined(operands=operands, is_union=False)


def backward_tiling(
    spec: AttentionSpec,
    sizes: backward.BackwardSizes,
    bounds: MaskBounds,
    list_block_size: int | None = None,
) -> KernelTiling:
    """Return the tiles in which a warpgroup of the dk/dv kernel evaluates a mask.

    Args:
        spec: Attention of the layer.
        sizes: Sizes of the kernel.
        bounds: Static bounds of the call.
        list_block_size: Queries per listed block, from packed_query_block_size; None lists tiles.
    """
    num_heads = spec.num_q_heads // bounds.rows_per_token, spec.num_kv_heads
    queries = sizes.tile_q if list_block_size is None else max(list_block_size, WORD_BITS)
    return KernelTiling(
        num_heads,
        queries,
        prefill.WARPGROUP_ROWS,
        bounds.max_seq_len,
        is_aligned=bounds.is_aligned and (list_block_size or queries) >= WORD_BITS,
        has_key_rows=True,
        needs_words=list_block_size is not None,
    )


def packed_query_block_size(
    mask: Mask,
    spec: AttentionSpec,
    sizes: backward.BackwardSizes,
    bounds: MaskBounds,
    *,
    num_query_tiles: int,
    num_key_tiles: int,
) -> int | None:
    """Return the queries per block of which tiles of the dk/dv kernel hold several.

    None if tiles are not larger than blocks, or if not all of the mask can be evaluated as words of bits.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality, from mask_of_rows.
        spec: Attention of the layer.
        sizes: Sizes of the kernel.
        bounds: Static bounds of the call.
        num_query_tiles: Number of tiles of queries of all requests.
        num_key_tiles: Number of tiles of keys of all requests.
    """
    num_lists = num_key_tiles * (spec.num_q_heads // bounds.rows_per_token)
    run_size = min(RUN_BLOCK_SIZES) if has_short_runs(mask) else 0
    size = _common_block_size(mask, 0, run_size)
    if not 0 < size < sizes.tile_q:
        return None
    for queries in backward.list_block_sizes(sizes):
        max_list = num_query_tiles * (sizes.tile_q // queries)
        if (
            size % (2 * queries)
            and max_list <= MAX_TILES
            and 4 * num_lists * max_list <= MAX_QUERY_LIST_BYTES
        ):
            tiling = backward_tiling(spec, sizes, bounds, queries)
            return queries if _has_words(mask, tiling) else None
    return None


def kernel_mask(mask: Mask, tiling: KernelTiling) -> KernelMask:
    """Return the mask that a kernel evaluates pair by pair: of a mask without arrays, its formula."""
    return Formula.of(mask, tiling) if mask.is_static else mask.kernel_mask(tiling)


def why_not_lists(mask: Mask, spec: AttentionSpec, sizes: PrefillSizes, bounds: MaskBounds) -> str | None:
    """Return why varlen_prefill does not support a mask; None if it does."""
    num = bounds.max_kv_tiles(sizes.tile_kv)
    if num > MAX_TILES:
        return f"tile lists of {num} tiles of {sizes.tile_kv} keys exceed the maximum of {MAX_TILES} tiles"
    pairs = split_factors(mask, sizes, bounds, sizes.tile_kv).pairs
    return None if pairs is None else pairs.why_no_kernel(kernel_tiling(spec, sizes, sizes.tile_kv, bounds))


def plan_mask(
    mask: Mask,
    spec: AttentionSpec,
    schedule: PrefillSchedule,
    sizes: PrefillSizes,
    bounds: MaskBounds,
    list_block_size: int | None = None,
) -> MaskPlan:
    """Build the tile lists and the pair mask of a call of varlen_prefill. Works inside jit.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality; why_not_lists must be None.
        spec: Attention of the layer.
        schedule: Schedule with the query tiles.
        sizes: Sizes of the kernel.
        bounds: Static bounds of the call.
        list_block_size: Number of keys per listed block, from packed_sizes; None lists tiles.
    """
    keys = list_block_size or sizes.tile_kv
    parts = split_factors(mask.for_kernels(), sizes, bounds, keys)
    query_tiles = _QueryTilePositions(schedule, spec, sizes, keys, bounds)
    numbers = spec.mask_of_numbers if parts.pairs is None else spec.mask_of_numbers & parts.pairs
    any_visible, all_visible = query_tiles.coverage(numbers, query_tiles.first, query_tiles.last)
    all_visible &= query_tiles.is_inside()[:, None, :]
    visible_by_block = []
    if parts.blocks is not None:
        for ends in query_tiles.blocks_of_queries(parts.block_q):
            block_visible = query_tiles.coverage(parts.blocks, *ends, is_inside_blocks=True).any_visible
            all_visible &= block_visible | (ends[1] < ends[0])[:, None, None]
            visible_by_block.append(block_visible)
        any_visible &= functools.reduce(operator.or_, visible_by_block)
    # Query tiles that share keys are processed one after another, so that the keys stay in L2, if enough
    # query tiles remain to keep all SMs busy.
    heads_per_tile = sizes.pack_gqa * bounds.rows_per_token
    per_kv_head = schedule.table.shape[0] * (spec.q_heads_per_kv_head // heads_per_tile)
    sets = spec.num_kv_heads if per_kv_head >= 2 * sizes.workers else 1
    codes = encode_tiles(any_visible, all_visible, visible_by_block)
    block_q = None if parts.block_q is None else parts.block_q * bounds.rows_per_token
    lists = make_tile_lists(schedule, codes, sets=sets, list_block_size=list_block_size, block_q=block_q)
    pair_mask = None
    if parts.pairs is not None:
        pairs = mask_of_rows(parts.pairs, bounds.rows_per_token)
        if list_block_size is None:
            pair_mask = kernel_mask(pairs, kernel_tiling(spec, sizes, keys, bounds))
        else:
            pair_mask = word_mask(pairs, block_tiling(spec, sizes, keys, bounds))
    return MaskPlan(lists=lists, pair_mask=pair_mask)


class PackedLens(NamedTuple):
    """Location of the requests' queries and packed keys: arguments of varlen_backward."""

    query_start_loc: jax.Array
    seq_lens: jax.Array
    kv_start_loc: jax.Array


def why_not_backward_lists(mask: Mask, spec: AttentionSpec, sizes: backward.BackwardSizes) -> str | None:
    """Return why varlen_backward does not support a mask; None if it does."""
    bounds = MaskBounds(0, is_aligned=False)
    reason, dq_sizes = mask.why_no_kernel(backward_tiling(spec, sizes, bounds)), sizes.dq_sizes
    if reason is not None or dq_sizes is None:
        return reason
    return mask.why_no_kernel(kernel_tiling(spec, dq_sizes, dq_sizes.tile_kv, bounds))


def backward_sizes(
    mask: Mask | None, spec: AttentionSpec, *, mean_len: int, rows_per_token: int = 1, gpu: str = "9.0"
) -> backward.BackwardSizes:
    """Return the sizes of varlen_backward for a layer.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        spec: Attention of the layer.
        mean_len: Mean number of queries per request.
        rows_per_token: Number of consecutive query rows of a token, see query_rows.py.
        gpu: Compute capability that the kernels are built for.
    """
    score, deterministic, blocks = score_of(spec), spec.deterministic, None
    if mask is not None and mask.skips_most_tiles:
        mean_len, blocks = 0, mask_blocks(mask, spec, rows_per_token)
    elif mask is not None and any(factor.has_isolated_slashes for factor in factors(mask)):
        # With columns among the slashes, most tiles are visited anyway, and larger tiles load less.
        size = min(RUN_BLOCK_SIZES)
        blocks = MaskBlocks(queries=(size,), keys=(size,))
    sizes = backward.default_layer_sizes(
        spec.head_dim, score, mean_len=mean_len, deterministic=deterministic, blocks=blocks, gpu=gpu
    )
    # Selections of blocks per token usually include the first block.
    has_common_keys = rows_per_token > 1 or (
        mask is not None and any(x.has_common_keys for x in leaves(mask))
    )
    if has_common_keys and sizes.dq_sizes is not None:
        return dataclasses.replace(sizes, list_splits=min(spec.q_heads_per_kv_head, MAX_LIST_SPLITS))
    return sizes


def plan_backward_mask(
    mask: Mask,
    spec: AttentionSpec,
    lens: PackedLens,
    schedule: backward.BackwardSchedule,
    *,
    sizes: backward.BackwardSizes,
    num_rows: int,
    max_seq_len: int,
    is_aligned: bool = False,
    rows_per_token: int = 1,
    packs_blocks: bool = True,
) -> tuple[backward.BackwardTileLists, backward.BackwardMask]:
    """Build the tile lists and the pair masks of a call of varlen_backward. Works inside jit.

    The query tiles of each KV tile are the transpose of the KV tiles of each query tile.

    Args:
        mask: Mask in addition to the spec's numbers; why_not_backward_lists must be None.
        spec: Attention of the layer.
        lens: Location of the rows of the requests' queries, and of the keys.
        schedule: Schedule with the KV tiles.
        sizes: Sizes of the kernel (static).
        num_rows: Number of rows of queries including padding (static).
        max_seq_len: Maximum number of tokens per request (static).
        is_aligned: See PackedKV (static).
        rows_per_token: Number of consecutive query rows of a token (static), see query_rows.py.
        packs_blocks: Whether tiles may hold several blocks of the mask (static).
    """
    mask = mask.for_kernels()
    bounds = MaskBounds(max_seq_len, is_aligned=is_aligned, rows_per_token=rows_per_token)
    row_mask = mask_of_rows(mask, rows_per_token)
    # Query tiles as large as the dk/dv kernel's, which do not depend on the score but on its rows per token.
    teams = 2 * prefill.WARPGROUP_ROWS // sizes.tile_q
    query_sizes = PrefillSizes(tile_kv=backward.keys_per_code(sizes), warpgroups=2, teams=teams)
    score = Score(scale=1.0, causal=spec.causal, rows_per_token=rows_per_token)
    tiles = prefill.make_schedule(*lens, num_tokens=num_rows, score=score, sizes=query_sizes, has_lists=True)
    queries = None
    if packs_blocks:
        counts = {"num_query_tiles": len(tiles.table), "num_key_tiles": len(schedule.table)}
        queries = packed_query_block_size(row_mask, spec, sizes, bounds, **counts)
    if queries is not None:
        tiles = _split_query_tiles(tiles, block_q=queries, blocks_per_tile=sizes.tile_q // queries)
    codes = packed_codes(mask, spec, tiles, query_sizes, bounds, queries)
    begins, ends = (tiles.table[:, COLUMNS.index(name)] for name in ("begin", "end"))
    query_tiles = backward.QueryTiles(tiles.first_tiles, begins, ends)
    lists = backward.make_tile_lists(
        schedule, query_tiles, codes, kv_heads=spec.num_kv_heads, sizes=sizes, list_block_size=queries
    )
    tiling, dq_mask = backward_tiling(spec, sizes, bounds, queries), None
    dkdv_mask = (kernel_mask if queries is None else word_mask)(row_mask, tiling)
    if sizes.dq_sizes is not None and schedule.dq_schedule is not None:
        # Several blocks per tile spill 124 bytes in tiles of 128 keys, for heads of 64, and 264 for heads of
        # 256. Four blocks of 16 keys spill 168 bytes for heads of 128, so blocks of 32 are listed.
        has_registers = sizes.dq_sizes.tile_kv == prefill.WARPGROUP_ROWS and spec.head_dim <= 128
        packs_blocks = packs_blocks and has_registers
        run_size = _run_block_size(mask, bounds) if sizes.teams > 1 else 0
        size = packed_block_size(mask, spec, sizes.dq_sizes, bounds, run_size) if packs_blocks else None
        size = None if size is None else max(size, WORD_BITS)
        dq_plan = plan_mask(mask, spec, schedule.dq_schedule, sizes.dq_sizes, bounds, size)
        lists, dq_mask = lists._replace(dq_lists=dq_plan.lists), dq_plan.pair_mask
    return lists, backward.BackwardMask(dkdv_mask, dq_mask)


def _split_query_tiles(schedule: PrefillSchedule, *, block_q: int, blocks_per_tile: int) -> PrefillSchedule:
    """Return the schedule with a tile for each block of `block_q` queries of each query tile."""
    table = jnp.repeat(schedule.table, blocks_per_tile, axis=0)
    first_row = jnp.arange(len(table), dtype=jnp.int32) % blocks_per_tile * block_q
    for name in ("first_row", "position"):
        table = table.at[:, COLUMNS.index(name)].add(first_row)
    for name in ("begin", "end"):
        column = COLUMNS.index(name)
        table = table.at[:, column].set(jnp.clip(table[:, column] - first_row, 0, block_q))
    return schedule._replace(table=table, first_tiles=schedule.first_tiles * blocks_per_tile)


def packed_codes(
    mask: Mask,
    spec: AttentionSpec,
    schedule: PrefillSchedule,
    sizes: PrefillSizes,
    bounds: MaskBounds,
    queries: int | None = None,
) -> UInt[Array, "q_tiles q_heads kv_tiles"]:
    """Return the bits of `encode_tiles` for each query tile and packed KV tile; see plan_mask.

    Tiles have `queries` queries, or the number of the sizes if it is None.
    """
    query_tiles = _QueryTilePositions(schedule, spec, sizes, sizes.tile_kv, bounds, queries)
    any_visible, all_visible = query_tiles.coverage(
        spec.mask_of_numbers & mask, query_tiles.first, query_tiles.last
    )
    return encode_tiles(any_visible, all_visible & query_tiles.is_inside()[:, None, :])


class _QueryTilePositions:
    """Positions of the first and last query of each query tile of a schedule.

    Positions are negative where a request has more queries than keys. `keys` is the number of keys per list
    entry.
    """

    def __init__(
        self,
        schedule: PrefillSchedule,
        spec: AttentionSpec,
        sizes: PrefillSizes,
        keys: int,
        bounds: MaskBounds,
        queries: int | None = None,
    ) -> None:
        column = {name: schedule.table[:, i] for i, name in enumerate(COLUMNS)}
        rows = bounds.rows_per_token  # tiles and listed blocks hold all rows of a token
        self.first = floor_div(column["position"] + column["begin"], rows)
        self.last = floor_div(column["position"] + column["end"] - 1, rows)
        self._rows, self._seq_lens = column["req"], column["seq_len"]
        self._alignment_offset = None if bounds.is_aligned else column["kv_start"] % ALIGN
        self._max_kv_tiles = bounds.max_kv_tiles(keys)
        self._spec, self._is_prefill = spec, bounds.is_prefill
        self._size = (queries or sizes.tile_tokens) // rows, keys
        self._pack_gqa = sizes.pack_gqa * rows

    def coverage(self, mask: Mask, first: Any, last: Any, *, is_inside_blocks: bool = False) -> Coverage:
        """Return how much of each KV tile is visible to the queries from first to last."""
        return tile_coverage(
            mask,
            rows=self._rows,
            first_query=first,
            num_queries=last - first + 1,
            seq_lens=self._seq_lens,
            num_heads=(self._spec.num_q_heads, self._spec.num_kv_heads),
            pack_gqa=self._pack_gqa,
            size=self._size,
            max_kv_tiles=self._max_kv_tiles,
            alignment_offset=self._alignment_offset,
            is_prefill=self._is_prefill,
            is_inside_blocks=is_inside_blocks,
        )

    def blocks_of_queries(self, block_q: int | None) -> list[tuple[Any, Any]]:
        """Return the first and last query of each query block that a tile may touch; one block if None."""
        if block_q is None:
            return [(self.first, self.last)]
        begins = [
            (self.first // block_q + index) * block_q
            for index in range(num_query_blocks(self._size[0], block_q))
        ]
        return [(jnp.maximum(x, self.first), jnp.minimum(x + (block_q - 1), self.last)) for x in begins]

    def is_inside(self) -> Any:
        """Return which KV tiles lie entirely within the request's keys: [query tiles, max_kv_tiles]."""
        tile_kv = self._size[1]
        first_key = jnp.arange(self._max_kv_tiles, dtype=jnp.int32)[None, :] * tile_kv
        if self._alignment_offset is not None:
            first_key = first_key - self._alignment_offset[:, None]
        return (first_key >= 0) & (first_key + tile_kv <= self._seq_lens[:, None])
