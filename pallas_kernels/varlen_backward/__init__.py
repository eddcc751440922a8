"""Gradients of packed attention: dk and dv per tile of keys, dq added up or in a separate kernel.

`entry` runs the kernels. What they need besides the arrays is in `sizes` (tile sizes), `schedule` (work tiles
and their order) and `tile_lists` (sparse masks); `refs` names arrays, shared memory and barriers. Each kernel
starts with a figure of its steps: `dkdv_kernel` and `dq_kernel`, and without wgmma `warp_dkdv_kernel` and
`warp_dq_kernel`. They share `scores`.
"""

from pallas_kernels.varlen_backward.entry import varlen_backward
from pallas_kernels.varlen_backward.schedule import BackwardSchedule, make_schedule
from pallas_kernels.varlen_backward.sizes import (
    MIN_TEAM_QUERIES,
    BackwardSizes,
    default_layer_sizes,
    default_sizes,
    list_block_sizes,
    mean_visible_keys,
)
from pallas_kernels.varlen_backward.tile_lists import (
    BackwardMask,
    BackwardTileLists,
    QueryTiles,
    keys_per_code,
    make_tile_lists,
)
