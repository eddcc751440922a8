"""What single tokens are, for those who look at them one by one."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jattn.serving.logprobs import Logprob
from jattn.serving.outputs import Logprobs

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:
        """Looks at how it writes bytes. As ids, tokens are called by their number."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])

    def text(self, token_id: int) -> str:
        """A token's text; bytes that are no character of their own are replacement characters."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        """What a token is called.

        Source: vLLM `return_tokens_as_token_ids`.
        """
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """A token's bytes."""
        symbols = self._tokenizer.id_to_token(token_id) or ""
        if found := BYTE.fullmatch(symbols):
            return [int(found[1], 16)]
        if self._is_byte_level and all(symbol in _bytes_of_symbols() for symbol in symbols):
            return [_bytes_of_symbols()[symbol] for symbol in symbols]
        return list(self.text(token_id).encode())

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
