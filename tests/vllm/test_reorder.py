import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.reorder import reorder_batch_to_split_decodes_and_prefills as reorder
from tests.golden_cases import golden

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
    """vLLM's loop over swap_states, on a list of row numbers."""
    wanted = sorted(regions, key=names.index)
    wrong = [i for i in range(len(regions)) if regions[i] != wanted[i]]
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


def check(case, *columns, order):
    result = reorder(*columns, decode_threshold=case["decode_threshold"], order=order)
    assert result.order.tolist() == case["expected_order"]
    assert result.modified is case["expected_modified"]


@golden("reorder_batch_seed_two_region")
def test_two_region_order_equals_vllm(case):
    check(case, case["num_scheduled_tokens"], order="two_regions")


@golden("reorder_batch_new_three_region")
def test_three_region_order_equals_vllm(case):
    check(case, *zip(*case["requests_scheduled_computed"], strict=True), order="three_regions")


@golden("reorder_batch_newest_four_region")
def test_four_region_order_equals_vllm(case):
    check(case, *zip(*case["requests_scheduled_computed_prompt"], strict=True), order="four_regions")


def test_versions_differ_where_decodes_stand_at_the_end():
    scheduled, computed = [100, 200, 1, 1], [100, 200, 10, 20]
    assert reorder(scheduled, computed, order="two_regions").order.tolist() == [3, 2, 1, 0]
    assert reorder(scheduled, computed).order.tolist() == [2, 3, 0, 1]


def test_a_first_chunk_of_one_token_is_a_prefill():
    assert reorder([1, 1], [0, 5]).order.tolist() == [1, 0]


def test_a_long_interleaved_batch_takes_vllms_order():
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
def test_order_is_where_vllms_swaps_end(order, rows, threshold):
    regions = [region_of(row, threshold, order) for row in rows]
    result = reorder(*zip(*rows, strict=True), threshold, order=order)
    assert result.order.tolist() == swap_along_cycles(regions, NAMES[order])


@given(rows=rows_lists, threshold=st.integers(1, 3))
def test_two_region_order_is_where_vllms_swaps_end(rows, threshold):
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


def test_missing_and_misshapen_columns_are_refused():
    with pytest.raises(ValueError, match=r"order must be one of 'two_regions', .*, got 'five_regions'"):
        reorder([1], [1], order="five_regions")
    with pytest.raises(ValueError, match="num_computed_tokens must be given for three_regions, got None"):
        reorder([1])
    with pytest.raises(ValueError, match="num_prompt_tokens must be given for four_regions, got None"):
        reorder([1], [1], order="four_regions")
    with pytest.raises(ValueError, match=r"num_computed_tokens must have one entry per request \(2\), got 3"):
        reorder([1, 1], [1, 1, 1])
