"""Logits processors: biases, penalties, min_tokens, and allowed or banned tokens."""

import functools
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32, UInt32

from jattn.batch.int_arrays import INT32_MAX
from jattn.serving.engine.detokenizer import tokenize
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.structured_outputs import Grammars, TokenMask
from pallas_kernels.checks import require

SHORTEST_LIST, SHORTEST_TEXT = 8, 64  # minimum table widths, to compile few sizes
SHORTEST_BIASES = 4096  # minimum number of biases: 16 for each of 256 rows, 48 KiB


class LogitsAdjustments(NamedTuple):
    """The adjustments of a step's logits. Token lists are padded with vocab_size, which is not a valid token.

    The biases of all rows form one list: a padded table for 256 rows and 25,000 tokens would take 64 MiB per
    step.

    Attributes:
        bias_rows: Row of each bias.
        bias_ids: Token id of each bias.
        biases: Value added to the token's logit.
        end_ids: Tokens that would end the completion.
        min_tokens: Number of generated tokens before which end_ids are banned.
        prompt_ids: Prompt tokens of rows with penalties.
        output_ids: Generated tokens that the host knows, of rows with penalties.
        pending_rows: Row of the previous step whose token, known only to the device, comes next; -1 if there
            is none.
        last: New tokens of the previous step, by row. None: not known before the step starts.
        repetition: repetition_penalty of each row.
        frequency: frequency_penalty of each row.
        presence: presence_penalty of each row.
        allowed: Bit mask of the allowed next tokens; see `TokenMask.allowed_bitmask`. None: no row has a
            mask.
    """

    bias_rows: Int32[Array, " biases"]
    bias_ids: Int32[Array, " biases"]
    biases: Float32[Array, " biases"]
    end_ids: Int32[Array, "reqs ends"]
    min_tokens: Int32[Array, " reqs"]
    prompt_ids: Int32[Array, "reqs prompt"]
    output_ids: Int32[Array, "reqs outputs"]
    pending_rows: Int32[Array, " reqs"]
    last: Int32[Array, " max_rows"] | None
    repetition: Float32[Array, " reqs"]
    frequency: Float32[Array, " reqs"]
    presence: Float32[Array, " reqs"]
    allowed: UInt32[Array, "reqs words"] | None


class RequestAdjustments(NamedTuple):
    """The adjustments of one request's logits.

    Attributes:
        params: Sampling parameters.
        prompt_ids: Prompt tokens, if there are penalties.
        output_ids: Generated tokens that the host has read, if there are penalties.
        end_ids: Tokens that end the completion, if there are min_tokens.
        num_generated: Number of generated tokens that the host has read.
        pending_row: Row of the previous step whose token is in flight; -1 if there is none.
        allowed: Bit mask of the allowed next tokens; None if all are allowed.
    """

    params: SamplingParams
    prompt_ids: Sequence[int] | np.ndarray
    output_ids: Sequence[int] | np.ndarray
    end_ids: Sequence[int]
    num_generated: int
    pending_row: int
    allowed: np.ndarray | None = None

    @property
    def is_needed(self) -> bool:
        """True if the logits change."""
        bans_end = self.num_generated < self.params.min_tokens
        return bool(
            self.params.has_penalties or self.params.logit_bias or bans_end or self.allowed is not None
        )


