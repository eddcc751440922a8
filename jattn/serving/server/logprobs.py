"""What single tokens are, for those who look at them one by one."""

import copy
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jattn.serving.engine.detokenizer import IncrementalDetokenizer
from jattn.serving.engine.logprobs import Logprob
from jattn.serving.engine.outputs import Logprobs

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """Looks at how it writes bytes, which takes long: 0.2 s of a vocabulary of 128,000."""
        self._tokenizer, self._as_ids = tokenizer, False
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])

    def as_ids(self) -> "TokenTexts":
        """The same, but tokens are called by their number.

        Source: vLLM `return_tokens_as_token_ids`.
        """
        other = copy.copy(self)
        other._as_ids = True
        return other

    def text(self, token_id: int) -> str:
        """A token's text; bytes that are no character of their own are replacement characters."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        """What a token is called."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """A token's bytes."""
        symbols = self._tokenizer.id_to_token(token_id) or ""
        if found := BYTE.fullmatch(symbols):
            return [int(found[1], 16)]
        if self._is_byte_level and all(symbol in _bytes_of_symbols() for symbol in symbols):
            return [_bytes_of_symbols()[symbol] for symbol in symbols]
        return list(self.text(token_id).encode())

    def offsets(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> "TextOffsets":
        """Of a text that a prompt goes on to; special tokens are in it unless skipped."""
        return TextOffsets(self._tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)

    def described(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        """A token as chat completions tell of it."""
        return {
            "token": self.name(token_id),
            "logprob": finite(logprob.logprob),
            "bytes": self.bytes_of(token_id),
        }

    def of_prompt(self, places: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
        """The tokens of a prompt as vLLM tells of them: by their numbers, the first of them without any."""
        ranked = lambda place: {str(i): self._ranked(i, one) for i, one in place.items()}
        return [None if place is None else ranked(place) for place in places]

    def _ranked(self, token_id: int, one: Logprob) -> dict[str, Any]:
        return {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": self.text(token_id)}


class TextOffsets:
    """Where tokens begin in their text, in characters; a part of a character begins where that does."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        """Of a text that goes on from a prompt."""
        self._tokenizer, self._prompt_ids, self._begin = tokenizer, prompt_ids, 0
        self._new = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)

    def of(self, token_ids: Sequence[int], prompt: str | None = None) -> list[int]:
        """Of the tokens that come next; `prompt`: the text begins with this, and its tokens come first."""
        if prompt is None:
            return [self._begin + begin for begin in _begins(self._new, token_ids)]
        text, self._begin = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False), len(prompt)
        begins = _begins(text, self._prompt_ids)
        text.flush()
        added = max(len(text.text) - len(prompt), 0)  # a BOS, which the prompt's text does not have
        return [max(begin - added, 0) for begin in begins] + self.of(token_ids[len(begins) :])


def _begins(text: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[int]:
    """How long a text is before each token that it takes."""
    begins = []
    for token in token_ids:
        begins.append(len(text.text))
        text.append(token)
    return begins


def finite(logprob: float) -> float:
    """JSON has no infinity.

    Source: OpenAI's API, which says -9999 where a token is out of the question.
    """
    return max(logprob, -9999.0)


@functools.cache
def _bytes_of_symbols() -> dict[str, int]:
    """ByteLevel's alphabet: printable bytes are themselves, the others stand from U+0100 on, in order.

    Source: GPT-2 `bytes_to_unicode`.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
