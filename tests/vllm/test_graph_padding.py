import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.batch.default_buckets import default_capture_sizes
from jattn.vllm.graph_padding import (
    PadValues,
    combine_pad_values,
    pad_batch_for_graph,
    padded_capture_size,
    round_capture_sizes,
)
from tests.golden_cases import golden


@golden("capture_sizes_and_padding")
def test_sizes_and_padding_equal_vllm(case):
    sizes = default_capture_sizes(max_capture_size=case["max_capture_size"])
    assert list(sizes) == case["capture_sizes"]
    assert {n: padded_capture_size(int(n), sizes) for n in case["padded"]} == case["padded"]


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(1, 70))
def test_padded_size_is_the_smallest_that_holds_the_tokens(sizes, num_tokens):
    fitting = [size for size in sizes if size >= num_tokens]
    assert padded_capture_size(num_tokens, list(sizes)) == (min(fitting) if fitting else None)


def test_rounded_sizes_hold_whole_rows_and_stay_below_the_largest():
    assert round_capture_sizes([1, 2, 4, 8, 16], 3) == (3, 6, 9)
    assert round_capture_sizes([1, 2, 4, 8], 1) == (1, 2, 4, 8)
    assert round_capture_sizes([5], 3) == (3,)
    with pytest.raises(ValueError, match=r"uniform_decode_query_len must be at most .* \(8\), got 9"):
        round_capture_sizes([1, 8], 9)


@golden("cg_padding_values")
def test_padding_rows_hold_vllms_values(case):
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


def test_a_batch_larger_than_the_graph_is_refused():
    args = ([0, 1, 3], [7, 9], [[3], [5]], [12, 20, 21])
    with pytest.raises(ValueError, match=r"number of requests must be at most max_num_reqs \(1\), got 2"):
        pad_batch_for_graph(*args, max_num_reqs=1, max_num_tokens=5)
    with pytest.raises(ValueError, match=r"number of tokens must be at most max_num_tokens \(2\), got 3"):
        pad_batch_for_graph(*args, max_num_reqs=2, max_num_tokens=2)


def test_shared_pad_values_are_the_largest_of_each():
    assert combine_pad_values([PadValues(), PadValues(1, 0)]) == (1, 0)
    with pytest.raises(ValueError, match=r"pad_values must have at least one entry, got \[\]"):
        combine_pad_values([])


def test_arrays_of_several_numbers_of_requests_are_refused():
    sizes = {"max_num_reqs": 4, "max_num_tokens": 5}
    with pytest.raises(ValueError, match=r"query_start_loc must have 3 entries, got \(2,\)"):
        pad_batch_for_graph([0, 3], [7, 9], [[3], [5]], [12, 20, 21], **sizes)
    with pytest.raises(ValueError, match=r"block_table must have 2 rows, got shape \(1, 1\)"):
        pad_batch_for_graph([0, 1, 3], [7, 9], [[3]], [12, 20, 21], **sizes)
