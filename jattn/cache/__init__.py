"""The paged KV cache: what it is, how it is written, how its blocks move."""

from jattn.cache.move import copy_blocks, swap_blocks
from jattn.cache.types import PackedKV, PagedCache, block_arrays, blocks_of, has_token_axis
from jattn.cache.write import write_kv

__all__ = [
    "PackedKV",
    "PagedCache",
    "block_arrays",
    "blocks_of",
    "copy_blocks",
    "has_token_axis",
    "swap_blocks",
    "write_kv",
]
