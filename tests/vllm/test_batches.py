import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.batches import (
    DecodePrefillSplit,
    make_metadata_with_slice,
    slice_query_start_locs,
    split_at_token,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_and_decode,
    split_prefill_chunks,
)
from jattn.vllm.batches import reorder_batch_to_split_decodes_and_prefills as reorder
from tests.golden_cases import CASES, golden

OPTIONS = ("decode_threshold", "require_uniform", "treat_short_extends_as_decodes")
lens_lists = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def split_row_by_row(lens, threshold, *, uniform, short_extends, prefilling, num_tokens):
    """Apply vLLM's newest function to one row at a time."""
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
def test_short_extends_are_decodes_only_if_requested(case):
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
def test_uniform_split_selects_equal_rows_and_padding(query_lens, threshold, padded, expected):
    assert (
        split_decodes_and_prefills(query_lens, threshold, True, padded_num_actual_tokens=padded) == expected
    )


def test_short_rows_after_a_prefill_are_prefills():
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


def test_is_prefilling_is_required_and_checked():
    with pytest.raises(ValueError, match="treat_short_extends_as_decodes=False requires is_prefilling"):
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
def test_prefill_chunk_ends_only_if_the_next_request_does_not_fit(lens, workspace):
    chunks = split_prefill_chunks(lens, workspace)
    assert [row for first, stop in chunks for row in range(first, stop)] == list(range(len(lens)))
    for first, stop in chunks:
        assert sum(lens[first:stop]) <= workspace
        assert stop == len(lens) or sum(lens[first : stop + 1]) > workspace


def test_request_longer_than_the_workspace_is_rejected():
    with pytest.raises(ValueError, match=r"seq_lens_cpu\[1\] must be at most workspace_size \(5\), got 6"):
        split_prefill_chunks([5, 6], 5)


@pytest.mark.usefixtures("types_unchecked")
def test_arrays_of_different_lengths_are_rejected_by_the_split():
    with pytest.raises(ValueError, match=r"seq_lens must have one entry per request \(2\), got 1"):
        split_decodes_prefills_and_extends([1, 2], [10])
    with pytest.raises(ValueError, match=r"query_lens must have one entry per request, got shape \(1, 2\)"):
        split_decodes_and_prefills([[1, 2]])
    with pytest.raises(ValueError, match=r"query_lens must have one entry per request, got shape \(\)"):
        split_decodes_and_prefills(5)


def check_region(region, expected):
    for name, value in expected.items():
        actual = getattr(region, name)
        assert (actual.tolist() if isinstance(actual, np.ndarray) else actual) == value, name


@golden("v0_blocksparse_prefill_decode_split")
def test_v0_batch_has_prefills_first_and_no_decode_query_start_loc(case):
    query_lens = case["seq_lens"][: case["num_prefills"]] + [1] * case["num_decode_tokens"]
    halves = split_prefill_and_decode(
        query_lens, case["seq_lens"], case["slot_mapping"], num_prefills=case["num_prefills"]
    )
    check_region(halves.prefill, case["expected"]["prefill"])
    check_region(halves.decode, case["expected"]["decode"])


@golden("v1_xformers_prefill_decode_split")
def test_v1_batch_has_decodes_first_and_prefill_tokens_from_0(case):
    halves = split_prefill_and_decode(case["query_lens"], case["seq_lens"], case["slot_mapping"])
    expected = case["expected"]
    check_region(halves.prefill, expected["prefill"])
    check_region(halves.decode, expected["decode"])
    assert len(halves.decode.seq_lens) == expected["num_decodes"]
    assert len(halves.prefill.slot_mapping) == expected["num_prefill_tokens"]


def test_region_without_rows_is_none():
    assert split_prefill_and_decode([1, 1], [5, 6], [3, 4]).prefill is None
    assert split_prefill_and_decode([5, 6], [5, 6], range(11)).decode is None
    assert split_prefill_and_decode([5, 6], [5, 6], range(11), num_prefills=2).decode is None
    assert split_prefill_and_decode([1, 1], [5, 6], [3, 4], num_prefills=0).prefill is None


