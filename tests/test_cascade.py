import pytest

from jattn.vllm import use_cascade_attention
from tests.golden_cases import golden

LONG_SHARED_PREFIX = dict(
    common_prefix_len=4096,
    query_lens=[1] * 32,
    num_query_heads=32,
    num_kv_heads=8,
    use_alibi=False,
    use_sliding_window=False,
    use_local_attention=False,
    num_sms=132,
)


@golden("use_cascade_attention")
def test_choice_equals_vllm(case):
    case = dict(case)
    expected = case.pop("expected")
    query_lens = [case.pop("query_len_each")] * case.pop("num_reqs")
    assert use_cascade_attention(query_lens=query_lens, **case) is expected


@pytest.mark.parametrize(
    "hindrance",
    [
        dict(common_prefix_len=255),
        dict(query_lens=[1] * 7),
        dict(use_alibi=True),
        dict(use_sliding_window=True),
        dict(use_local_attention=True),
        dict(dcp_world_size=2),
    ],
    ids=lambda hindrance: next(iter(hindrance)),
)
def test_each_hindrance_alone_rules_cascade_out(hindrance):
    assert use_cascade_attention(**LONG_SHARED_PREFIX) is True
    assert use_cascade_attention(**LONG_SHARED_PREFIX | hindrance) is False


def test_batches_that_cannot_run_as_flash_decoding_always_cascade():
    few = LONG_SHARED_PREFIX | dict(query_lens=[1] * 8)
    assert use_cascade_attention(**few) is False
    assert use_cascade_attention(**few | dict(query_lens=[1] * 7 + [2])) is True
    assert use_cascade_attention(**few | dict(num_kv_heads=32)) is True
