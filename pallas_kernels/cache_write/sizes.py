"""Static sizes of the cache_write kernel."""

import dataclasses

from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.checks import require_positive

SHARED_MEMORY = 96 * 1024  # bytes of shared memory per thread block, so that two fit an SM


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteSizes:
    """Static sizes of one cache_write kernel.

    Attributes:
        rows: Tokens per thread block, all of which are in flight at once.
        uses_tma: Whether TMA copies rows that are not quantized; otherwise they pass through registers.
    """

    rows: int
    uses_tma: bool = True

    def __post_init__(self) -> None:
        require_positive(rows=self.rows)


def default_sizes(
    tokens: int, row_bytes: int, heads: int, *, is_quantized: bool, gpu: str = "9.0"
) -> CacheWriteSizes:
    """Return sizes with one token per thread block until all SMs are busy, then up to 8.

    Args:
        tokens: Tokens to write.
        row_bytes: Bytes of the keys of one token, all heads.
        heads: Heads per token.
        is_quantized: Whether rows are quantized on the way.
        gpu: Compute capability that the kernel is built for.
    """
    architecture = ARCHITECTURES[gpu]
    max_rows = max(min(SHARED_MEMORY // (2 * row_bytes), 8), 1)
    if is_quantized or not architecture.has_tma:  # registers hold 64 rows of heads
        max_rows = max(min(max_rows, 64 // heads), 1)
    return CacheWriteSizes(
        rows=min(-(-tokens // architecture.num_sms), max_rows), uses_tma=architecture.has_tma
    )
