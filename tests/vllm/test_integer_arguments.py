"""Sizes and counts accept numpy ints of any width, whose arithmetic would wrap where Python's does not."""

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
    "start_idx": lambda as_int: vllm.compute_slot_mapping_start_idx(True, as_int(3), as_int(0), as_int(5)),
    "version": lambda as_int: vllm.choose_paged_attention_version(as_int(120), as_int(100), as_int(12)),
    "most virtual": lambda as_int: vllm.max_local_attention_virtual_batches(
        as_int(4), as_int(100), as_int(120)
    ),
    "virtual": lambda as_int: vllm.make_local_attention_virtual_batches(
        as_int(4), [0, 4], [6], TABLE[:1], as_int(2)
    ),
    "threshold": lambda as_int: vllm.spec_decode_reorder_threshold(as_int(100), True),
    "spec mask": lambda as_int: vllm.make_xqa_spec_decode_causal_mask(as_int(2), as_int(5)),
    "sizes": lambda as_int: vllm.default_capture_sizes(as_int(100)),
    "rounded": lambda as_int: vllm.round_capture_sizes([as_int(1), as_int(2), as_int(100)], as_int(3)),
    "keys": lambda as_int: sorted(
        vllm.make_graph_keys(
            MODE, [as_int(60), as_int(120)], as_int(100), uniform_decode_query_len=as_int(3)
        ).full
    ),
    "chunks": lambda as_int: vllm.split_prefill_chunks([3, 3, 3], as_int(6), as_int(126)),
    "cascade": lambda as_int: vllm.use_cascade_attention(
        2**15, [1] * 10, as_int(32), as_int(8), False, False, False, as_int(108)
    ),
    "prefill blocks": lambda as_int: vllm.prefill_block_pattern(PATTERN, as_int(4), as_int(2), as_int(9)),
    "decode blocks": lambda as_int: vllm.decode_block_pattern(
        PATTERN, as_int(4), as_int(2), [3, 0, 30], as_int(9)
    ),
    "rank's slots": lambda as_int: vllm.compute_dcp_slot_mapping(
        TABLE, [0, 1], [5, 6], as_int(64), dcp_size=as_int(4), dcp_rank=as_int(1)
    ),
    "rank's keys": lambda as_int: vllm.get_dcp_local_seq_lens([300, 70], as_int(16), as_int(1), as_int(16)),
    "rank's most keys": lambda as_int: vllm.max_dcp_local_seq_len(as_int(100), as_int(16), as_int(16)),
    "logical": lambda as_int: vllm.physical_to_logical_mapping(TABLE, [100, 5, 2], as_int(16), as_int(120)),
    "buckets": lambda as_int: default_buckets(
        as_int(100), max_blocks=as_int(9), decode_query_len=as_int(3), prefill_tokens=[as_int(100)]
    ),
    "chosen": lambda as_int: jattn.DecodeGraphs(lambda: None, BUCKETS).choose(num_decodes=as_int(5)),
    "blocks of memory": lambda as_int: CACHE.num_blocks_in(10**9, as_int(48)),
    "slots": lambda as_int: (
        jattn.build_batch_metadata([1, 5], [99, 90], TABLE[:2], block_size=as_int(16)).slot_mapping
    ),
    "cross": lambda as_int: (
        jattn.build_cross_attention_metadata([1, 5], [99, 90], TABLE[:2], block_size=as_int(16)).block_table
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
