import pytest

from jattn.vllm.graph_dispatch import BatchDescriptor, dispatch_cudagraph, make_graph_keys
from jattn.vllm.graph_modes import AttentionCGSupport as Support
from jattn.vllm.graph_modes import CUDAGraphMode as Mode
from jattn.vllm.graph_modes import resolve_cudagraph_mode
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


def test_a_batch_is_padded_to_the_next_graph():
    keys = make_graph_keys(Mode.FULL_AND_PIECEWISE, [1, 8, 16], max_num_seqs=8)
    assert dispatch_cudagraph(keys, 5, uniform_decode=True) == (
        Mode.FULL,
        BatchDescriptor(8, 8, uniform=True),
    )
    assert dispatch_cudagraph(keys, 9, uniform_decode=True) == (Mode.PIECEWISE, BatchDescriptor(16))


def test_decode_graphs_exist_for_sizes_of_one_to_all_requests():
    keys = make_graph_keys(
        Mode.FULL_DECODE_ONLY, [1, 3, 6, 12, 24], max_num_seqs=4, uniform_decode_query_len=3
    )
    assert sorted(key.num_tokens for key in keys.full) == [3, 6, 12]
    assert keys.piecewise == frozenset()


def test_uniform_batches_are_padded_to_whole_rows_only():
    keys = make_graph_keys(Mode.FULL_DECODE_ONLY, [4, 6, 8], max_num_seqs=4, uniform_decode_query_len=3)
    assert dispatch_cudagraph(keys, 3, uniform_decode=True) == (
        Mode.FULL,
        BatchDescriptor(6, 2, uniform=True),
    )
    assert dispatch_cudagraph(keys, 3) == (Mode.NONE, None)


def test_lora_batches_need_lora_graphs():
    plain = make_graph_keys(Mode.FULL, [8], max_num_seqs=8)
    both = make_graph_keys(Mode.FULL, [8], max_num_seqs=8, lora_cases=(False, True))
    assert dispatch_cudagraph(plain, 8, has_lora=True) == (Mode.NONE, None)
    assert dispatch_cudagraph(both, 8, has_lora=True) == (Mode.FULL, BatchDescriptor(8, has_lora=True))


def test_mode_none_has_no_graphs():
    keys = make_graph_keys(Mode.NONE, [8], max_num_seqs=8)
    assert dispatch_cudagraph(keys, 8, uniform_decode=True) == (Mode.NONE, None)


def test_keys_need_requests():
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
def test_modes_treat_decodes_and_mixed_batches_as_vllm_does(mode, decode, mixed, separate):
    assert (Mode[mode].decode_mode, Mode[mode].mixed_mode) == (Mode[decode], Mode[mixed])
    assert Mode[mode].has_separate_routine is separate


def test_the_least_support_is_the_models():
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
def test_mode_is_lowered_to_what_the_back_ends_allow(mode, support, query_len, split_op, expected):
    resolved = resolve_cudagraph_mode(
        Mode[mode], Support[support], uniform_decode_query_len=query_len, attention_is_split_op=split_op
    )
    assert resolved is Mode[expected]


def test_whole_mixed_graphs_without_any_support_are_refused():
    with pytest.raises(ValueError, match=r"cudagraph mode must not be FULL .*PIECEWISE.*, got FULL\."):
        resolve_cudagraph_mode(Mode.FULL, Support.NEVER)
