"""vLLM's attention stack for JAX: batch metadata as pytrees, a paged KV cache, attention and decode graphs.

A step builds metadata from requests and a plan from metadata, writes keys and values into the cache, and
attends: `build_batch_metadata` -> `plan` -> `write_kv` -> `attend`.
"""

import importlib.metadata
from typing import TYPE_CHECKING

from jattn.lazy_imports import lazy_attributes

if TYPE_CHECKING:
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
    from jattn.score_mod import ScoreMod
    from jattn.spec import AttentionSpec

try:
    __version__ = importlib.metadata.version("jattn")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# Module of each public name, in the order of a step.
_MODULES = {
    # Static sizes of a layer, of its cache and of a step.
    "AttentionSpec": "jattn.spec",
    "CacheSpec": "jattn.cache",
    "Bucket": "jattn.batch.bucket",
    # Build a step's metadata from requests, on the host.
    "build_batch_metadata": "jattn.batch.metadata",
    "build_cross_attention_metadata": "jattn.batch.metadata",
    "check_batch": "jattn.batch.check",
    "BatchMetadata": "jattn.batch.metadata",
    "pack_tokens": "jattn.batch.bucket",
    "row_indices": "jattn.batch.bucket",
    # Build the next step's metadata, on the device.
    "advance": "jattn.batch.transitions",
    "pad_to_bucket": "jattn.batch.transitions",
    "update_block_table": "jattn.batch.transitions",
    # Write keys and values into the cache, and move blocks.
    "PagedCache": "jattn.cache",
    "PackedKV": "jattn.cache",
    "write_kv": "jattn.cache",
    "blocks_of": "jattn.cache",
    "copy_blocks": "jattn.cache",
    "swap_blocks": "jattn.cache",
    "calibrate": "jattn.calibration",
    "CalibrationWarning": "jattn.models.kv_scales",
    # Plan a step.
    "plan": "jattn.planning",
    "Plan": "jattn.planning",
    "KernelFallbackWarning": "jattn.planning",
    # Attend over a paged cache.
    "attend": "jattn.attending",
    "LocalStrided": "jattn.masks.local_strided",
    "ScoreMod": "jattn.score_mod",
    "merge_attn_states": "jattn.merge",
    "build_cascade_metadata": "jattn.cascade",
    "CascadeMetadata": "jattn.cascade",
    "cascade_attend": "jattn.attending",
    # Attend over dense arrays.
    "attention": "jattn.dense.attention",
    # Flax layers.
    "PagedAttention": "jattn.nn",
    "attention_fn": "jattn.dense.flax_attention",
    # Run many steps.
    "DecodeGraphs": "jattn.runtime.decode_graphs",
    "default_buckets": "jattn.batch.bucket",
    "decode_loop": "jattn.runtime.decode_loop",
    "DecodeLoopOutput": "jattn.runtime.decode_loop",
}
_PACKAGES = ("batch", "masks", "models", "parallel", "pytree", "serving", "sparsity", "vllm")
__all__ = ["__version__", *_MODULES, *_PACKAGES]
__getattr__ = lazy_attributes(__name__, _MODULES, _PACKAGES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
