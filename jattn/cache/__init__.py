"""The paged KV cache: what it is, how it is written, how its blocks move."""

from jattn.cache.block_copy import copy_blocks, swap_blocks
from jattn.cache.read import blocks_of, keys_of_row, tokens_at
from jattn.cache.spec import CacheSpec
from jattn.cache.types import PackedKV, PagedCache, block_arrays, has_token_axis, require_alive
from jattn.cache.write import write_kv

__all__ = [
    "CacheSpec",
    "PackedKV",
    "PagedCache",
    "block_arrays",
    "blocks_of",
    "copy_blocks",
    "has_token_axis",
    "keys_of_row",
    "require_alive",
    "swap_blocks",
    "tokens_at",
    "write_kv",
]
