"""Masks as values: `Causal() & (Sinks(4) | Window(left=255))` says which keys each query sees.

A mask says it twice: of pairs of a query and a key (`sees`), and of tiles of them (`coverage`), from which
`jattn.sparsity.schedule` makes the lists of tiles that a kernel works through. Masks without arrays are
hashable and go into `AttentionSpec.sparsity`; masks that hold arrays are pytrees and go into `attend(mask=)`,
where they change without a recompile.
"""

from jattn.masks.base import And, Mask, Not, Or
from jattn.masks.blocks import BigBird, BlockMask, ListedBlocks
from jattn.masks.checks import check_ahead, check_mask, check_mask_of_step
from jattn.masks.coverage import coverage_of_tiles
from jattn.masks.dense_mask import dense, density, heads_of
from jattn.masks.documents import Document
from jattn.masks.functions import MaskFunction
from jattn.masks.heads import OnlyHeads, streaming_heads
from jattn.masks.local_strided import LocalStrided
from jattn.masks.pairs import Coverage, Pairs, Sizes, Tiles
from jattn.masks.positions import Causal, Chunked, Dilated, Prefix, Sinks, Window
from jattn.masks.sharded import Interleaved, OnMesh, on_mesh, row_array_ids
from jattn.masks.vertical_slash import GatheredColumns, InParts, Ungathered, VerticalSlash, in_parts

__all__ = [
    "And",
    "BigBird",
    "BlockMask",
    "Causal",
    "Chunked",
    "Coverage",
    "Dilated",
    "Document",
    "GatheredColumns",
    "InParts",
    "Interleaved",
    "ListedBlocks",
    "LocalStrided",
    "Mask",
    "MaskFunction",
    "Not",
    "OnMesh",
    "OnlyHeads",
    "Or",
    "Pairs",
    "Prefix",
    "Sinks",
    "Sizes",
    "Tiles",
    "Ungathered",
    "VerticalSlash",
    "Window",
    "check_ahead",
    "check_mask",
    "check_mask_of_step",
    "coverage_of_tiles",
    "dense",
    "density",
    "heads_of",
    "in_parts",
    "on_mesh",
    "row_array_ids",
    "streaming_heads",
]
