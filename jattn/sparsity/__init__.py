"""Block-sparse attention: the masks of `jattn.masks`, the tiles they leave, blocks chosen by scores."""

from jattn import masks
from jattn.masks import *  # noqa: F403  (a mask is named in its own package, and nowhere else)
from jattn.sparsity.pictures import plot
from jattn.sparsity.pooled import select_prefill_blocks
from jattn.sparsity.tile_schedule import TileSchedule, schedule, tile_classes
from jattn.sparsity.topk import KeyBounds, select_blocks, write_key_bounds

__all__ = [
    "KeyBounds",
    "TileSchedule",
    "plot",
    "schedule",
    "select_blocks",
    "select_prefill_blocks",
    "tile_classes",
    "write_key_bounds",
]
__all__ += masks.__all__
