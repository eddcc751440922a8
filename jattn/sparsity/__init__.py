"""Block-sparse attention: masks (those of `jattn.masks`), the tiles they leave, blocks chosen by scores."""

from jattn.masks import (
    And,
    BigBird,
    BlockMask,
    Causal,
    Chunked,
    Dilated,
    Document,
    LocalStrided,
    Mask,
    MaskFunction,
    OnlyHeads,
    Or,
    Prefix,
    Sinks,
    VerticalSlash,
    Window,
    dense,
    density,
    streaming_heads,
)
from jattn.sparsity.pictures import plot
from jattn.sparsity.pooled import select_prefill_blocks
from jattn.sparsity.tile_schedule import TileSchedule, schedule, tile_classes
from jattn.sparsity.topk import KeyBounds, select_blocks, write_key_bounds

__all__ = [
    "And",
    "BigBird",
    "BlockMask",
    "Causal",
    "Chunked",
    "Dilated",
    "Document",
    "KeyBounds",
    "LocalStrided",
    "Mask",
    "MaskFunction",
    "OnlyHeads",
    "Or",
    "Prefix",
    "Sinks",
    "TileSchedule",
    "VerticalSlash",
    "Window",
    "dense",
    "density",
    "plot",
    "schedule",
    "select_blocks",
    "select_prefill_blocks",
    "streaming_heads",
    "tile_classes",
    "write_key_bounds",
]
