"""Log-probabilities and tokens in the formats of OpenAI's and vLLM's responses."""

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


class TokenFormatter:
    """Formatter of single tokens: their text, bytes and log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        """Determine how the tokenizer represents bytes, which takes 0.2 s for a vocabulary of 128,000.

        Args:
            tokenizer: A `tokenizers.Tokenizer`.
        """
        self._tokenizer, self._shows_ids = tokenizer, False
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])

    def with_ids_as_names(self) -> "TokenFormatter":
        """Return a formatter that shows token ids in place of texts.

        Source: vLLM `return_tokens_as_token_ids`.
        """
        formatter = copy.copy(self)
        formatter._shows_ids = True
        return formatter

    def text(self, token_id: int) -> str:
        """Return a token's text, with replacement characters for bytes that are not a full character."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        """Return a token's name in responses: its text or its id."""
        return f"token_id:{token_id}" if self._shows_ids else self.text(token_id)

    def token_bytes(self, token_id: int) -> list[int]:
        """Return a token's bytes."""
        symbols = self._tokenizer.id_to_token(token_id) or ""
        if match := BYTE.fullmatch(symbols):
            return [int(match[1], 16)]
        if self._is_byte_level and all(symbol in _bytes_by_symbol() for symbol in symbols):
            return [_bytes_by_symbol()[symbol] for symbol in symbols]
        return list(self.text(token_id).encode())

    def text_offsets(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> "TextOffsets":
        """Return the text offsets of a completion.

        Args:
            prompt_ids: Token ids of the prompt.
            skip_special_tokens: Whether the completion's text omits special tokens.
        """
        return TextOffsets(self._tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)

    def chat_logprob(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        """Return a token's log-probability in the format of chat completions."""
        return {
            "token": self.name(token_id),
            "logprob": finite(logprob.logprob),
            "bytes": self.token_bytes(token_id),
        }

    def prompt_logprobs(self, positions: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
        """Return a prompt's log-probabilities in vLLM's format, by token id; None for the first token.

        Args:
            positions: Log-probabilities at each position of the prompt.
        """
        return [
            None
            if position is None
            else {str(i): self._prompt_logprob(i, logprob) for i, logprob in position.items()}
            for position in positions
        ]

    def _prompt_logprob(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "logprob": finite(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": self.text(token_id),
        }


class TextOffsets:
    """Character offsets of tokens in a text; parts of a character have the offset of that character."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        """Start a text that continues a prompt.

        Args:
            tokenizer: A `tokenizers.Tokenizer`.
            prompt_ids: Token ids of the prompt.
            skip_special_tokens: Whether the text omits special tokens.
        """
        self._tokenizer, self._prompt_ids, self._start = tokenizer, prompt_ids, 0
        self._completion = IncrementalDetokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )

    def next_offsets(self, token_ids: Sequence[int], prompt: str | None = None) -> list[int]:
        """Return the offsets of the next tokens.

        Args:
            token_ids: The next tokens.
            prompt: Text of the prompt, if the text and `token_ids` begin with the prompt (echo).
        """
        if prompt is None:
            return [self._start + offset for offset in _offsets(self._completion, token_ids)]
        text, self._start = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False), len(prompt)
        offsets = _offsets(text, self._prompt_ids)
        text.flush()
        # Characters of a BOS that the tokenizer added, which the prompt's text does not contain.
        num_added = max(len(text.text) - len(prompt), 0)
        prompt_offsets = [max(offset - num_added, 0) for offset in offsets]
        return prompt_offsets + self.next_offsets(token_ids[len(offsets) :])


def _offsets(text: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[int]:
    """Append tokens to a text and return its length before each of them."""
    offsets = []
    for token in token_ids:
        offsets.append(len(text.text))
        text.append(token)
    return offsets


def finite(logprob: float) -> float:
    """Return the log-probability, with -9999 in place of -inf, which JSON cannot hold.

    Source: OpenAI's API.
    """
    return max(logprob, -9999.0)


@functools.cache
def _bytes_by_symbol() -> dict[str, int]:
    """Return ByteLevel's alphabet: printable bytes map to themselves, the others to U+0100 and up, in order.

    Source: GPT-2 `bytes_to_unicode`.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    remaining = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(remaining)}
