"""The sizes that the backward kernel is compiled for."""

import dataclasses

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.gpu import NUM_SMS

UNIT = 64  # the tensor core's M, and what shared memory is made of: 64 rows of 64 columns
WARPGROUPS = 2  # that compute: each has half of a tile's keys
TILE_KV = UNIT * WARPGROUPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """Static sizes of one backward kernel.

    Attributes:
        tile_q: Queries of a step: 64 or 128.
        stages: Steps in flight from global memory.
        ctas: Thread blocks of the grid; each stays on its SM and works through its share of the items.
    """

    tile_q: int = 64
    stages: int = 2
    ctas: int = NUM_SMS

    def __post_init__(self) -> None:
        require_one_of("tile_q", self.tile_q, (64, 128))
        require_positive(stages=self.stages, ctas=self.ctas)
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
