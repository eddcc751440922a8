"""Static sizes of the decode kernel."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.architectures import ARCHITECTURES, NUM_SMS
from pallas_kernels.checks import require, require_one_of, require_positive, unsupported
from pallas_kernels.ptx.warp_mma import WARPS
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.support import why_not_head_dim

MAX_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """Static sizes of one decode kernel.

    Attributes:
        tile_kv: Number of keys per tile: 64 or 128.
        stages: Number of tiles of keys and values in flight from global memory.
        ctas: Maximum number of thread blocks of the grid. Thread blocks are persistent: a number above what
            fits the SMs at once has no benefit.
        max_rows: Maximum number of query rows (query heads per KV head times decode_query_len) per tile; a
            multiple of 8. More rows are split into several tiles.
        split_kv: Number of keys per split, a multiple of tile_kv, if splits are fixed. Then the bits of a
            request's result do not depend on the other requests. None = the schedule splits requests to
            balance the load.
        per_warp_mma: Whether each warp computes separate matrix products (WarpMma) instead of one product per
            warpgroup (WarpgroupMma). Requires tile_kv=64.
        gpu: Compute capability that the kernel is built for, one of architectures.ARCHITECTURES.
        uses_tma: Whether a loader warp fills the stages by TMA. Otherwise the consumer does, by cp.async, and
            per_warp_mma must be True.
        keys_per_unit: Number of keys per unit of the schedule: those of a fixed split, or of a tile.
    """

    tile_kv: int = 64
    stages: int = 3
    ctas: int = NUM_SMS
    max_rows: int = MAX_ROWS
    split_kv: int | None = None
    per_warp_mma: bool = False
    gpu: str = "9.0"
    uses_tma: bool = True
    keys_per_unit: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        require_positive(stages=self.stages, ctas=self.ctas)
        is_max_rows_valid = self.max_rows % 8 == 0 and 0 < self.max_rows <= MAX_ROWS
        require(is_max_rows_valid, "max_rows", f"be a multiple of 8 up to {MAX_ROWS}", self.max_rows)
        is_split_kv_valid = self.split_kv is None or (self.split_kv > 0 and self.split_kv % self.tile_kv == 0)
        require(
            not self.per_warp_mma or self.tile_kv == 64, "tile_kv", "be 64 with per_warp_mma", self.tile_kv
        )
        require(is_split_kv_valid, "split_kv", f"be a multiple of tile_kv ({self.tile_kv})", self.split_kv)
        require_one_of("gpu", self.gpu, tuple(ARCHITECTURES))
        architecture = ARCHITECTURES[self.gpu]
        is_multiplied = self.per_warp_mma or (self.uses_tma and architecture.has_wgmma)
        require(is_multiplied, "per_warp_mma", "be True without wgmma or TMA", self.per_warp_mma)
        is_loaded = architecture.has_tma or not self.uses_tma
        require(is_loaded, "uses_tma", f"be False on compute capability {self.gpu}", self.uses_tma)
        vars(self).update(keys_per_unit=self.split_kv or self.tile_kv)

    @property
    def schedule_sizes(self) -> tuple[int, ...]:
        """Sizes that a schedule depends on. Calls with equal values can share a schedule."""
        return self.tile_kv, self.split_kv or 0, self.ctas, self.max_rows

    def row_tiles(self, rows: int) -> tuple[int, int]:
        """Return the number of tiles that hold `rows` query rows, and the rows of a tile, a multiple of 8."""
        tile_q = min(-(-rows // 8) * 8, self.max_rows)
        return -(-rows // tile_q), tile_q


# (head width, query rows per tile): rows for heads up to this width.
MAX_ROWS_BY_WIDTH = ((64, MAX_ROWS), (256, 32))
EIGHT_BIT_MAX_ROWS_BY_WIDTH = ((64, MAX_ROWS), (128, 32), (192, 16), (320, 8))
# Elements of an accumulator (head width times rows) that fit the registers of a warp.
MAX_WARP_ACCUMULATOR = 2048
# Query rows per tile of WarpMma on other GPUs than Hopper: with 32, a kernel with ALiBi spills on 12.0.
MAX_WARP_ROWS = 24
# Bytes that an SM should have in flight, and stages per thread block. More is slower: on an H200, 64 requests
# of 4k keys in bf16 take 247.2 us, and 252.5 us with 192 KB.
BYTES_IN_FLIGHT, MAX_STAGES = 96 * 1024, 4
# With lists: 64 requests of 32k keys, a quarter of the blocks of 16, take 273 us in fp8 and 279 us with 96
# KB; in 16 bits 493 us with two thread blocks of 64 KB per SM and 502 us with one of 96 KB.
LISTS_BYTES_IN_FLIGHT = 64 * 1024
# Shared memory that each thread block reserves, and at most loses to alignment and barriers.
RESERVED_BYTES, ALIGNMENT_BYTES = 1024, 2048


def default_sizes(
    head_dim: int,
    *,
    rows: int,
    kv_dtypes: tuple[DTypeLike, DTypeLike] = ("bfloat16", "bfloat16"),
    batch_invariant: bool = False,
    list_block_size: int | None = None,
    gpu: str = "9.0",
) -> DecodeSizes:
    """Return the default sizes for a head_dim.

    The sizes for 64 and 128 on compute capability 9.0 were measured on an H200. Those of other architectures
    are estimated.

    Args:
        head_dim: Number of elements per head.
        rows: Number of query rows per KV head.
        kv_dtypes: Dtypes of the keys and of the values in the cache.
        batch_invariant: Whether the bits of a request's result must not depend on its batch.
        list_block_size: Number of keys per sparse block if lists select the keys; None without lists.
        gpu: Compute capability that the kernel is built for.

    Raises:
        NotImplementedError: If the kernel does not support this head_dim with these dtypes.
    """
    reason = why_not_head_dim(head_dim, kv_dtypes)
    if reason is not None:
        raise unsupported("paged_decode", reason, "Call jattn.attend with implementation='xla'")
    itemsizes = [jnp.dtype(dtype).itemsize for dtype in kv_dtypes]
    is_quantized = min(itemsizes) == 1
    width = head_chunks(head_dim, itemsize=min(itemsizes)).padded_dim
    split_kv, has_lists = 2048 if batch_invariant else None, list_block_size is not None
    is_small, has_tma = is_quantized or has_lists, ARCHITECTURES[gpu].has_tma and list_block_size != 1
    if not (ARCHITECTURES[gpu].has_wgmma and has_tma):
        return _estimate_sizes(gpu, width, rows, itemsizes, split_kv, is_small=is_small, has_tma=has_tma)
    # With more rows of wider heads, registers spill when every feature is on.
    rows_by_width = EIGHT_BIT_MAX_ROWS_BY_WIDTH if is_quantized else MAX_ROWS_BY_WIDTH
    max_rows = next(count for max_width, count in rows_by_width if width <= max_width)
    tile_rows = min(-(-rows // 8) * 8, max_rows)
    # Warps that do not wait for each other save 1 % in 16 bits (measured up to 16 rows), a third to a half in
    # 8.
    per_warp_mma = width * tile_rows <= MAX_WARP_ACCUMULATOR and (is_quantized or tile_rows <= 16)
    ctas_per_sm = 2 if _fits_two(width, rows, is_small=is_small) else 1
    bytes_in_flight = LISTS_BYTES_IN_FLIGHT if has_lists else BYTES_IN_FLIGHT
    tile_kv = 64
    stage_bytes = tile_kv * width * sum(itemsizes)
    return DecodeSizes(
        tile_kv=tile_kv,
        stages=min(max(bytes_in_flight // ctas_per_sm // stage_bytes, 2), MAX_STAGES),
        ctas=ctas_per_sm * NUM_SMS,
        max_rows=max_rows,
        split_kv=split_kv,
        per_warp_mma=per_warp_mma,
        gpu=gpu,
    )


def _fits_two(width: int, rows: int, *, is_small: bool) -> bool:
    """Return whether the registers of an SM hold two thread blocks with a loader.

    Tiles of few bytes need two, or memory idles during the softmax. With more rows, or wider heads in 8 bits,
    only one fits: it takes over 128 registers per thread.
    """
    return width * max(rows, 8) <= 1024 if is_small else width <= 64 and rows <= 32


def _estimate_sizes(
    gpu: str,
    width: int,
    rows: int,
    itemsizes: Sequence[int],
    split_kv: int | None,
    *,
    is_small: bool,
    has_tma: bool,
) -> DecodeSizes:
    """Return sizes for an architecture without wgmma, or for loads without TMA: nothing was measured.

    An SM should have as many bytes in flight as its share of the memory bandwidth requires, in proportion to
    BYTES_IN_FLIGHT, which was measured on an H200; and shared memory must hold them. Two stages and then two
    thread blocks per SM are preferred.

    Args:
        gpu: Compute capability.
        width: Elements of a head in shared memory.
        rows: Number of query rows per KV head.
        itemsizes: Bytes per element of keys and of values.
        split_kv: `DecodeSizes.split_kv`.
        is_small: Whether tiles have few bytes, because they are quantized or listed.
        has_tma: Whether TMA can load the keys.
    """
    architecture, tile_kv = ARCHITECTURES[gpu], 64
    max_rows = min(max(MAX_WARP_ACCUMULATOR // width // 8 * 8, 8), MAX_WARP_ROWS)
    tile_rows = min(-(-rows // 8) * 8, max_rows)
    bytes_in_flight = architecture.bytes_in_flight(BYTES_IN_FLIGHT)
    queries_bytes, outputs_bytes = 2 * width * tile_rows, 4 * WARPS * (width + 2) * tile_rows
    stage_bytes = tile_kv * (width * sum(itemsizes) + 8)  # with scales per token
    options = [(uses_tma, ctas, stages) for stages in (2, 1) for uses_tma in (True, False) for ctas in (2, 1)]
    for uses_tma, ctas_per_sm, min_stages in options:
        # A thread block without a loader has half as many threads, so that registers hold two.
        fits_registers = ctas_per_sm == 1 or not uses_tma or _fits_two(width, tile_rows, is_small=is_small)
        if not fits_registers or (uses_tma and not has_tma):
            continue
        cta_bytes = (architecture.smem_bytes + RESERVED_BYTES) // ctas_per_sm - RESERVED_BYTES
        available = cta_bytes - ALIGNMENT_BYTES
        # Without TMA the outputs take the place of queries and stages.
        fixed_bytes = 2 * queries_bytes + outputs_bytes if uses_tma else queries_bytes
        max_stages = (available - fixed_bytes) // stage_bytes
        if max_stages < min_stages or outputs_bytes > available:
            continue
        needed_stages = max(bytes_in_flight // ctas_per_sm // stage_bytes, min_stages)
        return DecodeSizes(
            tile_kv=tile_kv,
            stages=min(needed_stages, max_stages, MAX_STAGES),
            ctas=ctas_per_sm * architecture.num_sms,
            max_rows=max_rows,
            split_kv=split_kv,
            per_warp_mma=True,
            gpu=gpu,
            uses_tma=uses_tma,
        )
    raise AssertionError(f"no sizes for {width} elements per head on {gpu}")