def build_logits_adjustments(
    requests: Sequence[RequestAdjustments], last: Array | None, *, num_rows: int, vocab_size: int
) -> LogitsAdjustments | None:
    """Arrange the adjustments of requests in rows; None if no request needs any.

    Lists are padded to powers of two, prompts and outputs to the same length. Longer lists recompile the
    sampler, a few times in total.
    """
    if not any(request.is_needed for request in requests):
        return None

    def table(lists: Sequence[Sequence[int] | np.ndarray], width: int) -> Any:
        return _table(lists, num_rows, width, vocab_size)

    def column(values: Sequence[float | int], padding: float | int, dtype: Any) -> Any:
        padded = np.full(num_rows, padding, dtype)
        padded[: len(values)] = values
        return padded

    params = [request.params for request in requests]
    bias_rows, bias_ids, biases = _biases(params, vocab_size)
    ends = [request.end_ids for request in requests]
    prompts = [request.prompt_ids for request in requests]
    outputs = [request.output_ids for request in requests]
    longest = _width(prompts + outputs, SHORTEST_TEXT)
    penalized = [request if request.params.has_penalties else None for request in requests]
    return LogitsAdjustments(
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        biases=biases,
        end_ids=table(ends, _width(ends, SHORTEST_LIST)),
        # Values beyond int32 exceed every text length.
        min_tokens=column([min(request.min_tokens, INT32_MAX) for request in params], 0, np.int32),
        prompt_ids=table(prompts, longest),
        output_ids=table(outputs, longest),
        pending_rows=column([request.pending_row if request else -1 for request in penalized], -1, np.int32),
        last=last,
        repetition=column([request.repetition_penalty for request in params], 1, np.float32),
        frequency=column([request.frequency_penalty for request in params], 0, np.float32),
        presence=column([request.presence_penalty for request in params], 0, np.float32),
        allowed=_allowed([request.allowed for request in requests], num_rows, vocab_size),
    )


