"""Sizes and counts may be numpy's ints of any width: those wrap where Python's do not."""

import numpy as np
import pytest

import jattn
from jattn import vllm
from jattn.batch.bucket import default_buckets

TABLE = np.arange(27).reshape(3, 9) + 90
PATTERN = jattn.LocalStrided(block_size=4, local_blocks=1, vert_stride=5)
CACHE = jattn.CacheSpec(num_blocks=1, num_kv_heads=8, head_dim=128)
MODE = vllm.CUDAGraphMode.FULL_AND_PIECEWISE
BUCKETS = [jattn.Bucket(max_decodes=n, max_prefills=4, max_prefill_tokens=99, max_blocks=9) for n in (8, 64)]
CALLS = {
    "start_idx": lambda of: vllm.compute_slot_mapping_start_idx(True, of(3), of(0), of(5)),
    "version": lambda of: vllm.choose_paged_attention_version(of(120), of(100), of(12)),
    "most virtual": lambda of: vllm.max_local_attention_virtual_batches(of(4), of(100), of(120)),
    "virtual": lambda of: vllm.make_local_attention_virtual_batches(of(4), [0, 4], [6], TABLE[:1], of(2)),
    "threshold": lambda of: vllm.spec_decode_reorder_threshold(of(100), True),
    "spec mask": lambda of: vllm.make_xqa_spec_decode_causal_mask(of(2), of(5)),
    "sizes": lambda of: vllm.default_capture_sizes(of(100)),
    "rounded": lambda of: vllm.round_capture_sizes([of(1), of(2), of(100)], of(3)),
    "keys": lambda of: sorted(
        vllm.make_graph_keys(MODE, [of(60), of(120)], of(100), uniform_decode_query_len=of(3)).full
    ),
    "chunks": lambda of: vllm.split_prefill_chunks([3, 3, 3], of(6), of(126)),
    "cascade": lambda of: vllm.use_cascade_attention(
        2**15, [1] * 10, of(32), of(8), False, False, False, of(108)
    ),
    "prefill blocks": lambda of: vllm.prefill_block_pattern(PATTERN, of(4), of(2), of(9)),
    "decode blocks": lambda of: vllm.decode_block_pattern(PATTERN, of(4), of(2), [3, 0, 30], of(9)),
    "rank's slots": lambda of: vllm.compute_dcp_slot_mapping(
        TABLE, [0, 1], [5, 6], of(64), dcp_size=of(4), dcp_rank=of(1)
    ),
    "rank's keys": lambda of: vllm.get_dcp_local_seq_lens([300, 70], of(16), of(1), of(16)),
    "rank's most keys": lambda of: vllm.max_dcp_local_seq_len(of(100), of(16), of(16)),
    "logical": lambda of: vllm.physical_to_logical_mapping(TABLE, [100, 5, 2], of(16), of(120)),
    "buckets": lambda of: default_buckets(
        of(100), max_blocks=of(9), decode_query_len=of(3), prefill_tokens=[of(100)]
    ),
    "chosen": lambda of: jattn.DecodeGraphs(lambda: None, BUCKETS).choose(num_decodes=of(5)),
    "blocks of memory": lambda of: CACHE.num_blocks_in(10**9, of(48)),
    "slots": lambda of: (
        jattn.build_batch_metadata([1, 5], [99, 90], TABLE[:2], block_size=of(16)).slot_mapping
    ),
    "cross": lambda of: (
        jattn.build_cross_attention_metadata([1, 5], [99, 90], TABLE[:2], block_size=of(16)).block_table
    ),
}


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64])
def test_numpy_ints_are_accepted(call, kind):
    numpys, plain = CALLS[call](kind), CALLS[call](int)
    if isinstance(plain, tuple) and not isinstance(plain[0], int | bool | jattn.Bucket | tuple):
        assert all(map(np.array_equal, numpys, plain))
    else:
        assert np.array_equal(numpys, plain) if hasattr(plain, "shape") else numpys == plain


@pytest.mark.usefixtures("types_unchecked")
def test_non_int_numbers_are_rejected():
    with pytest.raises(ValueError, match=r"num_sms must be an int, got 1\.5"):
        vllm.use_cascade_attention(512, [1] * 10, 32, 8, False, False, False, 1.5)
    with pytest.raises(ValueError, match=r"num_blocks must be an int, got 2\.5"):
        jattn.DecodeGraphs(lambda: None, BUCKETS).choose(num_decodes=5, num_blocks=2.5)
