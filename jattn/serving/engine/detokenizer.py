"""Texts to tokens, and tokens to text, one token at a time."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pallas_kernels.checks import require

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to
MOST_PROMPT = 6  # tokens of a prompt that are looked at, about as many as in vLLM
MOST_HELD = 16  # tokens held back before those that complete no character are let go
MOST_PARTS = 3  # tokens that may be the beginning of a character, which has four bytes at most
LONG_TEXT = 4096  # characters from which on a text's tokens are made in a thread: a millisecond's work


def tokens_of(name: str, text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """A text's tokens.

    Raises:
        ValueError: It has halves of characters; `name` is what it is called.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:  # what the package says of surrogates, as Python has bytes that are no UTF-8
        require(False, name, "be text that UTF-8 can hold", repr(text))
        raise


async def encoded(
    tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """The tokens of each text; those of long ones while other tasks go on.

    In a thread `Tokenizer.encode` would hold up all others: it keeps the interpreter's lock. Over 1 MB that
    is 1.8 s of a slow core. `encode_batch` gives it back.
    """
    if sum(map(len, texts)) < LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
    make = lambda: tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    return [made.ids for made in await asyncio.to_thread(make)]


class TextStream:
    """The text of a growing list of tokens, in pieces that never cut a UTF-8 character.

    A token may hold a part of a character; its bytes are held back until the character is complete, or so
    many have come that they are none. A token is decoded together with those of the piece before it, at first
    the prompt's last ones, since some tokenizers write a space only behind another token.

    Source: vLLM `detokenize_incrementally`.
    """

    def __init__(
        self, tokenizer: Any | None, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Starts empty, behind a prompt that is no part of it; `tokenizer` None = every piece is empty."""
        self.text = ""
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._token_ids = self._end_of(prompt_ids)  # tokens of the last piece, and of the one to come
        self._num_read = len(self._token_ids)  # those of the last piece

    @property
    def has_tokenizer(self) -> bool:
        """Whether pieces ever hold something."""
        return self._tokenizer is not None

    def append(self, token_id: int) -> str:
        """Takes one more token; returns the text that is complete now and was not before."""
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token_id)
        before, now = self._decode(self._token_ids[: self._num_read]), self._decode(self._token_ids)
        if len(now) <= len(before) or now.endswith(INCOMPLETE):
            if self._is_left_out(token_id):
                self._token_ids.pop()  # else a thousand of them would be decoded with each that follows
                return ""
            num_held = len(self._token_ids) - self._num_read
            return "" if num_held % MOST_HELD else self._let_go(before, now)
        return self._emit(now[len(before) :], len(self._token_ids))

    def flush(self) -> str:
        """The text held back, with a replacement character for what never became complete."""
        before = self._decode(self._token_ids[: self._num_read])
        return self._emit(self._decode(self._token_ids)[len(before) :], len(self._token_ids))

    def _let_go(self, before: str, now: str) -> str:
        """What is held back but for the last tokens, whose character may come; cut between two characters."""
        ids = self._token_ids
        for end in range(len(ids) - MOST_PARTS, len(ids) - 3 * MOST_PARTS, -1):
            done = self._decode(ids[:end])
            if len(done) > len(before) and done + self._decode(ids[end:]) == now:
                return self._emit(done[len(before) :], end)
        return ""

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Some of a prompt's last tokens, that neither begin nor end within a character."""
        last = list(prompt_ids[-MOST_PROMPT:])
        for end in range(len(last), 0, -1):
            for first in range(end):
                if INCOMPLETE not in self._decode(last[first:end]):
                    return last[first:end]
        return []

    def _is_left_out(self, token_id: int) -> bool:
        """Whether the token is in no text at all: a special one, or one that the tokenizer does not have."""
        assert self._tokenizer is not None
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        shown = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return shown != "" and self._decode([token_id]) == ""

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _emit(self, piece: str, end: int) -> str:
        """Hands out the text of the tokens before number `end`."""
        self._token_ids, self._num_read = self._token_ids[self._num_read :], end - self._num_read
        self.text += piece
        return piece


class StopFilter:
    """Cuts a growing text at the first stop string, and holds back what may become one."""

    def __init__(self, stop: Sequence[str] = (), *, keeps_it: bool = False) -> None:
        """Starts empty; `keeps_it`: the stop string stays in the text."""
        self.text = ""
        self._stop, self._keeps_it, self._held = tuple(stop), keeps_it, ""
        self._most_held = max(map(len, self._stop), default=1) - 1
        self._num_free = 0  # of the characters held, those that no stop string may end with

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes what comes next.

        Args:
            piece: Text.
            may_stop: Without it a stop string that ends here is text like any other; one that begins here
                may end later.

        Returns:
            What may be shown now, and the stop string that ended the text; None = none did.
        """
        self._held += piece
        if not self._stop:
            return self.flush(), None
        if not may_stop:
            self._num_free = len(self._held)
        found = min(((place, s) for s in self._stop if (place := self._place(s)) >= 0), default=None)
        if found is not None:
            first, stop = found
            self._held = self._held[: first + len(stop) * self._keeps_it]
            return self.flush(), stop
        return self._show(len(self._held) - self._num_held()), None

    def flush(self) -> str:
        """What was held back."""
        return self._show(len(self._held))

    def _place(self, stop: str) -> int:
        """Where a stop string is in what is held, if it ends where one may; -1 = nowhere."""
        return self._held.find(stop, max(self._num_free - len(stop) + 1, 0))

    def _num_held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        for n in range(min(self._most_held, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._num_free = max(self._num_free - count, 0)
        self.text += shown
        return shown