def adjust_logits(
    logits: Float32[Array, "reqs vocab"], adjustments: LogitsAdjustments, num_generated: Int[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Apply biases and penalties, and set the logits of banned tokens to -inf. Works inside jit.

    Source: vLLM V1 `MinTokensLogitsProcessor`, `LogitBiasLogitsProcessor`, `apply_all_penalties`.
    """
    assert adjustments.last is not None
    num_rows, vocab_size = logits.shape
    row = jnp.arange(num_rows)[:, None]
    banned = jnp.where((num_generated < adjustments.min_tokens)[:, None], adjustments.end_ids, vocab_size)
    logits = logits.at[row, banned].set(-jnp.inf, mode="drop")
    logits = logits.at[adjustments.bias_rows, adjustments.bias_ids].add(adjustments.biases, mode="drop")
    pending = jnp.where(adjustments.pending_rows >= 0, adjustments.last[adjustments.pending_rows], vocab_size)
    outputs = jnp.concatenate([adjustments.output_ids, pending[:, None]], axis=1)
    counts = jnp.zeros(logits.shape, jnp.int32).at[row, outputs].add(1, mode="drop")
    has_occurred = (counts > 0).at[row, adjustments.prompt_ids].set(True, mode="drop")
    factor = adjustments.repetition[:, None]
    logits = jnp.where(has_occurred, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - adjustments.frequency[:, None] * counts.astype(jnp.float32)
    logits = logits - adjustments.presence[:, None] * (counts > 0).astype(jnp.float32)
    if adjustments.allowed is None:
        return logits
    bits = (adjustments.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return jnp.where(bits.reshape(num_rows, -1)[:, :vocab_size] != 0, logits, -jnp.inf)


def _biases(params: Sequence[SamplingParams], vocab_size: int) -> tuple[Any, Any, Any]:
    """Return the rows, token ids and values of all biases, padded to a power of two."""
    rows_with_biases = [(row, *request.biases) for row, request in enumerate(params) if request.logit_bias]
    width = _width([range(sum(len(ids) for _, ids, _ in rows_with_biases))], SHORTEST_BIASES)
    rows, tokens = np.zeros(width, np.int32), np.full(width, vocab_size, np.int32)
    values, end = np.zeros(width, np.float32), 0
    for row, ids, values_ in rows_with_biases:
        part = slice(end, end := end + len(ids))
        rows[part], tokens[part], values[part] = row, ids, values_
    return rows, tokens, values


def _allowed(masks: Sequence[np.ndarray | None], num_rows: int, vocab_size: int) -> Any:
    """Return the masks as rows of a table. Rows without a mask allow every token."""
    if all(mask is None for mask in masks):
        return None
    table = np.full((num_rows, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
    for row, mask in enumerate(masks):
        if mask is not None:
            table[row] = mask
    return table


def _width(lists: Sequence[Sized], shortest: int) -> int:
    """Return the width of a table of lists: a power of two."""
    return max(shortest, 1 << (max(map(len, lists), default=1) - 1).bit_length())


def _table(lists: Sequence[Sequence[int] | np.ndarray], num_rows: int, width: int, pad_value: int) -> Any:
    """Return lists as the padded rows of a table."""
    table = np.full((num_rows, width), pad_value, np.int32)
    for row, values in enumerate(lists):
        if len(values):
            table[row, : len(values)] = values
    return table


class TokenFilter:
    """A TokenMask for allowed_token_ids and bad_words."""

    def __init__(self, allowed: np.ndarray, words: Sequence[Sequence[int]] = ()) -> None:
        """Start with an empty sequence.

        Args:
            allowed: Bit mask of the tokens that are allowed unless they complete one of `words`; see
                `allowed_bitmask`.
            words: Banned words of several tokens; the last token may not follow the preceding ones.
        """
        self._allowed = allowed
        # Last tokens of words, by the tokens before them.
        self._endings: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lens = sorted({len(before) for before in self._endings})
        self._last: tuple[int, ...] = ()  # as many tokens as a word has before its last one

    @property
    def is_fixed(self) -> bool:
        """True if the mask never changes."""
        return not self._endings

    @property
    def is_done(self) -> bool:
        """True if no token is allowed any more."""
        return not self.allowed_bitmask().any()

    def allowed_bitmask(self) -> np.ndarray:
        """Return the bit mask of the allowed next tokens."""
        endings = [last for n in self._lens for last in self._endings.get(self._last[-n:], ())]
        return without(self._allowed, endings) if endings else self._allowed

    def accept(self, token_id: int) -> None:
        """Advance the mask by one generated token."""
        if self._lens:
            self._last = (*self._last, token_id)[-self._lens[-1] :]


def token_masks(
    params: SamplingParams, *, tokenizer: Any | None, vocab_size: int, grammars: Grammars
) -> Callable[[], TokenMask | None]:
    """Return a function that creates the mask of a new completion, or None if all tokens are allowed.

    Args:
        params: Sampling parameters of the request.
        tokenizer: A `tokenizers.Tokenizer`; None if there is none.
        vocab_size: Size of the vocabulary.
        grammars: Compiler of structured_outputs.

    Raises:
        ValueError: If bad_words ban every token or need a missing tokenizer, or structured_outputs is
            invalid.
    """
    if params.structured_outputs is not None:
        return functools.partial(grammars.mask, params.structured_outputs)
    if params.allowed_token_ids is None and not params.bad_words:
        return lambda: None
    words = [ids for word in params.bad_words or () for ids in bad_word_ids(word, tokenizer)]
    ids = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    allowed = without(_bits(ids, vocab_size), [word[0] for word in words if len(word) == 1])
    if not allowed.any():
        raise ValueError(
            "bad_words and allowed_token_ids together forbid every token. Remove words from bad_words, or "
            "add ids to allowed_token_ids."
        )
    return functools.partial(TokenFilter, allowed, [word for word in words if len(word) > 1])


def bad_word_ids(word: str, tokenizer: Any | None) -> list[list[int]]:
    """Return a word's tokens at the start of a text and, if equally many but different, within a text.

    Raises:
        ValueError: If there is no tokenizer, or the word is not valid text.

    Source: vLLM `SamplingParams.update_from_tokenizer`.
    """
    if tokenizer is None:
        raise ValueError(
            f"bad_words contains {word!r}, which requires a tokenizer, but the model has no tokenizer.json. "
            "Omit bad_words."
        )
    first, inner = (
        tokenize("bad_words", before + word.lstrip(), tokenizer, add_special_tokens=False)
        for before in ("", " ")
    )
    require(bool(first), "bad_words", "not be blank", repr(word))
    is_other = len(inner) == len(first) and inner[0] != first[0]
    return [first, inner] if is_other else [first]


def without(bits: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return a copy of a bit mask without these tokens. Token ids beyond the vocabulary are ignored."""
    bits = bits.copy()
    for token in token_ids:
        bits[token // 32 : token // 32 + 1] &= ~np.uint32(1 << token % 32)
    return bits


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    is_in = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_in[np.asarray(token_ids)] = True
    return np.packbits(is_in, bitorder="little").view(np.uint32)
