import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.batch.bucket import default_capture_sizes
from jattn.vllm.cuda_graphs import AttentionCGSupport as Support
from jattn.vllm.cuda_graphs import (
    BatchDescriptor,
    PadValues,
    combine_pad_values,
    dispatch_cudagraph,
    make_graph_keys,
    pad_batch_for_graph,
    padded_capture_size,
    resolve_cudagraph_mode,
    round_capture_sizes,
)
from jattn.vllm.cuda_graphs import CUDAGraphMode as Mode
from tests.golden_cases import golden


@golden("cudagraph_dispatch")
def test_dispatch_equals_vllm(case):
    keys = make_graph_keys(
        Mode[case["mode"]],
        case["capture_sizes"],
        case["max_num_seqs"],
        uniform_decode_query_len=case["uniform_decode_query_len"],
    )
    assert (len(keys.full), len(keys.piecewise)) == (case["n_keys_full"], case["n_keys_piecewise"])
    for batch, expected in case["dispatch"].items():
        kind, num_tokens, *cascade = batch.split("_")
        mode, key = dispatch_cudagraph(
            keys, int(num_tokens), uniform_decode=kind == "uniform", use_cascade_attn=bool(cascade)
        )
        assert [mode.name, key and key.num_tokens, key and key.uniform] == expected


def test_batch_is_padded_to_the_next_capture_size():
    keys = make_graph_keys(Mode.FULL_AND_PIECEWISE, [1, 8, 16], max_num_seqs=8)
    assert dispatch_cudagraph(keys, 5, uniform_decode=True) == (
        Mode.FULL,
        BatchDescriptor(8, 8, uniform=True),
    )
    assert dispatch_cudagraph(keys, 9, uniform_decode=True) == (Mode.PIECEWISE, BatchDescriptor(16))


def test_decode_graphs_exist_for_one_to_max_num_seqs_requests():
    keys = make_graph_keys(
        Mode.FULL_DECODE_ONLY, [1, 3, 6, 12, 24], max_num_seqs=4, uniform_decode_query_len=3
    )
    assert sorted(key.num_tokens for key in keys.full) == [3, 6, 12]
    assert keys.piecewise == frozenset()


def test_uniform_batches_are_padded_to_full_rows_only():
    keys = make_graph_keys(Mode.FULL_DECODE_ONLY, [4, 6, 8], max_num_seqs=4, uniform_decode_query_len=3)
    assert dispatch_cudagraph(keys, 3, uniform_decode=True) == (
        Mode.FULL,
        BatchDescriptor(6, 2, uniform=True),
    )
    assert dispatch_cudagraph(keys, 3) == (Mode.NONE, None)


def test_lora_batches_require_lora_graphs():
    plain = make_graph_keys(Mode.FULL, [8], max_num_seqs=8)
    keys_with_lora = make_graph_keys(Mode.FULL, [8], max_num_seqs=8, lora_cases=(False, True))
    assert dispatch_cudagraph(plain, 8, has_lora=True) == (Mode.NONE, None)
    assert dispatch_cudagraph(keys_with_lora, 8, has_lora=True) == (
        Mode.FULL,
        BatchDescriptor(8, has_lora=True),
    )


def test_mode_none_has_no_graphs():
    keys = make_graph_keys(Mode.NONE, [8], max_num_seqs=8)
    assert dispatch_cudagraph(keys, 8, uniform_decode=True) == (Mode.NONE, None)


def test_graph_keys_reject_max_num_seqs_0():
    with pytest.raises(ValueError, match="max_num_seqs must be positive, got 0"):
        make_graph_keys(Mode.FULL, [8], 0)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate"),
    [
        ("NONE", "NONE", "NONE", False),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE", False),
        ("FULL", "FULL", "FULL", False),
        ("FULL_DECODE_ONLY", "FULL", "NONE", True),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", True),
    ],
)
def test_decode_and_mixed_modes_equal_vllm(mode, decode, mixed, separate):
    assert (Mode[mode].decode_mode, Mode[mode].mixed_mode) == (Mode[decode], Mode[mixed])
    assert Mode[mode].has_separate_routine is separate


def test_support_of_a_model_is_the_minimum():
    assert min([Support.ALWAYS, Support.UNIFORM_BATCH, Support.UNIFORM_SINGLE_TOKEN_DECODE]) == 1
    assert Support.NEVER < Support.UNIFORM_SINGLE_TOKEN_DECODE < Support.UNIFORM_BATCH < Support.ALWAYS


