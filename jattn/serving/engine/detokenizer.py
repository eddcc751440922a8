"""Tokenization of text, and incremental detokenization with stop strings."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pallas_kernels.checks import require

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # text of an incomplete character
MAX_PROMPT_CONTEXT = 6  # prompt tokens to decode with the first new ones, as in vLLM
MAX_HELD_TOKENS = 16  # held-back tokens after which invalid bytes are released
MAX_PARTIAL_TOKENS = 3  # a UTF-8 character has at most four bytes
LONG_TEXT = 4096  # characters; about 1 ms to tokenize


def tokenize(name: str, text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text.

    Raises:
        ValueError: If the text contains unpaired surrogates. The message refers to it as `name`.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:  # The tokenizer rejects unpaired surrogates.
        require(False, name, "be valid Unicode text", repr(text))
        raise


async def tokenize_async(
    tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each text. Other tasks continue while long texts are tokenized.

    `Tokenizer.encode` in a thread would block all other threads because it holds the GIL (1.8 s for 1 MB on a
    slow core); `encode_batch` releases it.
    """
    if sum(map(len, texts)) < LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
    encodings = await asyncio.to_thread(
        tokenizer.encode_batch, list(texts), add_special_tokens=add_special_tokens
    )
    return [encoding.ids for encoding in encodings]


class IncrementalDetokenizer:
    """Converts a growing token list to text, in pieces that never split a UTF-8 character.

    A token may hold only some bytes of a character. Its text is not returned until the character is complete
    or cannot become valid. Each token is decoded together with the tokens of the previous piece (initially
    the end of the prompt), since some tokenizers write a space only after another token.

    Source: vLLM `detokenize_incrementally`.
    """

    def __init__(
        self, tokenizer: Any | None, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Start after a prompt, whose text is not included. Without a tokenizer every piece is empty."""
        self.text = ""
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._token_ids = self._prompt_suffix(prompt_ids)  # tokens of the last piece and of the next one
        self._num_read = len(self._token_ids)  # number of tokens of the last piece

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer."""
        return self._tokenizer is not None

    def append(self, token_id: int) -> str:
        """Append a token, and return the newly completed text."""
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token_id)
        text_before, text = self._decode(self._token_ids[: self._num_read]), self._decode(self._token_ids)
        if len(text) <= len(text_before) or text.endswith(INCOMPLETE):
            if self._is_left_out(token_id):
                self._token_ids.pop()  # Otherwise it is decoded again with each later token.
                return ""
            num_held = len(self._token_ids) - self._num_read
            return "" if num_held % MAX_HELD_TOKENS else self._emit_complete_characters(text_before, text)
        return self._emit(text[len(text_before) :], len(self._token_ids))

    def flush(self) -> str:
        """Return the pending text, with a replacement character for an incomplete character."""
        text_before = self._decode(self._token_ids[: self._num_read])
        return self._emit(self._decode(self._token_ids)[len(text_before) :], len(self._token_ids))

    def _emit_complete_characters(self, text_before: str, text: str) -> str:
        """Return the pending text except for the last tokens, whose character may still become complete."""
        ids = self._token_ids
        for end in range(len(ids) - MAX_PARTIAL_TOKENS, len(ids) - 3 * MAX_PARTIAL_TOKENS, -1):
            decoded = self._decode(ids[:end])
            if len(decoded) > len(text_before) and decoded + self._decode(ids[end:]) == text:
                return self._emit(decoded[len(text_before) :], end)
        return ""

    def _prompt_suffix(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return some of a prompt's last tokens that neither start nor end within a character."""
        last = list(prompt_ids[-MAX_PROMPT_CONTEXT:])
        for end in range(len(last), 0, -1):
            for first in range(end):
                if INCOMPLETE not in self._decode(last[first:end]):
                    return last[first:end]
        return []

    def _is_left_out(self, token_id: int) -> bool:
        """Return whether a token has no text: a special token, or one that the tokenizer does not know."""
        assert self._tokenizer is not None
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        visible_text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return visible_text != "" and self._decode([token_id]) == ""

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _emit(self, piece: str, end: int) -> str:
        """Return a text piece, and continue after the token at index `end - 1`."""
        self._token_ids, self._num_read = self._token_ids[self._num_read :], end - self._num_read
        self.text += piece
        return piece


class StopFilter:
    """Truncates a growing text at the first stop string, and holds back text that may become one."""

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        """Start with an empty text. With `include_stop`, the stop string stays in the text."""
        self.text = ""
        self._stop, self._include_stop, self._held = tuple(stop), include_stop, ""
        self._most_held = max(map(len, self._stop), default=1) - 1
        self._num_free = 0  # held-back characters in which no stop string may end

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Append a piece of text.

        Args:
            piece: The new text.
            may_stop: Whether a stop string may end in this piece. If False, only a stop string that ends
                later counts.

        Returns:
            The text that can be shown now, and the stop string that ended the text (None if none did).
        """
        self._held += piece
        if not self._stop:
            return self.flush(), None
        if not may_stop:
            self._num_free = len(self._held)
        first_match = min(
            ((position, s) for s in self._stop if (position := self._find_stop(s)) >= 0), default=None
        )
        if first_match is not None:
            first, stop = first_match
            self._held = self._held[: first + len(stop) * self._include_stop]
            return self.flush(), stop
        return self._show(len(self._held) - self._num_held()), None

    def flush(self) -> str:
        """Return the held-back text."""
        return self._show(len(self._held))

    def _find_stop(self, stop: str) -> int:
        """Return the index of the first occurrence of a stop string in the held-back text, or -1.

        Occurrences that end within the first `_num_free` characters do not count.
        """
        return self._held.find(stop, max(self._num_free - len(stop) + 1, 0))

    def _num_held(self) -> int:
        """Return the number of characters at the end of the text that may start a stop string."""
        for n in range(min(self._most_held, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0

    def _show(self, count: int) -> str:
        visible_text, self._held = self._held[:count], self._held[count:]
        self._num_free = max(self._num_free - count, 0)
        self.text += visible_text
        return visible_text
