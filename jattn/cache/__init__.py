"""The paged KV cache: specs, arrays, writes, reads, block copies and quantization."""

from jattn.cache.block_copy import copy_blocks, swap_blocks
from jattn.cache.read import blocks_of, gather_tokens, row_keys
from jattn.cache.spec import CacheSpec
from jattn.cache.types import PackedKV, PagedCache, block_arrays, has_token_axis, require_not_deleted
from jattn.cache.write import write_kv

__all__ = [
    "CacheSpec",
    "PackedKV",
    "PagedCache",
    "block_arrays",
    "blocks_of",
    "copy_blocks",
    "gather_tokens",
    "has_token_axis",
    "require_not_deleted",
    "row_keys",
    "swap_blocks",
    "write_kv",
]
