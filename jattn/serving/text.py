"""Tokens to text, one token at a time."""

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to


class TextStream:
    """The text of a growing list of tokens, in pieces that never cut a UTF-8 character.

    A token may hold a part of a character; its bytes are held back until the character is complete. A token
    is decoded together with those of the piece before it, since some tokenizers write a space only behind
    another token.

    Source: vLLM `detokenize_incrementally`.
    """

    def __init__(self, tokenizer: Any | None, *, skip_special_tokens: bool = True) -> None:
        """Starts empty; `tokenizer` None = every piece is empty."""
        self.text = ""
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._token_ids: list[int] = []
        self._context = self._read = 0  # first token of the last piece, and of the one to come

    @property
    def has_tokenizer(self) -> bool:
        """Whether pieces ever hold something."""
        return self._tokenizer is not None

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
        if self._tokenizer is None:
            return ""
        ids = self._token_ids[first:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

    def _emit(self, piece: str) -> str:
        self.text += piece
        return piece


class StopFilter:
    """Cuts a growing text at the first stop string, and holds back what may become one."""

    def __init__(self, stop: Sequence[str] = (), *, keeps_it: bool = False) -> None:
        """Starts empty; `keeps_it`: the stop string stays in the text."""
        self.text = ""
        self._stop, self._keeps_it, self._held = tuple(stop), keeps_it, ""
        self._most_held = max(map(len, self._stop), default=1) - 1

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes what comes next.

        Args:
            piece: Text.
            may_stop: Without it stop strings are text like any other.

        Returns:
            What may be shown now, and the stop string that ended the text; None = none did.
        """
        self._held += piece
        if not may_stop or not self._stop:
            return self.flush(), None
        found = min(((self._held.find(s), s) for s in self._stop if s in self._held), default=None)
        if found is not None:
            first, stop = found
            self._held = self._held[: first + len(stop) * self._keeps_it]
            return self.flush(), stop
        return self._show(len(self._held) - self._num_held()), None

    def flush(self) -> str:
        """What was held back."""
        return self._show(len(self._held))

    def _num_held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        for n in range(min(self._most_held, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.text += shown
        return shown
