"""vLLM's helpers under vLLM's names, as pure functions of arrays, for readers and porters of vLLM.

The serving code does not use them. The exceptions are defined elsewhere and re-exported here:
`compute_slot_mapping`, `default_capture_sizes`, `get_dcp_local_seq_lens`, `get_head_sliding_step`,
`use_cascade_attention` and `PAD_SLOT_ID`.
"""

from jattn.batch.bucket import default_capture_sizes
from jattn.batch.context_parallel import get_dcp_local_seq_lens
from jattn.batch.slots import PAD_SLOT_ID, compute_slot_mapping
from jattn.cascade import use_cascade_attention
from jattn.masks.local_strided import get_head_sliding_step
from jattn.vllm.backends import (
    PerLayerParameters,
    choose_kv_cache_layout,
    choose_paged_attention_version,
    infer_global_hyperparameters,
)
from jattn.vllm.batches import (
    make_metadata_with_slice,
    reorder_batch_to_split_decodes_and_prefills,
    slice_query_start_locs,
    split_at_token,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_and_decode,
    split_prefill_chunks,
)
from jattn.vllm.context_parallel import (
    compute_dcp_slot_mapping,
    cp_lse_combine,
    mask_empty_context_lse,
    max_dcp_local_seq_len,
)
from jattn.vllm.cuda_graphs import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    PadValues,
    combine_pad_values,
    dispatch_cudagraph,
    make_graph_keys,
    pad_batch_for_graph,
    padded_capture_size,
    resolve_cudagraph_mode,
    round_capture_sizes,
)
from jattn.vllm.kv_cache import (
    compute_slot_mapping_start_idx,
    fill_slot_mapping_tail,
    physical_to_logical_mapping,
    reshape_and_cache,
)
from jattn.vllm.sparse_attention import (
    decode_block_pattern,
    dense_to_crow_col,
    make_local_attention_virtual_batches,
    make_padded_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
    prefill_block_pattern,
)
from jattn.vllm.speculative import (
    make_kv_sharing_fast_prefill_metadata,
    make_xqa_spec_decode_causal_mask,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    spec_decode_reorder_threshold,
)

__all__ = [
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "BatchDescriptor",
    "CUDAGraphMode",
    "PadValues",
    "PerLayerParameters",
    "choose_kv_cache_layout",
    "choose_paged_attention_version",
    "combine_pad_values",
    "compute_dcp_slot_mapping",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "cp_lse_combine",
    "decode_block_pattern",
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
    "max_dcp_local_seq_len",
    "max_local_attention_virtual_batches",
    "pad_batch_for_graph",
    "padded_capture_size",
    "physical_to_logical_mapping",
    "prefill_block_pattern",
    "reorder_batch_to_split_decodes_and_prefills",
    "reshape_and_cache",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "resolve_cudagraph_mode",
    "round_capture_sizes",
    "slice_query_start_locs",
    "spec_decode_reorder_threshold",
    "split_at_token",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_and_decode",
    "split_prefill_chunks",
    "use_cascade_attention",
]
