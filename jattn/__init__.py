"""vLLM's attention stack for JAX: batch metadata as pytrees, a paged KV cache, attention and decode graphs.

A step builds metadata from requests and a plan from metadata, writes keys and values into the cache, and
attends: `build_batch_metadata` -> `plan` -> `write_kv` -> `attend`.
"""

import importlib.metadata

from jattn import batch, masks, models, parallel, pytree, serving, sparsity, vllm
from jattn.attending import attend, cascade_attend
from jattn.batch.bucket import Bucket, default_buckets, pack_tokens, row_indices
from jattn.batch.check import check_batch
from jattn.batch.metadata import BatchMetadata, build_batch_metadata, build_cross_attention_metadata
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

try:
    __version__ = importlib.metadata.version("jattn")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [  # noqa: RUF022  (in the order of a step)
    "__version__",
    # Static sizes of a layer, of its cache and of a step.
    "AttentionSpec",
    "CacheSpec",
    "Bucket",
    # Build a step's metadata from requests, on the host.
    "build_batch_metadata",
    "build_cross_attention_metadata",
    "check_batch",
    "BatchMetadata",
    "pack_tokens",
    "row_indices",
    # Build the next step's metadata, on the device.
    "advance",
    "pad_to_bucket",
    "update_block_table",
    # Write keys and values into the cache, and move blocks.
    "PagedCache",
    "PackedKV",
    "write_kv",
    "blocks_of",
    "copy_blocks",
    "swap_blocks",
    "calibrate",
    "CalibrationWarning",
    # Plan a step.
    "plan",
    "Plan",
    "KernelFallbackWarning",
    # Attend over a paged cache.
    "attend",
    "LocalStrided",
    "merge_attn_states",
    "build_cascade_metadata",
    "CascadeMetadata",
    "cascade_attend",
    # Attend over dense arrays.
    "attention",
    # Flax layers.
    "PagedAttention",
    "attention_fn",
    # Run many steps.
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
