"""vLLM's attention stack for JAX: metadata as pytrees, a paged KV cache, attention, a Flax module, graphs."""

from jattn import pytree, requests
from jattn.attend import attend
from jattn.cache import PackedKV, PagedCache, copy_blocks, reshape_and_cache, swap_blocks, write_kv
from jattn.cascade import cascade_attend
from jattn.merge import merge_attn_states
from jattn.metadata.batch import (
    BatchMetadata,
    advance,
    build_batch_metadata,
    build_cross_attention_metadata,
    pad_to_bucket,
    update_block_table,
)
from jattn.metadata.cascade import CascadeMetadata, build_cascade_metadata, use_cascade_attention
from jattn.module import PagedAttention, attention_fn
from jattn.plan import Plan, plan
from jattn.sparsity.params import LocalStrided, get_head_sliding_step
from jattn.spec import AttentionSpec, Bucket, CacheSpec

__all__ = [
    "AttentionSpec",
    "BatchMetadata",
    "Bucket",
    "CacheSpec",
    "CascadeMetadata",
    "LocalStrided",
    "PackedKV",
    "PagedAttention",
    "PagedCache",
    "Plan",
    "advance",
    "attend",
    "attention_fn",
    "build_batch_metadata",
    "build_cascade_metadata",
    "build_cross_attention_metadata",
    "cascade_attend",
    "copy_blocks",
    "get_head_sliding_step",
    "merge_attn_states",
    "pad_to_bucket",
    "plan",
    "pytree",
    "requests",
    "reshape_and_cache",
    "swap_blocks",
    "update_block_table",
    "use_cascade_attention",
    "write_kv",
]
