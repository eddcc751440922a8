"""allowed_token_ids and bad_words, and special tokens in the text."""

import pytest
import tokenizers

from jattn.serving import SamplingParams
from jattn.serving.engine import logits_processors
from jattn.serving.engine.logits_processors import bad_word_ids, token_masks
from jattn.serving.engine.structured_outputs import Grammars, StructuredOutputsParams
from tests.serving.server.live_server import small_engine
from tests.serving.tiny import BYTES

GRAMMARS = Grammars(BYTES, 320, ())


@pytest.fixture(scope="module")
def engine():
    return small_engine()


def generate(engine, count=24, **params):
    (result,) = engine.generate(["ab"], SamplingParams(max_tokens=count, **params))
    return result


def mask_of(**params):
    return token_masks(SamplingParams(**params), tokenizer=BYTES, vocab_size=320, grammars=GRAMMARS)()


def allowed(mask):
    words = mask.allowed_bitmask()
    return {token for token in range(32 * len(words)) if words[token // 32] >> (token % 32) & 1}


class TestMasks:
    def test_requests_without_filters_have_no_mask(self):
        assert mask_of() is None

    def test_only_allowed_tokens_are_in_the_mask(self):
        mask = mask_of(allowed_token_ids=[3, 64, 319])
        assert (allowed(mask), mask.is_fixed, mask.is_done) == ({3, 64, 319}, True, False)
        mask.accept(3)
        assert allowed(mask) == {3, 64, 319}

    def test_the_last_token_of_a_word_is_banned_after_the_others(self):
        a, b, c = BYTES.encode("abc").ids
        mask = mask_of(bad_words=["abc", "bb", "c"])
        everything = set(range(320)) - {c}
        assert (allowed(mask), mask.is_fixed) == (everything, False)
        seen = []
        for token in (a, b, b, a, b):
            mask.accept(token)
            seen.append(everything - allowed(mask))
        assert seen == [set(), {b}, {b}, set(), {b}]

    def test_text_ends_if_no_token_is_allowed(self):
        a, b = BYTES.encode("ab").ids
        mask = mask_of(allowed_token_ids=[a, b], bad_words=["b", "aa"])
        assert (allowed(mask), mask.is_done) == ({a}, False)
        mask.accept(a)
        assert mask.is_done

    def test_words_are_banned_within_a_text(self):
        vocab = {"x": 0, "_": 1, "_no": 2, "no": 3}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="x"))
        split = tokenizers.pre_tokenizers.Metaspace(replacement="_", prepend_scheme="never")
        tokenizer.pre_tokenizer = split
        assert bad_word_ids("no", tokenizer) == [[3], [2]]
        assert bad_word_ids("no", BYTES) == [BYTES.encode("no").ids]


class TestEngine:
    def test_only_allowed_tokens_are_generated(self, engine):
        ids = BYTES.encode("xyz").ids
        text = generate(engine, temperature=1.0, seed=1, allowed_token_ids=ids).text
        assert (len(text), set(text) <= set("xyz"), len(set(text)) > 1) == (24, True, True)

    def test_bad_words_are_not_generated(self, engine):
        some = {"allowed_token_ids": BYTES.encode("xyz").ids, "temperature": 1.0, "seed": 1}
        text = generate(engine, **some).text
        words = ["zx", text[:3]]
        assert all(word in text for word in words)
        filtered = generate(engine, **some, bad_words=words)
        assert not any(word in filtered.text for word in words)
        assert len(filtered.text) == 24

    def test_a_text_without_allowed_tokens_stops(self, engine):
        ids = BYTES.encode("xy").ids
        result = generate(engine, allowed_token_ids=ids, bad_words=["xx", "yy", "xyx", "yxy"])
        assert (result.text in ("xy", "yx"), result.finish_reason) == (True, "stop")

    def test_words_become_tokens_once_for_all_completions(self, engine, monkeypatch):
        texts = []
        known = lambda word, tokenizer: texts.append(word) or bad_word_ids(word, tokenizer)
        monkeypatch.setattr(logits_processors, "bad_word_ids", known)
        generate(engine, 2, n=4, temperature=1.0, bad_words=["zx", "yy"])
        assert texts == ["zx", "yy"]

    def test_fixed_masks_do_not_delay_steps(self, engine):
        """Steps start before the tokens of earlier steps are read, as often as without masks."""
        before = engine.stats.num_steps
        generate(engine)
        plain = engine.stats.num_steps - before
        generate(engine, allowed_token_ids=[5, 6])
        assert engine.stats.num_steps - before == 2 * plain

    def test_special_tokens_are_in_the_text_if_requested(self, engine):
        tokenizer = tokenizers.Tokenizer.from_str(BYTES.to_str())
        tokenizer.add_special_tokens(["<special>"])
        before, engine.tokenizer = engine.tokenizer, tokenizer
        try:
            params = {"count": 2, "allowed_token_ids": [256]}
            assert generate(engine, **params).text == ""
            assert generate(engine, **params, skip_special_tokens=False).text == "<special>" * 2
        finally:
            engine.tokenizer = before


class TestErrors:
    def test_allowed_token_ids_must_not_be_empty(self):
        with pytest.raises(ValueError, match=r"allowed_token_ids must hold at least one token id, got \(\)"):
            SamplingParams(allowed_token_ids=[])

    @pytest.mark.parametrize(("name", "value"), [("allowed_token_ids", (1,)), ("bad_words", ("a",))])
    def test_structured_outputs_conflict_with_filters(self, name, value):
        form = StructuredOutputsParams(regex="a")
        with pytest.raises(ValueError, match=rf"{name} cannot be combined with structured_outputs"):
            SamplingParams(structured_outputs=form, **{name: value})

    def test_tokens_must_be_in_the_vocabulary_and_not_all_banned(self, engine):
        with pytest.raises(ValueError, match=r"allowed_token_ids must be in the vocabulary.*got \[320\]"):
            generate(engine, allowed_token_ids=[320])
        with pytest.raises(
            ValueError, match=r"bad_words and allowed_token_ids together forbid every token\."
        ):
            generate(engine, allowed_token_ids=BYTES.encode("x").ids, bad_words=["x"])

    def test_bad_words_require_a_tokenizer(self):
        with pytest.raises(ValueError, match=r"bad_words contains 'x', which requires a tokenizer"):
            bad_word_ids("x", None)
        split = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
        split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        with pytest.raises(ValueError, match=r"bad_words must be valid Unicode text, got '\\udc80'"):
            bad_word_ids("\udc80", BYTES)
        with pytest.raises(ValueError, match=r"bad_words must not be blank, got ' '"):
            bad_word_ids(" ", split)
