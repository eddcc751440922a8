import functools

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.split import (
    DecodePrefillSplit,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from tests.golden_cases import golden

OPTIONS = ("decode_threshold", "require_uniform", "treat_short_extends_as_decodes")
lens_lists = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def split_row_by_row(lens, threshold, *, uniform, short_extends, prefilling, num_tokens):
    """vLLM's newest function, one row at a time."""
    everything_decodes = (len(lens), 0, num_tokens, 0)
    if max(lens) <= threshold and (not uniform or threshold <= 1) and short_extends:
        return everything_decodes
    if lens[0] > threshold:
        return (0, len(lens), 0, num_tokens)
    if uniform and all(n in (lens[0], 0) for n in lens):
        return everything_decodes
    decodes = tokens = 0
    for n, is_reading_its_prompt in zip(lens, prefilling, strict=True):
        is_prefill = n != lens[0] if uniform else n > threshold
        if is_prefill or (not short_extends and is_reading_its_prompt):
            return (decodes, len(lens) - decodes, tokens, num_tokens - tokens)
        decodes, tokens = decodes + 1, tokens + n
    return everything_decodes


@golden("split_decodes_and_prefills")
def test_split_equals_vllm(case):
    options = {name: case[name] for name in OPTIONS if name in case}
    split = split_decodes_and_prefills(
        case["query_lens"], **options, padded_num_actual_tokens=case["padded_num_actual_tokens"]
    )
    assert split._asdict() == case["expected"]


@golden("split_short_extends")
def test_short_extends_go_where_asked(case):
    options = {name: case[name] for name in OPTIONS}
    split = split_decodes_and_prefills(case["query_lens"], **options, is_prefilling=case["is_prefilling"])
    assert split._asdict() == case["expected"]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "padded", "expected"),
    [
        ([2, 1, 2, 4, 5, 6, 7, 8], 4, None, (1, 7, 2, 33)),
        ([2, 2, 2, 0], 3, 8, (4, 0, 8, 0)),
        ([1, 1, 0, 0], 1, 4, (4, 0, 4, 0)),
    ],
)
def test_uniform_split_takes_equal_rows_and_padding(query_lens, threshold, padded, expected):
    assert (
        split_decodes_and_prefills(query_lens, threshold, True, padded_num_actual_tokens=padded) == expected
    )


def test_short_rows_behind_a_prefill_are_prefills():
    assert split_decodes_and_prefills([1, 5, 1]) == (1, 2, 1, 6)


def test_a_batch_without_rows_has_empty_regions():
    assert split_decodes_and_prefills([]) == (0, 0, 0, 0)
    assert split_decodes_and_prefills([], 3, True) == (0, 0, 0, 0)
    assert split_decodes_prefills_and_extends([], []) == (0, 0, 0, 0, 0, 0)


