"""Static tile sizes of the prefill kernel, and how they are chosen."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.architectures import ARCHITECTURES, NUM_SMS
from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.ptx.warp_mma import WARPS
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.score import Score

PACK_GQA_CHOICES = (1, 2, 4, 8)  # each head keeps a multiple of 8 rows, the unit in which TMA fills tiles
MAX_SPLITS = 16
SHARED_MEMORY = 221 * 1024  # bytes per thread block, without column indices, barriers and reductions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSizes:
    """Static sizes of one prefill kernel.

    Attributes:
        tile_kv: Number of keys per main-loop step: 64 or 128.
        stages: Number of pipeline stages of keys and values per team, at least 2; at least 1 with
            per_warp_mma.
        warpgroups: Number of computing warpgroups: 2 or 3; 1 or 2 with per_warp_mma.
        teams: Number of teams that the warpgroups form: 1, or one per warpgroup. The warpgroups of a team
            share work tiles and pipeline stages.
        query_buffers: Number of query buffers in shared memory: 1 or 2. The output of a work tile replaces
            its queries.
        ctas: Number of thread blocks of the persistent grid.
        batch_invariant: Whether a row's bits are independent of the other rows of its tile, even if a window
            or tile lists mask the tile's first keys for it.
        pack_gqa: Query heads of one KV head that are packed into one query tile, which then holds that many
            fewer tokens (FlashAttention's pack_gqa): 1, 2, 4 or 8. It fills the tiles of short requests. With
            tile lists the packed heads share a list, and a tile holds the queries of fewer blocks.
        max_splits: Maximum number of KV splits per query tile (FlashAttention's num_splits), at most
            MAX_SPLITS. Splits keep all thread blocks busy when few query tiles attend to many keys. Must be 1
            with tile lists. The number chosen, and so a row's last bits, depends on all rows of a step.
        per_warp_mma: Whether each warp multiplies its query rows by mma.sync and loads by cp.async, which
            every GPU since Ampere has; see warp_kernel.py. Otherwise the warpgroups multiply by wgmma, and
            another one loads by TMA. Requires teams=1 and query_buffers=1.
        warp_rows: Number of query rows per warp: 16, or 32 with per_warp_mma. With 32 rows a warp uses each
            key and value that it loads from shared memory twice.
        gpu: Compute capability that the kernel is built for, one of architectures.ARCHITECTURES.
        team_size: Number of warpgroups that share one query tile.
        warpgroup_rows: Number of query rows per warpgroup.
        tile_q: Number of query rows per tile.
        tile_tokens: Number of tokens per tile: its rows divided by the number of packed heads.
        warpgroup_tokens: Number of tokens per warpgroup, whose rows hold the tokens of one packed head after
            the other.
        workers: Number of teams in the grid.
    """

    tile_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    teams: int = 1
    query_buffers: int = 2
    ctas: int = NUM_SMS
    batch_invariant: bool = False
    pack_gqa: int = 1
    max_splits: int = 1
    per_warp_mma: bool = False
    warp_rows: int = WARPGROUP_ROWS // WARPS
    gpu: str = "9.0"
    team_size: int = dataclasses.field(init=False, repr=False)
    warpgroup_rows: int = dataclasses.field(init=False, repr=False)
    tile_q: int = dataclasses.field(init=False, repr=False)
    tile_tokens: int = dataclasses.field(init=False, repr=False)
    warpgroup_tokens: int = dataclasses.field(init=False, repr=False)
    workers: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        is_per_warp = self.per_warp_mma
        require_one_of("warpgroups", self.warpgroups, (1, 2) if is_per_warp else (2, 3))
        require_one_of("teams", self.teams, (1,) if is_per_warp else (1, self.warpgroups))
        require_one_of("query_buffers", self.query_buffers, (1,) if is_per_warp else (1, 2))
        require_one_of("warp_rows", self.warp_rows, (16, 32) if is_per_warp else (16,))
        require_one_of("pack_gqa", self.pack_gqa, PACK_GQA_CHOICES)
        require_positive(stages=self.stages, ctas=self.ctas, max_splits=self.max_splits)
        require(self.max_splits <= MAX_SPLITS, "max_splits", f"be at most {MAX_SPLITS}", self.max_splits)
        require(self.stages >= 2 or is_per_warp, "stages", "be at least 2", self.stages)
        require_one_of("gpu", self.gpu, tuple(ARCHITECTURES))
        require(
            is_per_warp or ARCHITECTURES[self.gpu].has_wgmma, "per_warp_mma", "be True without wgmma", False
        )
        is_invariant = self.max_splits == 1 or not self.batch_invariant
        require(is_invariant, "max_splits", "be 1 with batch_invariant", self.max_splits)
        team_size, warpgroup_rows = self.warpgroups // self.teams, WARPS * self.warp_rows
        vars(self).update(
            team_size=team_size,
            warpgroup_rows=warpgroup_rows,
            tile_q=team_size * warpgroup_rows,
            tile_tokens=team_size * warpgroup_rows // self.pack_gqa,
            warpgroup_tokens=warpgroup_rows // self.pack_gqa,
            workers=self.ctas * self.teams,
        )

    def shared_memory(self, width: int, *, is_quantized: bool = False) -> int:
        """Return the bytes of shared memory that heads of `width` elements need.

        Args:
            width: Padded head_dim.
            is_quantized: Whether the cache is 8-bit, which needs stages for the quantized tiles as well.
        """
        query = 2 * self.warpgroups * self.warpgroup_rows * width * self.query_buffers
        return query + self.teams * self.stages * 2 * (2 + is_quantized) * self.tile_kv * width


# Padded head_dim -> the fastest sizes on an H200 over all rows of `python -m benchmarks tune prefill`. With
# three warpgroups a thread has 160 registers: enough for heads of 64 with 128 keys or heads of 128 with 64
# keys, but not for wider heads.
TABLE = {
    64: PrefillSizes(tile_kv=128, stages=3, warpgroups=3),
    128: PrefillSizes(tile_kv=64, stages=3, warpgroups=3),
    192: PrefillSizes(tile_kv=64, stages=3, query_buffers=1),
    256: PrefillSizes(tile_kv=64, stages=2, query_buffers=1),
}
# Sizes without wgmma in the order of preference: query rows per warp, warpgroups, and thread blocks per SM.
# Tiles have 64 keys, and one stage: a thread block loads values while it multiplies keys, and the reverse.
# With 32 rows per warp the tensor cores, and not the bandwidth of shared memory, limit products of heads of
# 128. Two thread blocks wait at different times: one multiplies while the other computes exponentials. For 1
# x 8k tokens and heads of 128 an H100 takes 1,362 us with the first sizes, 1,400 with two stages, 1,721 with
# the second sizes, and 2,071 with the third ones and two stages; for heads of 192 1,280 us with the second
# sizes and 1,457 with the third ones and two stages.
WARP_TABLE = ((32, 1, 2), (16, 1, 2), (16, 2, 1), (16, 1, 1))
MAX_WARP_ELEMENTS = 32 * 128  # elements of a warp's accumulators: 128 registers per thread
COLUMN_BYTES = 1024  # shared memory of column indices, as Pallas aligns it
CTA_BYTES = 1024  # shared memory that CUDA takes for itself, per thread block
# Sizes for tile lists: block masks have blocks of 64 or 128 queries, which tiles of 192 would cut.
LIST_TABLE = {
    64: PrefillSizes(tile_kv=128, stages=4),
    128: PrefillSizes(tile_kv=128, stages=2),
    192: PrefillSizes(tile_kv=64, stages=2),
    256: PrefillSizes(tile_kv=64, stages=2, query_buffers=1),
}
# Sizes for small batches, each with the time of a main-loop step of 64 keys in us, all rows valid. Packing
# heads fills small batches' tiles better: 64 tokens after 64k cached ones take 128 us instead of 164, 8 x 64
# after 16k 228 instead of 345, 512 after 64k 769 instead of 796 (prefill-heads). With many queries the tiles
# that share keys drift apart, and 4 x 2k after 14k take 2,869 us instead of 2,778.
SMALL_BATCH_TABLE = {128: ((TABLE[128], 1.10), (LIST_TABLE[128], 0.84))}
# Below this many tokens per request, the bound on requests is taken to be a bound only: engines reserve one
# request per token.
MIN_TOKENS_PER_REQ = 16
# Sizes for an 8-bit cache: two warpgroups dequantize, and two compute.
QUANTIZED_TABLE = {64: PrefillSizes(tile_kv=128, stages=3), 128: PrefillSizes(tile_kv=64, stages=3)}
# Maximum number of query rows per request and KV head for which the kernel dequantizes keys itself, once per
# query tile, instead of having the cache dequantized to 16 bits first. With fp8 an H200 takes 308 to 315 us
# for 256 rows (8 x 64 tokens after 16k) in the kernel and 460 dequantized first (prefill-narrow), and 315 and
# 334 for 512 rows (1 x 128 after 64k); an H100, whose memory is slower, takes 615 and 664, or 607 and 618,
# for 1,024 rows (prefill-narrow-crossing). Formats that cost more to dequantize have a lower limit: int8 with
# a scale per token and head takes 381 and 362 us for 512 rows, 746 and 610 for 1,024. int8 with a scale per
# head and fp8 with scales per token were not timed and have int8's limit.
MAX_DEQUANTIZED_ROWS, MAX_COSTLY_DEQUANTIZED_ROWS = 512, 256
# With fewer keys splits do not pay: a split and the combine kernel cost as much as 10 to 12 tiles of 64 keys.
MIN_KV_TO_SPLIT = 4096
# Default limit for pack_gqa: 8 spills up to 460 bytes with ALiBi and sinks, and was not timed with splits.
MAX_PACKED_HEADS = 4
MAX_ESTIMATED_SPLITS = 8  # more splits cost what they save
# With more work tiles per thread block than this, the last round is a small part of the whole.
SMALL_BATCH_TILES_PER_CTA = 2


class MaskBlocks(NamedTuple):
    """The blocks of a mask, which tiles should not cut.

    Attributes:
        queries: Queries per block, of each block mask.
        keys: Keys per block, likewise.
        has_isolated_slashes: Whether the mask has diagonals that few tiles share.
        shared_heads: Number of consecutive query heads of a KV head that certainly attend to the same blocks,
            one of PACK_GQA_CHOICES.
    """

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    has_isolated_slashes: bool = False
    shared_heads: int = 1


class CallBounds(NamedTuple):
    """Static bounds of a call over a paged cache, without tile lists.

    Attributes:
        num_tokens: Maximum number of query tokens of all requests.
        reqs: Maximum number of requests.
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        max_kv: Maximum number of keys that a query tile attends to.
    """

    num_tokens: int
    reqs: int
    q_heads: int
    kv_heads: int
    max_kv: int

    @property
    def estimated_reqs(self) -> int:
        """Number of requests, or 1 if `reqs` is so large that it is only a bound."""
        return self.reqs if 0 < MIN_TOKENS_PER_REQ * self.reqs <= self.num_tokens else 1

    def limited_by(self, score: Score) -> "CallBounds":
        """Return the bounds with max_kv limited to the window or chunk of a layer."""
        max_visible = score.max_visible_keys(3 * WARPGROUP_ROWS)
        return self if max_visible is None else self._replace(max_kv=min(max_visible, self.max_kv))


def default_sizes(
    head_dim: int,
    *,
    has_lists: bool = False,
    batch_invariant: bool = False,
    bounds: CallBounds | None = None,
    is_quantized: bool = False,
    blocks: MaskBlocks | None = None,
    gpu: str = "9.0",
) -> PrefillSizes:
    """Return the default sizes of varlen_prefill.

    Those of compute capability 9.0 were measured on an H200. Those of other architectures are estimated.

    Args:
        head_dim: Width of a head.
        has_lists: Whether the call has tile lists.
        batch_invariant: See PrefillSizes.
        bounds: Bounds of the call, from which small batches get packed heads and KV splits; None for neither.
        is_quantized: Whether the cache is 8-bit.
        blocks: Blocks of the mask with tile lists: tiles are no larger if possible; None for no blocks.
        gpu: Compute capability that the kernel is built for.

    Raises:
        ValueError: If an 8-bit cache is combined with tile lists or batch_invariant.
    """
    padded_dim = head_chunks(head_dim).padded_dim
    if not ARCHITECTURES[gpu].has_wgmma:
        sizes = _estimate_sizes(gpu, padded_dim, () if blocks is None else blocks.queries, batch_invariant)
        if bounds is None or has_lists or batch_invariant or not is_small_batch(sizes, bounds):
            return sizes
        return _small_batch_sizes(sizes, bounds)
    if is_quantized:
        require(not has_lists, "has_lists", "be False with an 8-bit KV cache", has_lists)
        require(not batch_invariant, "batch_invariant", "be False with an 8-bit KV cache", batch_invariant)
        sizes = QUANTIZED_TABLE[padded_dim]
        if bounds is None or not is_small_batch(TABLE[padded_dim], bounds):
            return sizes
        return _small_batch_sizes(sizes, bounds)
    sizes = (LIST_TABLE if has_lists else TABLE)[padded_dim]
    if batch_invariant:
        sizes = dataclasses.replace(sizes, batch_invariant=True)
    if blocks is not None:
        return _sizes_for_blocks(sizes, blocks)
    if batch_invariant:
        return sizes
    if bounds is None or has_lists or not is_small_batch(sizes, bounds):
        return sizes
    # Choose the tile height that finishes all keys soonest if the requests are alike.
    candidates = SMALL_BATCH_TABLE.get(padded_dim, ((sizes, 1.0),))
    choices = [(_small_batch_sizes(candidate, bounds), step_us) for candidate, step_us in candidates]
    return min(choices, key=lambda choice: choice[1] * _num_passes(bounds, choice[0]))[0]


def _estimate_sizes(
    gpu: str, padded_dim: int, mask_blocks: Sequence[int], batch_invariant: bool
) -> PrefillSizes:
    """Return sizes for an architecture without wgmma: the first of WARP_TABLE that fit.

    Args:
        gpu: Compute capability.
        padded_dim: Padded head_dim.
        mask_blocks: Queries per block of a mask. Tiles do not cut them, unless they are smaller than 64.
        batch_invariant: See PrefillSizes.
    """
    architecture = ARCHITECTURES[gpu]
    cuts_blocks = any(block % (2 * WARPGROUP_ROWS) != 0 for block in mask_blocks)
    for warp_rows, warpgroups, ctas_per_sm in WARP_TABLE:
        sizes = PrefillSizes(
            tile_kv=64,
            stages=1,
            warpgroups=warpgroups,
            query_buffers=1,
            ctas=ctas_per_sm * architecture.num_sms,
            batch_invariant=batch_invariant,
            per_warp_mma=True,
            warp_rows=warp_rows,
            gpu=gpu,
        )
        num_bytes = sizes.shared_memory(padded_dim) + COLUMN_BYTES + CTA_BYTES
        fits = ctas_per_sm * num_bytes <= architecture.smem_bytes + CTA_BYTES
        has_registers = warp_rows * padded_dim <= MAX_WARP_ELEMENTS
        if fits and has_registers and not (cuts_blocks and sizes.tile_q > WARPGROUP_ROWS):
            return sizes
    raise AssertionError(f"no sizes for {padded_dim} elements per head on {gpu}")


def check_quantized(sizes: PrefillSizes, padded_dim: int) -> None:
    """Raise ValueError if the sizes leave no warpgroups or shared memory to dequantize an 8-bit cache."""
    max_tile_kv = QUANTIZED_TABLE[padded_dim].tile_kv
    for name, limit in (("warpgroups", 2), ("teams", 1), ("tile_kv", max_tile_kv)):
        value = getattr(sizes, name)
        require(value <= limit, name, f"be at most {limit} with an 8-bit KV cache", value)
    if sizes.shared_memory(padded_dim, is_quantized=True) > SHARED_MEMORY:
        raise ValueError(
            f"stages={sizes.stages} leaves no shared memory for the tiles of an 8-bit KV cache. "
            "Reduce stages or tile_kv."
        )


def is_small_batch(sizes: PrefillSizes, bounds: CallBounds) -> bool:
    """Return whether the queries are so few, and the keys so many, that KV splits may pay."""
    num_work_tiles = -(-bounds.num_tokens // sizes.tile_q) * bounds.q_heads
    return num_work_tiles <= SMALL_BATCH_TILES_PER_CTA * sizes.ctas and bounds.max_kv >= MIN_KV_TO_SPLIT


def should_dequantize_in_kernel(
    head_dim: int, bounds: CallBounds, *, kv_dtypes: tuple[DTypeLike, DTypeLike], has_token_scales: bool
) -> bool:
    """Return whether the prefill kernel should dequantize an 8-bit cache itself.

    Args:
        head_dim: Width of a head.
        bounds: Bounds of the call.
        kv_dtypes: Dtypes of the stored keys and values.
        has_token_scales: Whether keys or values have a scale per token.
    """
    rows = -(-bounds.num_tokens // bounds.estimated_reqs) * (bounds.q_heads // bounds.kv_heads)
    is_costly = has_token_scales or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in kv_dtypes)
    return is_small_batch(TABLE[head_chunks(head_dim).padded_dim], bounds) and rows <= (
        MAX_COSTLY_DEQUANTIZED_ROWS if is_costly else MAX_DEQUANTIZED_ROWS
    )


def _sizes_for_blocks(sizes: PrefillSizes, blocks: MaskBlocks) -> PrefillSizes:
    """Return the sizes with tiles that are no larger than the blocks of a mask, if there are such.

    Heads that share the mask are packed: a tile of the queries of one block reads no keys in vain, and 128
    rows read the keys half as often as 64.
    """
    packed = dataclasses.replace(sizes, pack_gqa=_heads_per_tile(sizes.tile_q, blocks))
    if sizes.tile_kv != 128:
        return packed
    # Isolated slashes cross fewer tiles of 64 x 64 than of 128 x 128: at 16k tokens they take 1,833 us and
    # 2,528 us. For contiguous slashes the smaller tiles take 3 to 5 % longer.
    if blocks.has_isolated_slashes or any(block % packed.tile_tokens != 0 for block in blocks.queries):
        pack_gqa = _heads_per_tile(WARPGROUP_ROWS, blocks)
        return dataclasses.replace(sizes, tile_kv=64, teams=sizes.warpgroups, pack_gqa=pack_gqa)
    if any(block % sizes.tile_kv != 0 for block in blocks.keys):
        return dataclasses.replace(packed, tile_kv=64, stages=2 * sizes.stages)
    return packed


def _heads_per_tile(rows: int, blocks: MaskBlocks) -> int:
    """Return the number of heads to pack into a tile so that its tokens span as few query blocks as possible.

    Args:
        rows: Number of query rows per tile.
        blocks: Blocks of the mask.
    """
    block = min(blocks.queries, default=rows)
    return max(
        num
        for num in PACK_GQA_CHOICES
        if num == 1 or (blocks.shared_heads % num == 0 and num * block <= rows)
    )


def _small_batch_sizes(sizes: PrefillSizes, bounds: CallBounds) -> PrefillSizes:
    """Return the sizes with KV splits enabled and as many packed heads as the group allows."""
    group = bounds.q_heads // bounds.kv_heads
    pack_gqa = max(n for n in PACK_GQA_CHOICES if group % n == 0 and n <= MAX_PACKED_HEADS)
    return dataclasses.replace(sizes, pack_gqa=pack_gqa, max_splits=MAX_SPLITS)


def _num_passes(bounds: CallBounds, sizes: PrefillSizes) -> float:
    """Return how often a thread block passes over a whole request's keys if the requests are alike."""
    reqs = bounds.estimated_reqs
    num_tiles = -(-bounds.num_tokens // (reqs * sizes.tile_tokens)) * reqs
    num_work_tiles = num_tiles * bounds.q_heads // sizes.pack_gqa
    return min(
        -(-num_work_tiles * splits // sizes.workers) / splits for splits in range(1, MAX_ESTIMATED_SPLITS + 1)
    )
