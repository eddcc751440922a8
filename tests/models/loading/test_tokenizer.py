"""Special and added tokens of a folder's tokenizer match transformers."""

import json

import pytest
from tokenizers import Tokenizer, models

from jattn.models import load, save
from jattn.models.loading.tokenizer import read_tokenizer
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_checkpoint


def write_unlisted(folder, config):
    vocab = {"<b>": 0, "/": 1, "s": 2, "<": 3, ">": 4, "a": 5, "b": 6, "</s>": 7}
    Tokenizer(models.BPE(vocab, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_tokenizer(folder).backend_tokenizer


def test_special_tokens_may_be_only_in_the_vocabulary(tmp_path):
    assert write_unlisted(tmp_path, {}).encode("a</s>").ids == [5, 3, 1, 2, 4]
    tokenizer = write_unlisted(tmp_path, {"eos_token": "</s>"})
    assert tokenizer.encode("a</s>").ids == [5, 7]
    assert [tokenizer.decode([5, 7], skip_special_tokens=skips) for skips in (True, False)] == ["a", "a </s>"]
    assert tokenizer.get_vocab_size() == 8


def test_added_tokens_of_tokenizer_config_are_single_tokens(tmp_path):
    listed = {
        "0": {"content": "<b>", "special": False, "normalized": False},
        "8": {"content": "<new>", "special": True},
        "9": {"content": "<newer>", "special": True, "__type": "AddedToken"},
    }
    tokenizer = write_unlisted(tmp_path, {"added_tokens_decoder": listed})
    assert tokenizer.encode("<b><new>a<newer>").ids == [0, 8, 5, 9]
    assert tokenizer.decode([0, 8, 5, 9]) == "<b> a"
    write_unlisted(tmp_path, {"added_tokens_decoder": listed, "eos_token": "<newer>"})
    assert read_tokenizer(tmp_path).eos_token_id == 9


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
def test_special_flags_of_added_tokens_match_transformers(tmp_path, config, shown):
    tokenizer = write_unlisted(tmp_path, config)
    tokenizer = Tokenizer(models.BPE(tokenizer.get_vocab(), []))
    tokenizer.add_tokens(["<b>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).backend_tokenizer.decode([5, 0]) == shown


@pytest.mark.parametrize("config", [5, [1], {"x": {"content": "a"}}, {"1": "a"}])
def test_invalid_added_tokens_are_reported_with_their_files(tmp_path, config):
    message = rf"{tmp_path}/tokenizer\.json must be a tokenizer .* with tokenizer_config\.json, got"
    with pytest.raises(ValueError, match=message):
        write_unlisted(tmp_path, {"added_tokens_decoder": config})


TIED, UNTIED = CONFIGS["llama3_rope"], CONFIGS["llama_biases"]


@pytest.mark.kernels
@pytest.mark.parametrize("named", ["<end>", {"__type": "AddedToken", "content": "<end>", "special": True}])
def test_the_tokenizer_s_eos_token_ends_sequences_as_well(tmp_path, named):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": None}, random_tensors(TIED))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path, progress=False).config.eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    model = load(tmp_path, progress=False)
    assert model.config.eos_token_ids == (3,)
    save(model, tmp_path / "again")
    assert load(tmp_path / "again", progress=False).config.eos_token_ids == (3,)
    for ids, expected in ([5], (5, 3)), ([3, 5], (3, 5)):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert load(tmp_path, progress=False).config.eos_token_ids == expected
    tokenizer.add_tokens([f"<{i}>" for i in range(100)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<99>"}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (3, 5)  # the model has no such row


@pytest.mark.parametrize(
    "tokens",
    [models.WordLevel({"a": 0, "</s>": 2}, unk_token="a"), models.Unigram([("a", 0.0), ("</s>", 0.0)])],
)
def test_eos_token_may_be_only_in_the_tokenizer_s_vocabulary(tmp_path, tokens):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": None}, random_tensors(TIED))
    tokenizer = Tokenizer(tokens)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (tokenizer.token_to_id("</s>"),)


def test_the_tokenizer_neither_truncates_nor_pads(tmp_path):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8, pad_id=1, pad_token="b")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, progress=False)
    assert [model.tokenizer.encode(text).ids for text in ("a", "a" * 9)] == [[0], [0] * 9]


@pytest.mark.parametrize("added", [[5], 5])
def test_an_invalid_tokenizer_is_reported_with_its_file(tmp_path, added):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer\.json must be a tokenizer .*, got"):
        load(tmp_path, progress=False)
