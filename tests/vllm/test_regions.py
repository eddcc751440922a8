import numpy as np
import pytest

from jattn.vllm.regions import split_prefill_and_decode
from tests.golden_cases import golden


def check(region, expected):
    for name, value in expected.items():
        got = getattr(region, name)
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value, name


@golden("v0_blocksparse_prefill_decode_split")
def test_v0_takes_prefills_first_and_drops_the_decodes_queries(case):
    query_lens = case["seq_lens"][: case["num_prefills"]] + [1] * case["num_decode_tokens"]
    halves = split_prefill_and_decode(
        query_lens, case["seq_lens"], case["slot_mapping"], num_prefills=case["num_prefills"]
    )
    check(halves.prefill, case["expected"]["prefill"])
    check(halves.decode, case["expected"]["decode"])


@golden("v1_xformers_prefill_decode_split")
def test_v1_takes_decodes_first_and_counts_prefill_tokens_from_0(case):
    halves = split_prefill_and_decode(case["query_lens"], case["seq_lens"], case["slot_mapping"])
    expected = case["expected"]
    check(halves.prefill, expected["prefill"])
    check(halves.decode, expected["decode"])
    assert len(halves.decode.seq_lens) == expected["num_decodes"]
    assert len(halves.prefill.slot_mapping) == expected["num_prefill_tokens"]


def test_a_region_without_rows_is_none():
    assert split_prefill_and_decode([1, 1], [5, 6], [3, 4]).prefill is None
    assert split_prefill_and_decode([5, 6], [5, 6], range(11)).decode is None
    assert split_prefill_and_decode([5, 6], [5, 6], range(11), num_prefills=2).decode is None
    assert split_prefill_and_decode([1, 1], [5, 6], [3, 4], num_prefills=0).prefill is None


def test_the_decode_threshold_moves_the_boundary():
    halves = split_prefill_and_decode([2, 1, 3], [9, 9, 3], range(6), decode_threshold=2)
    assert halves.decode.query_start_loc.tolist() == [0, 2, 3]
    assert halves.prefill.slot_mapping.tolist() == [3, 4, 5]


def test_tokens_without_a_slot_and_more_prefills_than_rows_are_refused():
    with pytest.raises(ValueError, match="slot_mapping must have a slot for each of 5 tokens, got 2"):
        split_prefill_and_decode([1, 4], [5, 6], [0, 1])
    for count in (3, -1):
        with pytest.raises(ValueError, match=rf"num_prefills must lie in \[0, 2\], got {count}"):
            split_prefill_and_decode([1, 4], [5, 6], range(5), num_prefills=count)
