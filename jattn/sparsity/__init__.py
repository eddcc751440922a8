"""Block-sparse attention: patterns as arrays of blocks, and schedules of the tiles that a mask leaves."""

from jattn.sparsity.plot import plot
from jattn.sparsity.pooled import select_prefill_blocks
from jattn.sparsity.schedule import TileSchedule, schedule, tile_classes
from jattn.sparsity.topk import KeyBounds, select_blocks, write_key_bounds
