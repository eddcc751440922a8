"""Block-sparse attention: masks, tile schedules, block selection by scores, and published recipes.

Everything in `jattn.masks` is also available here.
"""

from jattn import masks
from jattn.masks import *  # noqa: F403  (re-exports the masks without listing them twice)
from jattn.sparsity.decode_selection import KeyBounds, select_blocks, write_key_bounds
from jattn.sparsity.deepseek_sparse_attention import (
    dsa,
    index_scores,
    indexer_loss,
    select_cached_tokens,
    select_tokens,
    write_index_keys,
)
from jattn.sparsity.native_sparse_attention import nsa, select_nsa_blocks
from jattn.sparsity.plotting import plot
from jattn.sparsity.prefill_selection import select_prefill_blocks
from jattn.sparsity.recipes import moba, streaming_llm, vertical_slash, x_attention
from jattn.sparsity.scores import block_means, top_k_blocks
from jattn.sparsity.tile_schedule import TileSchedule, expand_schedule, schedule

__all__ = [
    "KeyBounds",
    "TileSchedule",
    "block_means",
    "dsa",
    "expand_schedule",
    "index_scores",
    "indexer_loss",
    "moba",
    "nsa",
    "plot",
    "schedule",
    "select_blocks",
    "select_cached_tokens",
    "select_nsa_blocks",
    "select_prefill_blocks",
    "select_tokens",
    "streaming_llm",
    "top_k_blocks",
    "vertical_slash",
    "write_index_keys",
    "write_key_bounds",
    "x_attention",
]
__all__ += masks.__all__
