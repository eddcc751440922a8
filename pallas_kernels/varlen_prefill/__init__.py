"""Varlen prefill on Hopper: packed prompts of many requests against their own keys, packed or paged."""

from pallas_kernels.varlen_prefill.entry import varlen_prefill
from pallas_kernels.varlen_prefill.kernel_mask import WORD, KernelMask, PairTile, Words
from pallas_kernels.varlen_prefill.schedule import ALIGN, COLUMNS, Schedule, key_range, make_schedule
from pallas_kernels.varlen_prefill.sizes import (
    SHARED_MEMORY,
    WARPGROUP_ROWS,
    CallBounds,
    KernelSizes,
    default_sizes,
    pays_to_widen,
)
from pallas_kernels.varlen_prefill.tile_lists import TileLists, make_lists, num_query_blocks
