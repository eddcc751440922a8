"""vLLM's attention stack for JAX: metadata as pytrees, a paged KV cache, attention, a Flax module, graphs.

A step flows one way: requests -> metadata -> plan; keys, values -> cache; queries, cache, plan -> out.
"""

from jattn import batch, masks, models, parallel, pytree, serving, sparsity, vllm
from jattn.attending import attend, cascade_attend
from jattn.batch.bucket import Bucket, default_buckets
from jattn.batch.check import check_batch
from jattn.batch.metadata import BatchMetadata, build_batch_metadata, build_cross_attention_metadata
from jattn.batch.requests import pack_tokens, row_indices
from jattn.batch.transitions import advance, pad_to_bucket, update_block_table
from jattn.cache import CacheSpec, PackedKV, PagedCache, blocks_of, copy_blocks, swap_blocks, write_kv
from jattn.calibration import calibrate
from jattn.cascade import CascadeMetadata, build_cascade_metadata
from jattn.dense.attention import attention
from jattn.dense.flax_attention import attention_fn
from jattn.masks.local_strided import LocalStrided
from jattn.merge import merge_attn_states
from jattn.models.kv_scales import CalibrationWarning
from jattn.nn import PagedAttention
from jattn.planning import KernelFallbackWarning, Plan, plan
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.runtime.decode_loop import DecodeLoopOutput, decode_loop
from jattn.spec import AttentionSpec

__all__ = [  # noqa: RUF022  (the flow's order)
    # Sizes, said once: of a layer, of its cache, of a step.
    "AttentionSpec",
    "CacheSpec",
    "Bucket",
    # Requests -> metadata, on the host.
    "build_batch_metadata",
    "build_cross_attention_metadata",
    "check_batch",
    "BatchMetadata",
    "pack_tokens",
    "row_indices",
    # Metadata -> the next step's, on the device.
    "advance",
    "pad_to_bucket",
    "update_block_table",
    # Keys and values -> the cache.
    "PagedCache",
    "PackedKV",
    "write_kv",
    "blocks_of",
    "copy_blocks",
    "swap_blocks",
    "calibrate",
    "CalibrationWarning",
    # Metadata and specs -> a plan.
    "plan",
    "Plan",
    "KernelFallbackWarning",
    # Queries, cache, metadata, plan -> attention.
    "attend",
    "LocalStrided",
    "merge_attn_states",
    "build_cascade_metadata",
    "CascadeMetadata",
    "cascade_attend",
    # Queries, keys, values -> attention, without requests.
    "attention",
    # Attention -> a layer of a model.
    "PagedAttention",
    "attention_fn",
    # A step -> many steps.
    "DecodeGraphs",
    "default_buckets",
    "decode_loop",
    "DecodeLoopOutput",
    # Packages.
    "batch",
    "masks",
    "models",
    "parallel",
    "pytree",
    "serving",
    "sparsity",
    "vllm",
]
