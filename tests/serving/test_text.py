import hypothesis.strategies as st
import pytest
from hypothesis import given

from jattn.serving.text import TextStream
from tests.serving.tiny import BYTES

tokenizers = pytest.importorskip("tokenizers")


def pieces_of(tokenizer, token_ids):
    stream = TextStream(tokenizer)
    pieces = [stream.append(token_id) for token_id in token_ids]
    pieces.append(stream.flush())
    assert stream.text == "".join(pieces)
    return pieces


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_piece_cuts_a_character(text):
    pieces = pieces_of(BYTES, BYTES.encode(text).ids)
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert pieces[-1] == ""  # nothing complete was held back


@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_read_as_the_tokenizer_reads_them(token_ids):
    assert "".join(pieces_of(BYTES, token_ids)) == BYTES.decode(token_ids)


def test_a_character_appears_with_its_last_byte():
    assert pieces_of(BYTES, BYTES.encode("a\u20ac!").ids) == ["a", "", "", "\u20ac", "!", ""]


def test_what_never_becomes_complete_is_flushed():
    euro = BYTES.encode("\u20ac").ids
    assert pieces_of(BYTES, euro[:2]) == ["", "", "\ufffd"]


def test_spaces_that_stand_in_front_of_words_survive():
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581bc": 2, "d": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert pieces_of(tokenizer, [1, 2, 3, 1]) == ["a", " bc", "d", " a", ""]


def test_without_a_tokenizer_there_is_no_text():
    assert pieces_of(None, [1, 2]) == ["", "", ""]
