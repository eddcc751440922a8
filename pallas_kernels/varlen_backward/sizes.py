"""The sizes that the backward kernel is compiled for."""

import dataclasses

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.head_dims import UNIT

WARPGROUPS = 2  # that compute: each has half of a tile's keys
TILE_KV = UNIT * WARPGROUPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """Static sizes of one backward kernel.

    Attributes:
        tile_q: Queries of a step: 64 or 128.
        stages: Steps in flight from global memory.
        overlaps: A step's scores begin while the last products of the step before are in flight: for both,
            registers must do.
        l2_bytes: So much of queries and their gradients is read side by side; 0 = the longest items first,
            whatever they read.
        ctas: Thread blocks of the grid, each with its share of the items; None = one an item, so that an SM
            takes the next item when it is done with one.
    """

    tile_q: int = 64
    stages: int = 2
    overlaps: bool = False
    l2_bytes: int = 32 * 10**6
    ctas: int | None = None

    def __post_init__(self) -> None:
        require_one_of("tile_q", self.tile_q, (64, 128))
        require_positive(stages=self.stages, ctas=1 if self.ctas is None else self.ctas)
        require(self.l2_bytes >= 0, "l2_bytes", "be at least 0", self.l2_bytes)
        require(self.stages >= 2, "stages", "be at least 2", self.stages)


# Units of 64 that a head fills -> sizes. Two warpgroups share the gradient of a step's queries by whole
# units, so a head of one unit takes two of queries.
TABLE = {1: KernelSizes(tile_q=128), 2: KernelSizes(tile_q=64)}


def default_sizes(head_dim: int) -> KernelSizes:
    """The sizes of varlen_backward where the caller names none.

    Args:
        head_dim: Width of a head, which support.why_not_backward took.
    """
    return TABLE[-(-head_dim // UNIT)]
