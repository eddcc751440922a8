"""What a Hugging Face folder makes of its tokenizer.json: which of its tokens are special."""

import json

import pytest
from tokenizers import Tokenizer, models

from jattn.models.loading.tokenizer import read_eos_token_id, read_tokenizer


def write_unlisted(folder, config):
    vocab = {"<b>": 0, "/": 1, "s": 2, "<": 3, ">": 4, "a": 5, "b": 6, "</s>": 7}
    Tokenizer(models.BPE(vocab, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_tokenizer(folder)


def test_a_special_token_of_the_tokenizer_s_model_alone_is_special(tmp_path):
    assert write_unlisted(tmp_path, {}).encode("a</s>").ids == [5, 3, 1, 2, 4]
    tokenizer = write_unlisted(tmp_path, {"eos_token": "</s>", "pad_token": "<none>"})
    assert tokenizer.encode("a</s>").ids == [5, 7]
    assert [tokenizer.decode([5, 7], skip_special_tokens=skips) for skips in (True, False)] == ["a", "a </s>"]
    assert tokenizer.get_vocab_size() == 8


def test_tokens_that_tokenizer_config_alone_calls_added_are_read_whole(tmp_path):
    listed = {
        "0": {"content": "<b>", "special": False, "normalized": False},
        "8": {"content": "<new>", "special": True},
        "9": {"content": "<newer>", "special": True, "__type": "AddedToken"},
        "11": {"content": "<far>", "special": True},  # no row that it would have
    }
    tokenizer = write_unlisted(tmp_path, {"added_tokens_decoder": listed})
    assert tokenizer.encode("<b><new>a<newer>").ids == [0, 8, 5, 9]
    assert tokenizer.token_to_id("<far>") is None
    assert tokenizer.decode([0, 8, 5, 9]) == "<b> a"
    write_unlisted(tmp_path, {"added_tokens_decoder": listed, "eos_token": "<newer>"})
    assert read_eos_token_id(tmp_path) == 9


LISTED = {"content": "<b>", "special": False}


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({}, "a <b>"),
        ({"added_tokens_decoder": {"0": LISTED | {"special": True}}}, "a"),
        ({"added_tokens_decoder": {"0": LISTED}}, "a <b>"),
        ({"added_tokens_decoder": {"0": LISTED}, "pad_token": "<b>"}, "a"),
        ({"pad_token": "<b>"}, "a"),
        ({"added_tokens_decoder": {"7": LISTED | {"content": "</s>"}}, "pad_token": "<b>"}, "a <b>"),
    ],
)
def test_a_token_that_tokenizer_json_adds_is_special_as_in_transformers(tmp_path, config, shown):
    tokenizer = write_unlisted(tmp_path, config)
    tokenizer = Tokenizer(models.BPE(tokenizer.get_vocab(), []))
    tokenizer.add_tokens(["<b>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).decode([5, 0]) == shown


@pytest.mark.parametrize("told", [5, [1], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"content": None}}])
def test_added_tokens_of_another_kind_are_named(tmp_path, told):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder must"):
        write_unlisted(tmp_path, {"added_tokens_decoder": told})
