import pytest

from jattn.vllm.partitions import choose_paged_attention_version
from tests.golden_cases import golden


@golden("paged_attention_v1_v2_rule")
def test_choice_equals_vllm(case):
    chosen = choose_paged_attention_version(case["max_seq_len"], case["num_seqs"], case["num_heads"])
    assert chosen == (case["expected_use_v1"], case["max_num_partitions"])


def test_long_contexts_take_v2_however_full_the_gpu_is():
    assert choose_paged_attention_version(8192, 1000, 32).use_v1 is True
    assert choose_paged_attention_version(8193, 1000, 32).use_v1 is False


def test_a_context_needs_keys():
    with pytest.raises(ValueError, match="max_seq_len must be positive, got 0"):
        choose_paged_attention_version(0, 1, 1)
