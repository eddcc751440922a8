"""Tokens to text, one token at a time."""

from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to


class TextStream:
    """The text of a growing list of tokens, in pieces that never cut a UTF-8 character.

    A token may hold a part of a character; its bytes are held back until the character is complete. A token
    is decoded together with those of the piece before it, since some tokenizers write a space only behind
    another token.

    Source: vLLM `detokenize_incrementally`.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        """Starts empty; `tokenizer` None = every piece is empty."""
        self.text = ""
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._context = self._read = 0  # first token of the last piece, and of the one to come

    def append(self, token_id: int) -> str:
        """Takes one more token; returns the text that is complete now and was not before."""
        self._token_ids.append(token_id)
        before = self._decode(self._context, self._read)
        now = self._decode(self._context, len(self._token_ids))
        if len(now) <= len(before) or now.endswith(INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._token_ids)
        return self._emit(now[len(before) :])

    def flush(self) -> str:
        """The text held back, with a replacement character for what never became complete."""
        whole = self._decode(0, len(self._token_ids))
        return self._emit(whole[len(self.text) :]) if whole.startswith(self.text) else ""

    def _decode(self, first: int, end: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(self._token_ids[first:end])

    def _emit(self, piece: str) -> str:
        self.text += piece
        return piece
