"""The sizes that the decode kernel is compiled for."""

import dataclasses

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.head_dims import head_cut

NUM_SMS = 132  # H100 SXM, H200
MAX_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Static sizes of one decode kernel.

    Attributes:
        tile_kv: Keys of a step: 64 or 128.
        stages: Steps in flight from global memory.
        ctas: Thread blocks of the whole grid, at most; they stay resident, so more than fit an SM only queue.
        max_rows: Query rows (query heads of a kv head x decode_query_len) worked on together; more are cut.
        split_kv: Keys of a split where it is fixed, so that a request's bits do not depend on its batch; a
            multiple of tile_kv. None = splits follow the load.
    """

    tile_kv: int = 64
    stages: int = 3
    ctas: int = NUM_SMS
    max_rows: int = MAX_ROWS
    split_kv: int | None = None

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        require_positive(stages=self.stages, ctas=self.ctas)
        rows_ok = self.max_rows % 8 == 0 and 0 < self.max_rows <= MAX_ROWS
        require(rows_ok, "max_rows", f"be a multiple of 8 up to {MAX_ROWS}", self.max_rows)
        split_ok = self.split_kv is None or (self.split_kv > 0 and self.split_kv % self.tile_kv == 0)
        require(split_ok, "split_kv", f"be a multiple of tile_kv ({self.tile_kv})", self.split_kv)

    def row_tile(self, rows: int) -> int:
        """Rows of a tile, rounded up to what the tensor core takes."""
        return min(-(-rows // 8) * 8, self.max_rows)

    def row_tiles(self, rows: int) -> int:
        """How many tiles hold `rows` query rows."""
        return -(-rows // self.row_tile(rows))

    def slots(self, kv_heads: int, rows: int) -> int:
        """Thread blocks that share one kv head's work."""
        return max(self.ctas // (kv_heads * self.row_tiles(rows)), 1)


IN_FLIGHT = 96 * 1024  # bytes that an SM should have under way: more was slower (benchmarks/results)


def default_tiles(head_dim: int, *, rows: int, batch_invariant: bool = False) -> Tiles:
    """Tiles for a head_dim, measured on an H200 for 64 and 128 (benchmarks/results)."""
    width = head_cut(head_dim).padded_dim
    max_rows = MAX_ROWS if width <= 64 else 32  # more rows of wider heads spill with every feature on
    # Narrow heads need two thread blocks an SM, or memory waits for softmax; wide rows fit but one.
    ctas_per_sm = 2 if width <= 64 and rows <= 32 else 1
    tile_kv = 64
    stage = 2 * tile_kv * width * 2
    return Tiles(
        tile_kv=tile_kv,
        stages=max(IN_FLIGHT // ctas_per_sm // stage, 2),
        ctas=ctas_per_sm * NUM_SMS,
        max_rows=max_rows,
        split_kv=2048 if batch_invariant else None,
    )