@given(lens_lists, st.integers(0, 6), st.booleans(), st.booleans(), st.data())
def test_split_equals_the_row_by_row_definition(lens, threshold, uniform, short_extends, data):
    prefilling = data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    num_tokens = sum(lens) + data.draw(st.integers(0, 4))
    split = split_decodes_and_prefills(
        lens,
        threshold,
        uniform,
        short_extends,
        is_prefilling=prefilling,
        padded_num_actual_tokens=num_tokens,
    )
    assert split == split_row_by_row(
        lens,
        threshold,
        uniform=uniform,
        short_extends=short_extends,
        prefilling=prefilling,
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("short_extends", [False, True])
def test_traced_split_equals_the_host_split(traced_once, uniform, short_extends):
    split = functools.partial(
        split_decodes_and_prefills,
        decode_threshold=2,
        require_uniform=uniform,
        treat_short_extends_as_decodes=short_extends,
    )
    batches = [[1, 2, 5, 1], [2, 2, 0, 0], [7, 1, 1, 1], [1, 1, 1, 1], [2, 2, 1, 2]]
    flags = [False, True, False, False]
    run = lambda lens, prefilling: split(lens, is_prefilling=prefilling)
    traced = traced_once(run, *((jnp.array(lens), jnp.array(flags)) for lens in batches))
    for lens, result in zip(batches, traced, strict=True):
        host = run(lens, flags)
        assert isinstance(host.num_decodes, int)
        assert DecodePrefillSplit(*map(int, result)) == host


def test_short_extends_need_to_be_told_apart():
    with pytest.raises(ValueError, match=r"is_prefilling must be given .*, got None"):
        split_decodes_and_prefills([1, 1], treat_short_extends_as_decodes=False)
    with pytest.raises(ValueError, match=r"is_prefilling must have one entry per request \(2\), got \(3,\)"):
        split_decodes_and_prefills([1, 1], treat_short_extends_as_decodes=False, is_prefilling=[True] * 3)


@golden("split_decodes_prefills_and_extends")
def test_extend_split_equals_vllm(case):
    split = split_decodes_prefills_and_extends(case["query_lens"], case["seq_lens"], case["decode_threshold"])
    assert split._asdict() == case["expected"]


@given(
    st.lists(st.integers(1, 2), max_size=4),
    st.lists(st.integers(3, 6), max_size=4),
    st.lists(st.integers(3, 6), max_size=4),
)
def test_extend_split_counts_the_rows_of_an_ordered_batch(decodes, extends, prefills):
    query_lens = decodes + extends + prefills
    seq_lens = [n + 9 for n in decodes + extends] + prefills
    expected = (*map(len, (decodes, extends, prefills)), *map(sum, (decodes, extends, prefills)))
    assert split_decodes_prefills_and_extends(query_lens, seq_lens, 2) == expected


def test_traced_extend_split_equals_the_host_split(traced_once):
    batches = [([1, 4, 4], [9, 9, 4]), ([1, 1, 1], [1, 2, 3]), ([5, 5, 1], [5, 5, 1]), ([5, 5, 5], [6, 7, 8])]
    run = functools.partial(split_decodes_prefills_and_extends, decode_threshold=2)
    traced = traced_once(run, *((jnp.array(q), jnp.array(s)) for q, s in batches))
    for batch, result in zip(batches, traced, strict=True):
        assert tuple(map(int, result)) == run(*batch)


def test_prefill_chunks_are_packed_greedily():
    assert split_prefill_chunks([2, 3, 5, 1, 4], 5) == [(0, 2), (2, 3), (3, 5)]
    assert split_prefill_chunks([2, 3, 5, 1, 4], 5, 10) == [(10, 12), (12, 13), (13, 15)]
    assert split_prefill_chunks([], 5) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 20))
def test_a_prefill_chunk_ends_only_where_the_next_request_does_not_fit(lens, workspace):
    chunks = split_prefill_chunks(lens, workspace)
    assert [row for first, stop in chunks for row in range(first, stop)] == list(range(len(lens)))
    for first, stop in chunks:
        assert sum(lens[first:stop]) <= workspace
        assert stop == len(lens) or sum(lens[first : stop + 1]) > workspace


def test_a_request_longer_than_the_workspace_is_refused():
    with pytest.raises(ValueError, match=r"seq_lens_cpu\[1\] must fit workspace_size \(5\), got 6"):
        split_prefill_chunks([5, 6], 5)


@pytest.mark.usefixtures("types_unchecked")
def test_lengths_of_other_requests_are_refused_rather_than_stretched():
    with pytest.raises(ValueError, match=r"seq_lens must have one entry per request \(2\), got 1"):
        split_decodes_prefills_and_extends([1, 2], [10])
    with pytest.raises(ValueError, match=r"query_lens must have one entry per request, got shape \(1, 2\)"):
        split_decodes_and_prefills([[1, 2]])
    with pytest.raises(ValueError, match=r"query_lens must have one entry per request, got shape \(\)"):
        split_decodes_and_prefills(5)
