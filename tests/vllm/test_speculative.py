import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.speculative import (
    make_kv_sharing_fast_prefill_metadata,
    make_xqa_spec_decode_causal_mask,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    spec_decode_reorder_threshold,
)
from tests.golden_cases import golden


@golden("spec_decode_reorder_threshold")
def test_threshold_equals_vllm(case):
    case = dict(case)
    expected = case.pop("expected")
    assert spec_decode_reorder_threshold(**case) == expected


def test_threshold_is_at_least_that_of_the_back_end():
    assert spec_decode_reorder_threshold(2, reorder_batch_threshold=8) == 8
    assert spec_decode_reorder_threshold(9, reorder_batch_threshold=8) == 10
    assert spec_decode_reorder_threshold(3, dcp=2, supports_dcp_varlen=True) == 4


@golden("kv_sharing_fast_prefill_metadata")
def test_fast_prefill_equals_vllm(case):
    actual = make_kv_sharing_fast_prefill_metadata(
        case["seq_lens"], case["query_lens"], case["logits_indices_padded"], case["num_logits_indices"]
    )
    plain = {name: np.asarray(value).tolist() for name, value in actual._asdict().items()}
    assert plain == case["expected"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_fast_prefill_counts_the_requested_tokens_of_each_request(query_lens, data):
    owner = [row for row, n in enumerate(query_lens) for _ in range(n)]
    requested = sorted(data.draw(st.sets(st.integers(0, len(owner) - 1))))
    padded = requested + data.draw(st.lists(st.integers(0, 99), max_size=3))
    if not padded:
        padded = [0]
    actual = make_kv_sharing_fast_prefill_metadata([50] * len(query_lens), query_lens, padded, len(requested))
    lens = [sum(owner[token] == row for token in requested) for row in range(len(query_lens))]
    lens = query_lens if max(query_lens) == 1 else lens
    assert np.diff(actual.query_start_loc).tolist() == lens
    assert (actual.num_actual_tokens, actual.max_query_len) == (sum(lens), max(lens))


def test_traced_fast_prefill_equals_the_host_one(traced_once):
    batches = [
        ([41, 31, 40], [15, 5, 8], [14, 18, 19, 27], 4),
        ([9, 9, 9], [1, 1, 1], [0, 1, 2, 0], 2),
        ([9, 9, 9], [4, 1, 1], [3, 5, 0, 0], 2),
    ]
    to_device = lambda batch: tuple(jnp.array(value) for value in batch)
    traced = traced_once(make_kv_sharing_fast_prefill_metadata, *map(to_device, batches))
    for batch, result in zip(batches, traced, strict=True):
        for host, value in zip(make_kv_sharing_fast_prefill_metadata(*batch), result, strict=True):
            np.testing.assert_array_equal(host, value)


def test_decode_only_batch_keeps_all_tokens():
    actual = make_kv_sharing_fast_prefill_metadata([9, 9], [1, 1], [1], 1)
    assert (actual.query_start_loc.tolist(), actual.num_actual_tokens) == ([0, 1, 2], 2)


@pytest.mark.parametrize("xp", [np, jnp])
def test_reshaping_gives_each_request_its_tokens_and_back(xp):
    query = xp.arange(6 * 2 * 3, dtype=np.float32).reshape(6, 2, 3)
    rows = reshape_query_for_spec_decode(query, 2)
    assert rows.shape == (2, 3, 2, 3)
    np.testing.assert_array_equal(rows[1, 0], query[3])
    np.testing.assert_array_equal(reshape_attn_output_for_spec_decode(rows), query)
    np.testing.assert_array_equal(reshape_attn_output_for_spec_decode(query), query)


def test_uneven_numbers_of_tokens_are_rejected():
    with pytest.raises(ValueError, match=r"must be a multiple of batch_size \(4\), got 6"):
        reshape_query_for_spec_decode(np.zeros((6, 1, 1)), 4)
    with pytest.raises(ValueError, match="batch_size must be positive, got 0"):
        reshape_query_for_spec_decode(np.zeros((6, 1, 1)), 0)
    with pytest.raises(ValueError, match=r"attn_output must have 3 or 4 axes, got \(6, 1\)"):
        reshape_attn_output_for_spec_decode(np.zeros((6, 1)))


@golden("xqa_spec_decode_causal_mask")
def test_causal_bits_equal_vllm(case):
    mask = make_xqa_spec_decode_causal_mask(case["num_reqs"], case["query_len"])
    assert (mask.dtype, list(mask.shape)) == (case["dtype"], case["expected_shape"])
    assert mask[..., 0].tolist() == case["expected_bits_lane0"]
    assert not mask[..., 1].any()


@pytest.mark.parametrize("query_len", [1, 16, 17, 32, 33, 70])
def test_bit_j_of_token_i_is_set_where_j_is_not_later(query_len):
    mask = make_xqa_spec_decode_causal_mask(2, query_len)
    assert mask.shape[2] % 2 == 0
    for i in range(query_len):
        value = sum(int(lane) << (16 * k) for k, lane in enumerate(mask[1, i]))
        assert value == (1 << (i + 1)) - 1


def test_mask_rejects_query_len_0():
    with pytest.raises(ValueError, match="query_len must be positive, got 0"):
        make_xqa_spec_decode_causal_mask(1, 0)


def test_arrays_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match=r"seq_lens must have one entry per request \(3\), got 1"):
        make_kv_sharing_fast_prefill_metadata([10], [1, 2, 3], [0, 2, 5], 3)