def test_the_decode_threshold_moves_the_boundary():
    halves = split_prefill_and_decode([2, 1, 3], [9, 9, 3], range(6), decode_threshold=2)
    assert halves.decode.query_start_loc.tolist() == [0, 2, 3]
    assert halves.prefill.slot_mapping.tolist() == [3, 4, 5]


def test_missing_slots_and_too_many_prefills_are_rejected():
    with pytest.raises(ValueError, match="slot_mapping must have a slot for each of the 5 tokens, got 2"):
        split_prefill_and_decode([1, 4], [5, 6], [0, 1])
    for count in (3, -1):
        with pytest.raises(ValueError, match=rf"num_prefills must lie in \[0, 2\], got {count}"):
            split_prefill_and_decode([1, 4], [5, 6], range(5), num_prefills=count)


# (new tokens, computed tokens, prompt tokens)
rows_lists = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=10
)
NAMES = {"two_regions": "sl", "three_regions": "dep", "four_regions": "dslp"}


def region_of(row, threshold, order):
    scheduled, computed, prompt = row
    if order == "two_regions":
        return "s" if scheduled <= threshold else "l"
    if computed == 0:
        return "p"
    if scheduled > threshold:
        return {"three_regions": "e", "four_regions": "l"}[order]
    return "s" if order == "four_regions" and computed < prompt else "d"


def swap_along_cycles(regions, names):
    """Apply vLLM's loop over swap_states to a list of row indices."""
    expected = sorted(regions, key=names.index)
    wrong = [i for i in range(len(regions)) if regions[i] != expected[i]]
    sources = sorted(wrong, key=lambda i: names.index(regions[i]))
    goes_to = dict(zip(sources, wrong, strict=True))
    batch = list(range(len(regions)))
    for source in list(goes_to):
        target = goes_to[source]
        while source != target:
            batch[source], batch[target] = batch[target], batch[source]
            following = goes_to.get(target, target)
            goes_to[target] = target
            target = following
    return batch


def check_order(case, *columns, order):
    result = reorder(*columns, decode_threshold=case["decode_threshold"], order=order)
    assert result.order.tolist() == case["expected_order"]
    assert result.modified is case["expected_modified"]


@golden("reorder_batch_seed_two_region")
def test_two_region_order_equals_vllm(case):
    check_order(case, case["num_scheduled_tokens"], order="two_regions")


@golden("reorder_batch_new_three_region")
def test_three_region_order_equals_vllm(case):
    check_order(case, *zip(*case["requests_scheduled_computed"], strict=True), order="three_regions")


@golden("reorder_batch_newest_four_region")
def test_four_region_order_equals_vllm(case):
    check_order(case, *zip(*case["requests_scheduled_computed_prompt"], strict=True), order="four_regions")


def test_order_versions_differ_for_decodes_at_the_end():
    scheduled, computed = [100, 200, 1, 1], [100, 200, 10, 20]
    assert reorder(scheduled, computed, order="two_regions").order.tolist() == [3, 2, 1, 0]
    assert reorder(scheduled, computed).order.tolist() == [2, 3, 0, 1]


def test_first_chunk_of_one_token_is_a_prefill():
    assert reorder([1, 1], [0, 5]).order.tolist() == [1, 0]


def test_long_interleaved_batch_has_vllms_order():
    scheduled, computed = [1, 1, 374, 300, 1, 256, 1, 27, 1], [20, 50, 0, 20, 20, 0, 5, 0, 4]
    assert reorder(scheduled, computed).order.tolist() == [0, 1, 6, 8, 4, 3, 2, 7, 5]


@pytest.mark.parametrize("order", NAMES)
@given(rows=rows_lists, threshold=st.integers(1, 3))
def test_order_is_a_permutation_with_contiguous_regions(order, rows, threshold):
    result = reorder(*zip(*rows, strict=True), threshold, order=order)
    assert sorted(result.order.tolist()) == list(range(len(rows)))
    regions = [NAMES[order].index(region_of(rows[i], threshold, order)) for i in result.order]
    assert regions == sorted(regions)
    assert result.modified is (result.order.tolist() != list(range(len(rows))))


