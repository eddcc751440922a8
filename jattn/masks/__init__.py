"""Attention masks as composable values, such as `Causal() & (Sinks(4) | Window(left=255))`.

A mask defines two methods: `visible` tells for pairs of a query and a key whether the query attends to the
key, and `coverage` classifies tiles of such pairs as EMPTY, PARTIAL or FULL. The coverage becomes the lists
of tiles that kernels process, forward and backward. In partial tiles they evaluate `visible`, or a faster
form that `kernel_mask` returns. Masks without arrays are hashable and go into
`AttentionSpec.sparsity`. Masks that hold arrays are pytrees and go into `attend(mask=)`, where their values
change without a recompile.
"""

from jattn.masks.base import And, Mask, Not, Or
from jattn.masks.blocks import BigBird, BlockMask, ListedBlocks
from jattn.masks.checks import check_batch_mask, check_causal_mask, check_mask
from jattn.masks.coverage import tile_coverage
from jattn.masks.dense_mask import dense, density, resolve_num_heads
from jattn.masks.documents import Document
from jattn.masks.functions import MaskFunction
from jattn.masks.heads import OnlyHeads, streaming_heads
from jattn.masks.in_kernel import KernelTiling as KernelTiling
from jattn.masks.local_strided import LocalStrided
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles
from jattn.masks.positions import Causal, Chunked, Dilated, Prefix, Sinks, Window
from jattn.masks.sharded import InterleavedMask, ShardedMask, per_request_array_ids, shard_mask
from jattn.masks.vertical_slash import (
    GatheredColumns,
    UngatheredVerticalSlash,
    VerticalSlash,
    VerticalSlashParts,
)

__all__ = [
    "And",
    "BigBird",
    "BlockMask",
    "Causal",
    "Chunked",
    "Coverage",
    "Dilated",
    "Document",
    "LocalStrided",
    "Mask",
    "MaskFunction",
    "Not",
    "OnlyHeads",
    "Or",
    "Pairs",
    "Prefix",
    "Sinks",
    "Tiles",
    "VerticalSlash",
    "Window",
    "dense",
    "density",
    "streaming_heads",
]
