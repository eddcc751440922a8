import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.micro_batches import make_metadata_with_slice, slice_query_start_locs, split_at_token
from tests.golden_cases import CASES, golden

SLICED, SPLIT = (
    [c for c in CASES["make_metadata_with_slice"]["items"] if ("split_point" in c) is is_split]
    for is_split in (False, True)
)


def plain(batch):
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in batch._asdict().items()
    }


@golden("slice_query_start_locs")
def test_sliced_starts_equal_vllm(case):
    starts = case["query_start_loc"]
    assert slice_query_start_locs(starts, case["req_slice"]).tolist() == case["expected"]
    assert slice_query_start_locs(starts, slice(*case["req_slice"])).tolist() == case["expected"]


def test_a_slice_without_an_end_goes_to_the_last_row():
    assert slice_query_start_locs([0, 1, 3, 5], slice(1, None)).tolist() == [0, 2, 4]


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_sliced_batch_equals_vllm(case):
    batch = make_metadata_with_slice(
        case["seq_lens"], case["query_lens"], case["req_slice"], case["token_slice"]
    )
    assert plain(batch) == case["expected"]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_batch_equals_vllm(case):
    first, second = split_at_token(case["seq_lens"], case["query_lens"], case["split_point"])
    for batch, expected in ((first, case["expected"]["first"]), (second, case["expected"]["second"])):
        assert {name: plain(batch)[name] for name in expected} == expected


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_both_halves_hold_each_token_once_with_its_context(rows, data):
    query_lens = [q for q, _ in rows]
    seq_lens = [q + c for q, c in rows]
    tokens = [(c + i + 1) for q, c in rows for i in range(q)]
    if len(tokens) < 2:
        return
    point = data.draw(st.integers(1, len(tokens) - 1))
    seen = []
    for half in split_at_token(seq_lens, query_lens, point):
        lens = np.diff(half.query_start_loc)
        assert half.num_reqs == len(lens) == len(half.seq_lens)
        assert half.num_actual_tokens == lens.sum()
        assert half.max_query_len == lens.max()
        seen += [int(s - q + i + 1) for q, s in zip(lens, half.seq_lens, strict=True) for i in range(q)]
    assert seen == tokens


def test_traced_slices_equal_host_slices(traced_once):
    batches = [([32, 40, 48], [8, 8, 8]), ([9, 10, 30], [1, 9, 14])]
    run = functools.partial(make_metadata_with_slice, req_slice=(0, 2), token_slice=(0, 9))
    traced = traced_once(lambda s, q: run(s, q)[2:], *((jnp.array(s), jnp.array(q)) for s, q in batches))
    for batch, result in zip(batches, traced, strict=True):
        for host, value in zip(run(*batch)[2:], result, strict=True):
            np.testing.assert_array_equal(host, value)


def test_rows_behind_the_cut_keep_their_context():
    made = make_metadata_with_slice([10, 10, 10], [2, 2, 2], (0, 3), (0, 3))
    assert made.query_start_loc.tolist() == [0, 2, 3, 3]
    assert made.seq_lens.tolist() == [10, 9, 8]


def test_graph_padding_may_follow_the_last_row():
    batch = make_metadata_with_slice([9, 9], [2, 2], (1, 2), (2, 8))
    assert (batch.num_actual_tokens, batch.query_start_loc.tolist(), batch.seq_lens.tolist()) == (
        6,
        [0, 2],
        [9],
    )


def test_slices_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"request_slice must hold at least one, got \(2, 2\)"):
        slice_query_start_locs([0, 1, 2], (2, 2))
    with pytest.raises(ValueError, match="req_slice must end at or before 2, got 3"):
        make_metadata_with_slice([9, 9], [2, 2], (0, 3), (0, 4))
    with pytest.raises(ValueError, match=r"token_slice must start in row 1 \(2\.\.3\), got 1"):
        make_metadata_with_slice([9, 9], [2, 2], (1, 2), (1, 4))
    for point in (0, 4):
        with pytest.raises(ValueError, match=f"split_point must lie inside the 4 tokens, got {point}"):
            split_at_token([9, 9], [2, 2], point)


def test_lengths_of_other_requests_are_refused_and_not_stretched():
    message = r"seq_lens must have one entry per request \(3\), got 1"
    with pytest.raises(ValueError, match=message):
        make_metadata_with_slice([10], [1, 2, 3], (0, 3), (0, 6))
    with pytest.raises(ValueError, match=message):
        split_at_token([10], [1, 2, 3], 3)


def test_a_batch_may_begin_with_a_row_of_no_tokens():
    before, rest = split_at_token([4, 7, 3], [0, 3, 2], 2)
    assert before.query_start_loc.tolist() == [0, 0, 2]
    assert before.seq_lens.tolist() == [4, 6]
    assert rest.query_start_loc.tolist() == [0, 1, 3]
    assert rest.seq_lens.tolist() == [7, 3]
