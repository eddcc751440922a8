"""The sizes that the write kernel is compiled for."""

import dataclasses

from pallas_kernels.checks import require_positive
from pallas_kernels.support import NUM_SMS

SHARED_MEMORY = 96 * 1024  # bytes a thread block may take, so that two fit an SM


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteSizes:
    """Static sizes of one write kernel.

    Attributes:
        rows: Tokens of a thread block; all of them are in flight at once.
    """

    rows: int

    def __post_init__(self) -> None:
        require_positive(rows=self.rows)


def default_sizes(tokens: int, row_bytes: int, heads: int | None = None) -> CacheWriteSizes:
    """One token a thread block while that fills the SMs, then up to 8.

    Args:
        tokens: Tokens to write.
        row_bytes: Bytes of one token's keys, all heads.
        heads: Heads of a token where they are rounded on the way: 64 rows of heads are what registers hold.
    """
    most = max(min(SHARED_MEMORY // (2 * row_bytes), 8), 1)
    if heads is not None:
        most = max(min(most, 64 // heads), 1)
    return CacheWriteSizes(rows=min(-(-tokens // NUM_SMS), most))
