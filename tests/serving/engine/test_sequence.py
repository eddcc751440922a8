import pytest

from jattn.serving.engine.detokenizer import IncrementalDetokenizer
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.sequence import SequenceState
from tests.serving.tiny import BYTES

A, B = BYTES.encode("ab").ids
EURO = BYTES.encode("\u20ac").ids


def sequence(max_tokens=9, stop_ids=(), **params):
    return SequenceState(
        token_ids=[7, 7],
        num_prompt_tokens=2,
        max_tokens=max_tokens,
        sampling_params=SamplingParams(**params),
        eos_ids=frozenset(stop_ids),
        text=IncrementalDetokenizer(BYTES),
    )


@pytest.mark.parametrize("ends", [{"stop_token_ids": [B]}, {"eos": [B]}])
def test_text_includes_the_stop_token_if_requested(ends):
    under_way = sequence(stop_ids=ends.pop("eos", ()), include_stop_str_in_output=True, **ends)
    for token_id in (A, EURO[0], B):
        under_way.append(token_id)
    result = under_way.result()
    assert (result.text, result.finish_reason) == ("a\ufffdb", "stop")
    assert result.stop_reason == (B if ends else None)


def test_a_stop_string_may_begin_before_min_tokens():
    for min_tokens, text in ((2, ""), (3, "aba")):
        under_way = sequence(max_tokens=3, min_tokens=min_tokens, stop="ab")
        for token_id in (A, B, A)[: 3 if min_tokens == 3 else 2]:
            under_way.append(token_id)
        assert under_way.result().text == text


@pytest.mark.parametrize(
    ("token_ids", "options", "pieces", "reason"),
    [
        ([A, B], {"max_tokens": 2}, ["a", "b"], "length"),
        ([A, B], {"stop_ids": [B]}, ["a", ""], "stop"),  # the stop token is no text
        ([A, EURO[0]], {"max_tokens": 2}, ["a", "\ufffd"], "length"),  # truncated: no text is held back
        ([EURO[0], B], {"stop_ids": [B]}, ["", "\ufffd"], "stop"),
        ([A, B], {"max_tokens": 2, "stop_ids": [B]}, ["a", ""], "stop"),
    ],
)
def test_finished_sequence_returns_all_its_text(token_ids, options, pieces, reason):
    under_way = sequence(**options)
    for token_id in token_ids:
        assert under_way.finish_reason is None
        under_way.append(token_id)
    assert under_way.texts == pieces
    result = under_way.result()
    assert (result.token_ids, result.text) == (token_ids, "".join(pieces))
    assert (result.finish_reason, result.metrics.num_tokens) == (reason, 2)
