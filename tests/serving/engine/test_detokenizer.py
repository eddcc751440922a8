import hypothesis.strategies as st
import pytest
from hypothesis import given

from jattn.serving.engine.detokenizer import IncrementalDetokenizer, StopFilter
from tests.serving.tiny import BYTES, llama_tokenizer

tokenizers = pytest.importorskip("tokenizers")
LLAMA = llama_tokenizer()
EURO, FACE, LATIN = (BYTES.encode(text).ids for text in ("\u20ac", "\U0001f600", "a"))
NEVER = BYTES.token_to_id("\u00ff")  # a byte that no character has
BOS, EOS = 1, 2
HELLO, WORLD, SPACE = (LLAMA.token_to_id(f"\u2581{word}") for word in ("Hello", "world", ""))


def pieces_of(tokenizer, token_ids, prompt_ids=(), **options):
    stream = IncrementalDetokenizer(tokenizer, prompt_ids, **options)
    pieces = [stream.append(token_id) for token_id in token_ids]
    pieces.append(stream.flush())
    assert stream.text == "".join(pieces)
    return pieces


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_piece_splits_a_character(text):
    pieces = pieces_of(BYTES, BYTES.encode(text).ids)
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert pieces[-1] == ""  # no complete character was held back


@given(st.lists(st.integers(0, 255), max_size=12))
def test_invalid_bytes_decode_as_in_the_tokenizer(token_ids):
    assert "".join(pieces_of(BYTES, token_ids)) == BYTES.decode(token_ids)


def test_a_character_appears_with_its_last_byte():
    assert pieces_of(BYTES, BYTES.encode("a\u20ac!").ids) == ["a", "", "", "\u20ac", "!", ""]


def test_an_incomplete_character_is_flushed():
    euro = BYTES.encode("\u20ac").ids
    assert pieces_of(BYTES, euro[:2]) == ["", "", "\ufffd"]


class CountingTokenizer:
    """A tokenizer that counts the tokens of each decode call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.id_to_token, self.counts = tokenizer, tokenizer.id_to_token, []

    def decode(self, ids, **options):
        self.counts.append(len(ids))
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("token_ids", [[NEVER], EURO[:2], [*EURO, NEVER], FACE[:3], [*FACE[:3], EURO[0]]])
def test_bytes_that_never_become_a_character_are_not_held_back_forever(token_ids):
    tokenizer, ids = CountingTokenizer(BYTES), token_ids * 200
    pieces = pieces_of(tokenizer, ids)
    assert ("".join(pieces), max(map(len, pieces)) <= 16) == (BYTES.decode(ids), True)
    assert max(tokenizer.counts) <= 40


@given(st.lists(st.sampled_from([*EURO, *FACE, *LATIN, NEVER]), min_size=16, max_size=80))
def test_long_invalid_texts_decode_as_in_the_tokenizer(ids):
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids)


def test_leading_spaces_of_words_are_kept():
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581bc": 2, "d": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert pieces_of(tokenizer, [1, 2, 3, 1]) == ["a", " bc", "d", " a", ""]


@pytest.mark.parametrize(
    ("prompt_ids", "pieces"),
    [
        ([], ["world", " Hello", ""]),
        ([BOS], ["world", " Hello", ""]),
        ([BOS, HELLO], [" world", " Hello", ""]),
        ([BOS, HELLO, EOS], [" world", " Hello", ""]),
        ([HELLO] * 9, [" world", " Hello", ""]),
        ([HELLO, *LLAMA.encode("\u20ac").ids[:-1]], [" world", " Hello", ""]),
    ],
)
def test_the_first_space_after_a_prompt_is_kept(prompt_ids, pieces):
    assert pieces_of(LLAMA, [WORLD, HELLO], prompt_ids) == pieces


def test_text_after_special_tokens_and_spaces_decodes_as_in_the_tokenizer():
    ids = [SPACE, SPACE, EOS, WORLD, EOS]
    assert "".join(pieces_of(LLAMA, ids)) == LLAMA.decode(ids) == "  world"
    shown = pieces_of(LLAMA, ids, [BOS, HELLO], skip_special_tokens=False)
    assert shown == [" ", " ", "</s>", " world", "</s>", ""]


@given(st.lists(st.integers(0, 255), max_size=12), st.lists(st.integers(0, 255), max_size=12))
def test_a_prompt_changes_nothing_where_tokens_are_bytes(prompt_ids, token_ids):
    assert pieces_of(BYTES, token_ids, prompt_ids) == pieces_of(BYTES, token_ids)


def test_tokens_without_text_are_not_decoded_repeatedly():
    tokenizer = CountingTokenizer(LLAMA)
    pieces = pieces_of(tokenizer, [EOS] * 200 + [len(LLAMA.get_vocab())] * 200 + [WORLD], [HELLO])
    assert ("".join(pieces), max(tokenizer.counts)) == (" world", 2)


class TestStopFilter:
    def feed_all(self, stop, *pieces):
        """Return the released text, the held text in brackets, and the stop string; pieces in parentheses
        may not stop.
        """
        stop_filter, stop_string = StopFilter(stop), None
        for piece in pieces:
            _, stop_string = stop_filter.feed(piece.strip("()"), may_stop=not piece.startswith("("))
        stop_filter.flush()
        return stop_filter.text, stop_string

    def test_a_stop_string_may_begin_before_it_may_end(self):
        assert self.feed_all(["bc"], "(a)", "(b)", "c") == ("a", "bc")
        assert self.feed_all(["bc"], "(a)", "(b)", "(c)", "d") == ("abcd", None)
        assert self.feed_all(["aa"], "(aa)", "a") == ("a", "aa")

    def test_a_stop_string_before_min_tokens_stays_in_the_text(self):
        assert self.feed_all(["ab", "xabc"], "(xab)", "d") == ("xabd", None)
        assert self.feed_all(["ab", "xabc"], "(xab)", "c") == ("", "xabc")
        assert self.feed_all(["ab", "xabc"], "(xab)", "dab") == ("xabd", "ab")


def test_without_a_tokenizer_there_is_no_text():
    assert pieces_of(None, [1, 2]) == ["", "", ""]
