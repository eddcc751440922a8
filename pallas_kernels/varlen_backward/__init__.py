"""Gradients of packed attention: dk and dv per tile of keys, dq added up or in a separate kernel."""

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