@pytest.mark.parametrize("order", ["three_regions", "four_regions"])
@given(rows=rows_lists, threshold=st.integers(1, 3))
def test_order_equals_the_result_of_vllms_swaps(order, rows, threshold):
    regions = [region_of(row, threshold, order) for row in rows]
    result = reorder(*zip(*rows, strict=True), threshold, order=order)
    assert result.order.tolist() == swap_along_cycles(regions, NAMES[order])


@given(rows=rows_lists, threshold=st.integers(1, 3))
def test_two_region_order_equals_the_result_of_vllms_swaps(rows, threshold):
    scheduled = [row[0] for row in rows]
    decodes = [i for i, n in enumerate(scheduled) if n <= threshold]
    prefills = [i for i, n in enumerate(scheduled) if n > threshold]
    batch = list(range(len(rows)))
    for i in range(1, min(len(decodes), len(prefills)) + 1):
        if decodes[-i] < len(decodes):
            break
        a, b = prefills[i - 1], decodes[-i]
        batch[a], batch[b] = batch[b], batch[a]
    assert reorder(scheduled, decode_threshold=threshold, order="two_regions").order.tolist() == batch


def test_inputs_are_not_changed():
    scheduled, computed = np.array([5, 1]), np.array([0, 3])
    assert reorder(scheduled, computed).modified
    assert (scheduled.tolist(), computed.tolist()) == ([5, 1], [0, 3])


def test_missing_and_misshapen_columns_are_rejected():
    with pytest.raises(ValueError, match=r"order must be one of 'two_regions', .*, got 'five_regions'"):
        reorder([1], [1], order="five_regions")
    with pytest.raises(ValueError, match="num_computed_tokens is required for order='three_regions'"):
        reorder([1])
    with pytest.raises(ValueError, match="num_prompt_tokens is required for order='four_regions'"):
        reorder([1], [1], order="four_regions")
    with pytest.raises(ValueError, match=r"num_computed_tokens must have one entry per request \(2\), got 3"):
        reorder([1, 1], [1, 1, 1])


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
def test_split_batches_contain_each_token_once_with_its_context(rows, data):
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


def test_rows_after_the_split_keep_their_context():
    metadata = make_metadata_with_slice([10, 10, 10], [2, 2, 2], (0, 3), (0, 3))
    assert metadata.query_start_loc.tolist() == [0, 2, 3, 3]
    assert metadata.seq_lens.tolist() == [10, 9, 8]


def test_graph_padding_may_follow_the_last_row():
    batch = make_metadata_with_slice([9, 9], [2, 2], (1, 2), (2, 8))
    assert (batch.num_actual_tokens, batch.query_start_loc.tolist(), batch.seq_lens.tolist()) == (
        6,
        [0, 2],
        [9],
    )


def test_slices_outside_the_batch_are_rejected():
    with pytest.raises(ValueError, match=r"request_slice must select at least one element, got \(2, 2\)"):
        slice_query_start_locs([0, 1, 2], (2, 2))
    with pytest.raises(ValueError, match="req_slice must end at or before 2, got 3"):
        make_metadata_with_slice([9, 9], [2, 2], (0, 3), (0, 4))
    with pytest.raises(ValueError, match=r"token_slice must start in row 1 \(tokens 2\.\.3\), got 1"):
        make_metadata_with_slice([9, 9], [2, 2], (1, 2), (1, 4))
    for point in (0, 4):
        with pytest.raises(ValueError, match=rf"split_point must lie in \[1, 3\], got {point}"):
            split_at_token([9, 9], [2, 2], point)


def test_arrays_of_different_lengths_are_rejected_by_slices():
    message = r"seq_lens must have one entry per request \(3\), got 1"
    with pytest.raises(ValueError, match=message):
        make_metadata_with_slice([10], [1, 2, 3], (0, 3), (0, 6))
    with pytest.raises(ValueError, match=message):
        split_at_token([10], [1, 2, 3], 3)


def test_batch_may_begin_with_an_empty_row():
    before, rest = split_at_token([4, 7, 3], [0, 3, 2], 2)
    assert before.query_start_loc.tolist() == [0, 0, 2]
    assert before.seq_lens.tolist() == [4, 6]
    assert rest.query_start_loc.tolist() == [0, 1, 3]
    assert rest.seq_lens.tolist() == [7, 3]
