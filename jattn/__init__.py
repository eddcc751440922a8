"""vLLM's attention stack for JAX: metadata as pytrees, a paged KV cache, attention, a Flax module, graphs."""

from jattn import masks, models, pytree, requests, serving, sparsity
from jattn.attending import attend
from jattn.cache import PackedKV, PagedCache, copy_blocks, reshape_and_cache, swap_blocks, write_kv
from jattn.calibrate import calibrate
from jattn.cascade import cascade_attend
from jattn.decode_loop import DecodeLoopOutput, decode_loop
from jattn.flax_attention import attention_fn
from jattn.graphs import DecodeGraphs, default_buckets
from jattn.masks.local_strided import LocalStrided, get_head_sliding_step
from jattn.merge import merge_attn_states
from jattn.metadata.batch import BatchMetadata, build_batch_metadata, build_cross_attention_metadata
from jattn.metadata.buckets import default_capture_sizes, padded_capture_size, round_capture_sizes
from jattn.metadata.cascade import CascadeMetadata, build_cascade_metadata, use_cascade_attention
from jattn.metadata.check import check_batch
from jattn.metadata.context_parallel import (
    compute_dcp_slot_mapping,
    cp_lse_combine,
    get_dcp_local_seq_lens,
    mask_empty_context_lse,
    max_dcp_local_seq_len,
)
from jattn.metadata.graph_dispatch import BatchDescriptor, dispatch_cudagraph, make_graph_keys
from jattn.metadata.graph_modes import AttentionCGSupport, CUDAGraphMode, resolve_cudagraph_mode
from jattn.metadata.layers import PerLayerParameters, choose_kv_cache_layout, infer_global_hyperparameters
from jattn.metadata.local import (
    make_local_attention_virtual_batches,
    make_padded_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from jattn.metadata.micro_batches import make_metadata_with_slice, slice_query_start_locs, split_at_token
from jattn.metadata.partitions import choose_paged_attention_version
from jattn.metadata.regions import split_prefill_and_decode
from jattn.metadata.reorder import reorder_batch_to_split_decodes_and_prefills
from jattn.metadata.slots import (
    PAD_SLOT_ID,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    fill_slot_mapping_tail,
    physical_to_logical_mapping,
)
from jattn.metadata.speculative import (
    make_kv_sharing_fast_prefill_metadata,
    make_xqa_spec_decode_causal_mask,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    spec_decode_reorder_threshold,
)
from jattn.metadata.split import (
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from jattn.metadata.transitions import advance, pad_to_bucket, update_block_table
from jattn.models.scales import CalibrationWarning
from jattn.module import PagedAttention
from jattn.planning import KernelFallbackWarning, Plan, plan
from jattn.sparsity.patterns import decode_block_pattern, dense_to_crow_col, prefill_block_pattern
from jattn.spec import AttentionSpec, Bucket, CacheSpec

__all__ = [
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "AttentionSpec",
    "BatchDescriptor",
    "BatchMetadata",
    "Bucket",
    "CUDAGraphMode",
    "CacheSpec",
    "CalibrationWarning",
    "CascadeMetadata",
    "DecodeGraphs",
    "DecodeLoopOutput",
    "KernelFallbackWarning",
    "LocalStrided",
    "PackedKV",
    "PagedAttention",
    "PagedCache",
    "PerLayerParameters",
    "Plan",
    "advance",
    "attend",
    "attention_fn",
    "build_batch_metadata",
    "build_cascade_metadata",
    "build_cross_attention_metadata",
    "calibrate",
    "cascade_attend",
    "check_batch",
    "choose_kv_cache_layout",
    "choose_paged_attention_version",
    "compute_dcp_slot_mapping",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "copy_blocks",
    "cp_lse_combine",
    "decode_block_pattern",
    "decode_loop",
    "default_buckets",
    "default_capture_sizes",
    "dense_to_crow_col",
    "dispatch_cudagraph",
    "fill_slot_mapping_tail",
    "get_dcp_local_seq_lens",
    "get_head_sliding_step",
    "infer_global_hyperparameters",
    "make_graph_keys",
    "make_kv_sharing_fast_prefill_metadata",
    "make_local_attention_virtual_batches",
    "make_metadata_with_slice",
    "make_padded_local_attention_virtual_batches",
    "make_xqa_spec_decode_causal_mask",
    "mask_empty_context_lse",
    "masks",
    "max_dcp_local_seq_len",
    "max_local_attention_virtual_batches",
    "merge_attn_states",
    "models",
    "pad_to_bucket",
    "padded_capture_size",
    "physical_to_logical_mapping",
    "plan",
    "prefill_block_pattern",
    "pytree",
    "reorder_batch_to_split_decodes_and_prefills",
    "requests",
    "reshape_and_cache",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "resolve_cudagraph_mode",
    "round_capture_sizes",
    "serving",
    "slice_query_start_locs",
    "sparsity",
    "spec_decode_reorder_threshold",
    "split_at_token",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_and_decode",
    "split_prefill_chunks",
    "swap_blocks",
    "update_block_table",
    "use_cascade_attention",
    "write_kv",
]