@pytest.mark.parametrize(
    ("mode", "support", "query_len", "split_op", "expected"),
    [
        ("FULL", "ALWAYS", 1, True, "FULL"),
        ("FULL", "ALWAYS", 4, False, "FULL"),
        ("FULL", "UNIFORM_BATCH", 4, True, "FULL_AND_PIECEWISE"),
        ("FULL", "UNIFORM_BATCH", 4, False, "FULL_DECODE_ONLY"),
        ("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", 1, True, "FULL_AND_PIECEWISE"),
        ("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", 4, True, "PIECEWISE"),
        ("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", 4, False, "NONE"),
        ("FULL_AND_PIECEWISE", "NEVER", 1, True, "PIECEWISE"),
        ("FULL_DECODE_ONLY", "NEVER", 1, False, "NONE"),
        ("FULL_DECODE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE", 1, False, "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE", 2, False, "NONE"),
        ("PIECEWISE", "NEVER", 4, True, "PIECEWISE"),
        ("NONE", "NEVER", 1, True, "NONE"),
    ],
)
def test_mode_is_lowered_to_what_the_back_ends_support(mode, support, query_len, split_op, expected):
    resolved = resolve_cudagraph_mode(
        Mode[mode], Support[support], uniform_decode_query_len=query_len, attention_is_split_op=split_op
    )
    assert resolved is Mode[expected]


def test_full_graphs_without_support_are_rejected():
    with pytest.raises(ValueError, match=r"mode=FULL, but .* does not support graphs\. Use mode=PIECEWISE"):
        resolve_cudagraph_mode(Mode.FULL, Support.NEVER)


@golden("capture_sizes_and_padding")
def test_sizes_and_padding_equal_vllm(case):
    sizes = default_capture_sizes(max_capture_size=case["max_capture_size"])
    assert list(sizes) == case["capture_sizes"]
    assert {n: padded_capture_size(int(n), sizes) for n in case["padded"]} == case["padded"]


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(1, 70))
def test_padded_size_is_the_smallest_sufficient_size(sizes, num_tokens):
    fitting = [size for size in sizes if size >= num_tokens]
    assert padded_capture_size(num_tokens, list(sizes)) == (min(fitting) if fitting else None)


def test_rounded_sizes_are_full_rows_up_to_the_largest_size():
    assert round_capture_sizes([1, 2, 4, 8, 16], 3) == (3, 6, 9)
    assert round_capture_sizes([1, 2, 4, 8], 1) == (1, 2, 4, 8)
    assert round_capture_sizes([5], 3) == (3,)
    with pytest.raises(ValueError, match=r"uniform_decode_query_len must be at most .* \(8\), got 9"):
        round_capture_sizes([1, 8], 9)


@golden("cg_padding_values")
def test_padding_rows_equal_vllm(case):
    num_reqs, query_len = case["num_reqs"], case.get("query_len", 1)
    batch = pad_batch_for_graph(
        np.arange(num_reqs + 1) * query_len,
        [case.get("num_computed", 100) + query_len] * num_reqs,
        np.ones((num_reqs, 2), int),
        np.arange(num_reqs * query_len),
        max_num_reqs=case["max_num_reqs"],
        max_num_tokens=case["max_num_reqs"] * query_len,
        pad_values=PadValues(seq_lens=case["pad_value"]),
    )
    assert batch.seq_lens.tolist() == case["expected_seq_lens"]
    assert PadValues() == (case.get("default_pad_seq_lens", 0), case.get("default_pad_block_table", -1))


def test_padding_adds_rows_without_tokens_and_tokens_without_slots(traced_once):
    sizes = dict(max_num_reqs=4, max_num_tokens=5, pad_values=PadValues(1, 0))
    args = ([0, 1, 3], [7, 9], [[3, 4], [5, 6]], [12, 20, 21])
    expected = ([0, 1, 3, 3, 3], [7, 9, 1, 1], [[3, 4], [5, 6], [0, 0], [0, 0]], [12, 20, 21, -1, -1])
    run = lambda *arrays: pad_batch_for_graph(*arrays, **sizes)
    assert tuple(array.tolist() for array in run(*args)) == expected
    (traced,) = traced_once(run, tuple(map(jnp.array, args)))
    assert tuple(array.tolist() for array in traced) == expected


def test_batch_larger_than_the_graph_is_rejected():
    args = ([0, 1, 3], [7, 9], [[3], [5]], [12, 20, 21])
    with pytest.raises(ValueError, match=r"number of requests must be at most max_num_reqs \(1\), got 2"):
        pad_batch_for_graph(*args, max_num_reqs=1, max_num_tokens=5)
    with pytest.raises(ValueError, match=r"number of tokens must be at most max_num_tokens \(2\), got 3"):
        pad_batch_for_graph(*args, max_num_reqs=2, max_num_tokens=2)


def test_combined_pad_values_are_the_maximum():
    assert combine_pad_values([PadValues(), PadValues(1, 0)]) == (1, 0)
    with pytest.raises(ValueError, match=r"pad_values must have at least one entry, got \[\]"):
        combine_pad_values([])


def test_arrays_of_different_numbers_of_requests_are_rejected():
    sizes = {"max_num_reqs": 4, "max_num_tokens": 5}
    with pytest.raises(ValueError, match=r"query_start_loc must have 3 entries, got \(2,\)"):
        pad_batch_for_graph([0, 3], [7, 9], [[3], [5]], [12, 20, 21], **sizes)
    with pytest.raises(ValueError, match=r"block_table must have 2 rows, got shape \(1, 1\)"):
        pad_batch_for_graph([0, 1, 3], [7, 9], [[3]], [12, 20, 21], **sizes)
