"""What a request rules out: tokens (allowed_token_ids) and words (bad_words)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.structured_outputs import Grammars, TokenMask
from jattn.serving.engine.text import tokens_of
from pallas_kernels.checks import require


class TokenFilter:
    """A TokenMask of tokens that may come anywhere, and of words that may not."""

    def __init__(self, anywhere: np.ndarray, words: Sequence[Sequence[int]] = ()) -> None:
        """Of a text that is empty so far.

        Args:
            anywhere: As `TokenMask.allowed` has it.
            words: Each of several tokens, whose last may not follow the others.
        """
        self._anywhere = anywhere
        self._endings: dict[tuple[int, ...], list[int]] = {}  # last tokens of words, by those before
        for word in words:
            self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lens = sorted({len(before) for before in self._endings})
        self._last: tuple[int, ...] = ()  # tokens, as many as a word may have before its last

    @property
    def is_fixed(self) -> bool:
        """As TokenMask."""
        return not self._endings

    @property
    def is_done(self) -> bool:
        """Whether nothing is left that may come."""
        return not self.allowed().any()

    def allowed(self) -> np.ndarray:
        """As TokenMask."""
        endings = [last for n in self._lens for last in self._endings.get(self._last[-n:], ())]
        return without(self._anywhere, endings) if endings else self._anywhere

    def accept(self, token_id: int) -> None:
        """As TokenMask."""
        if self._lens:
            self._last = (*self._last, token_id)[-self._lens[-1] :]


def token_masks(
    params: SamplingParams, *, tokenizer: Any | None, vocab_size: int, grammars: Grammars
) -> Callable[[], TokenMask | None]:
    """Makes what may come in a text that is empty so far, one for each completion; None = anything.

    Args:
        params: What the request asks for.
        tokenizer: A `tokenizers.Tokenizer`; None = there is none.
        vocab_size: The model's.
        grammars: What knows structured_outputs.

    Raises:
        ValueError: bad_words leave no token, or there is no tokenizer for them; as `Grammars.mask`.
    """
    if params.structured_outputs is not None:
        return functools.partial(grammars.mask, params.structured_outputs)
    if params.allowed_token_ids is None and not params.bad_words:
        return lambda: None
    words = [ids for word in params.bad_words or () for ids in bad_word_ids(word, tokenizer)]
    ids = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    anywhere = without(_bits(ids, vocab_size), [word[0] for word in words if len(word) == 1])
    require(bool(anywhere.any()), "bad_words", "leave a token that may come", params.bad_words)
    return functools.partial(TokenFilter, anywhere, [word for word in words if len(word) > 1])


def bad_word_ids(word: str, tokenizer: Any | None) -> list[list[int]]:
    """A word's tokens at the beginning of a text and, where these are others but no more, in its midst.

    Raises:
        ValueError: There is no tokenizer, or the word has halves of characters.

    Source: vLLM `SamplingParams.update_from_tokenizer`.
    """
    require(tokenizer is not None, "bad_words", "be empty (the model has no tokenizer.json)", repr(word))
    assert tokenizer is not None
    first, inner = (
        tokens_of("bad_words", before + word.lstrip(), tokenizer, add_special_tokens=False)
        for before in ("", " ")
    )
    require(bool(first), "bad_words", "have tokens", repr(word))
    is_other = len(inner) == len(first) and inner[0] != first[0]
    return [first, inner] if is_other else [first]


def without(bits: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """A copy of a mask that does not allow these; a checkpoint's eos may be beyond the vocabulary."""
    bits = bits.copy()
    for token in token_ids:
        bits[token // 32 : token // 32 + 1] &= ~np.uint32(1 << token % 32)
    return bits


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    is_in = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_in[np.asarray(token_ids)] = True
    return np.packbits(is_in, bitorder="little").view(np.uint32)
