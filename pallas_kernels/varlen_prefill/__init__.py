"""Varlen prefill: attention of packed prompts over their own keys, packed or in a paged cache."""

from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import ALIGN
from pallas_kernels.varlen_prefill.entry import varlen_prefill
from pallas_kernels.varlen_prefill.kernel_mask import MAX_ROWS, WORD_BITS, KernelMask, PairTile, Words
from pallas_kernels.varlen_prefill.mask_policies import (
    ALL_COLUMNS,
    MAX_COLUMN_BLOCKS,
    BlockBits,
    Inverted,
    Joined,
    Lines,
    PairBits,
    PrefixWords,
    RowRanges,
    SlashWords,
    WindowWords,
)
from pallas_kernels.varlen_prefill.schedule import (
    COLUMNS,
    PrefillSchedule,
    key_range,
    make_schedule,
    max_tiles,
)
from pallas_kernels.varlen_prefill.sizes import (
    PACK_GQA_CHOICES,
    SHARED_MEMORY,
    CallBounds,
    MaskBlocks,
    PrefillSizes,
    default_sizes,
    should_dequantize_in_kernel,
)
from pallas_kernels.varlen_prefill.tile_lists import (
    LIST_BLOCK_SIZES,
    PrefillTileLists,
    make_tile_lists,
    num_query_blocks,
)
