"""The sizes that the decode kernel is compiled for."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import require, require_one_of, require_positive, unsupported
from pallas_kernels.shared.head_dims import head_chunks
from pallas_kernels.support import NUM_SMS, why_not_head_dim

MAX_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """Static sizes of one decode kernel.

    Attributes:
        tile_kv: Keys of a step: 64 or 128.
        stages: Steps in flight from global memory.
        ctas: Thread blocks of the whole grid, at most; they stay resident, so more than fit an SM only queue.
        max_rows: Query rows (query heads of a kv head x decode_query_len) worked on together; more are cut.
        split_kv: Keys of a split where it is fixed, so that a request's bits do not depend on its batch; a
            multiple of tile_kv. None = splits follow the load.
        per_warp_mma: Each warp multiplies for itself (WarpMma), not the warpgroup together (WarpgroupMma);
            tile_kv is 64 then.
    """

    tile_kv: int = 64
    stages: int = 3
    ctas: int = NUM_SMS
    max_rows: int = MAX_ROWS
    split_kv: int | None = None
    per_warp_mma: bool = False

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        require_positive(stages=self.stages, ctas=self.ctas)
        rows_ok = self.max_rows % 8 == 0 and 0 < self.max_rows <= MAX_ROWS
        require(rows_ok, "max_rows", f"be a multiple of 8 up to {MAX_ROWS}", self.max_rows)
        split_ok = self.split_kv is None or (self.split_kv > 0 and self.split_kv % self.tile_kv == 0)
        require(
            not self.per_warp_mma or self.tile_kv == 64, "tile_kv", "be 64 with per_warp_mma", self.tile_kv
        )
        require(split_ok, "split_kv", f"be a multiple of tile_kv ({self.tile_kv})", self.split_kv)

    @property
    def spans(self) -> tuple[int, ...]:
        """What a schedule depends on: calls that agree in it may share one."""
        return self.tile_kv, self.split_kv or 0, self.ctas, self.max_rows

    @property
    def unit(self) -> int:
        """Keys of a schedule's unit."""
        return self.split_kv or self.tile_kv

    def row_tile(self, rows: int) -> int:
        """Rows of a tile, rounded up to what the tensor core takes."""
        return min(-(-rows // 8) * 8, self.max_rows)

    def row_tiles(self, rows: int) -> int:
        """How many tiles hold `rows` query rows."""
        return -(-rows // self.row_tile(rows))

    def num_spans(self, kv_heads: int, rows: int) -> int:
        """Thread blocks that share one kv head's work."""
        return max(self.ctas // (kv_heads * self.row_tiles(rows)), 1)


# Query rows worked on together, for heads up to a width.
WIDEST_AT = ((64, MAX_ROWS), (256, 32))
EIGHT_BIT_WIDEST_AT = ((64, MAX_ROWS), (128, 32), (192, 16), (320, 8))
MOST_BY_WARP = 2048  # elements of an accumulator that each warp has room for, head_dim times rows
# Bytes that an SM should have under way, and tiles of a thread block: more was slower (benchmarks/results).
IN_FLIGHT, MOST_STAGES = 96 * 1024, 4
# Over lists. 64 x 32k, a quarter of the blocks of 16: 273 us in fp8, 279 with 96 KB; in 16 bits 493 with two
# thread blocks of 64 KB, 502 with one of 96.
LISTED_IN_FLIGHT = 64 * 1024


def default_sizes(
    head_dim: int,
    *,
    rows: int,
    kv_dtypes: tuple[DTypeLike, DTypeLike] = ("bfloat16", "bfloat16"),
    batch_invariant: bool = False,
    has_lists: bool = False,
) -> DecodeSizes:
    """Sizes for a head_dim, measured on an H200 for 64 and 128 (benchmarks/results).

    Args:
        head_dim: Width of a head.
        rows: Query rows of a kv head.
        kv_dtypes: Of the keys and of the values.
        batch_invariant: A request's bits must not depend on its batch.
        has_lists: Lists of sparse blocks say which keys are visited.

    Raises:
        NotImplementedError: There is no kernel for heads of this width, stored like this.
    """
    reason = why_not_head_dim(head_dim, kv_dtypes)
    if reason is not None:
        raise unsupported("paged_decode", reason, "Use another implementation")
    itemsizes = [jnp.dtype(dtype).itemsize for dtype in kv_dtypes]
    is_narrow = min(itemsizes) == 1
    width = head_chunks(head_dim, itemsize=min(itemsizes)).padded_dim
    # More rows of wider heads spill with every feature on.
    widest_at = EIGHT_BIT_WIDEST_AT if is_narrow else WIDEST_AT
    max_rows = next(count for widest, count in widest_at if width <= widest)
    tile_rows = min(-(-rows // 8) * 8, max_rows)
    # Warps that do not wait for each other gain 1 % in 16 bits (measured to 16 rows), a third to a half in 8.
    per_warp_mma = width * tile_rows <= MOST_BY_WARP and (is_narrow or tile_rows <= 16)
    # Tiles of few bytes need two thread blocks an SM, or memory waits for the softmax; more rows, or wider
    # heads in 8 bits, fit but one: their registers are over 128 a thread.
    fits_two = width * max(rows, 8) <= 1024 if is_narrow or has_lists else width <= 64 and rows <= 32
    ctas_per_sm = 2 if fits_two else 1
    in_flight = LISTED_IN_FLIGHT if has_lists else IN_FLIGHT
    tile_kv = 64
    stage = tile_kv * width * sum(itemsizes)
    return DecodeSizes(
        tile_kv=tile_kv,
        stages=min(max(in_flight // ctas_per_sm // stage, 2), MOST_STAGES),
        ctas=ctas_per_sm * NUM_SMS,
        max_rows=max_rows,
        split_kv=2048 if batch_invariant else None,
        per_warp_mma=per_warp_mma,
    )
