"""What a request asks of the logits before a token is picked: biases, penalties, no end too soon."""

import functools
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32, UInt32

from jattn.batch.int_arrays import INT32_MAX
from jattn.serving.engine.detokenizer import tokens_of
from jattn.serving.engine.sampler import in_rows
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.structured_outputs import Grammars, TokenMask
from pallas_kernels.checks import require

SHORTEST_LIST, SHORTEST_TEXT = 8, 64  # tables are never narrower: fewer widths to compile for
SHORTEST_BIASES = 4096  # nor is the list of all rows' biases shorter: 16 each of 256 rows, 48 KiB


class Adjustments(NamedTuple):
    """Of a step's rows. Lists of tokens are padded with the vocabulary's size, which no token has.

    Biases of all rows are one list: a table as wide as the longest, of 256 rows and 25,000 tokens, is 64 MiB
    to make and send in each step.

    Attributes:
        bias_rows: The row of each bias.
        bias_ids: Its token.
        biases: What is added to the token's logit.
        end_ids: Tokens that would end the text.
        min_tokens: They are banned before a row has generated so many.
        prompt_ids: Tokens of the prompt, where a row has penalties.
        output_ids: Tokens generated that the host knows, likewise.
        pending_rows: Row of the step before whose token comes next and only the device knows; -1 = none.
        last: New tokens of the step before, by its rows.
        repetition: repetition_penalty.
        frequency: frequency_penalty.
        presence: presence_penalty.
        allowed: Tokens that may come next, as `TokenMask.allowed` has them; None = no row has a mask.
    """

    bias_rows: Int32[Array, " biases"]
    bias_ids: Int32[Array, " biases"]
    biases: Float32[Array, " biases"]
    end_ids: Int32[Array, "reqs ends"]
    min_tokens: Int32[Array, " reqs"]
    prompt_ids: Int32[Array, "reqs prompt"]
    output_ids: Int32[Array, "reqs outputs"]
    pending_rows: Int32[Array, " reqs"]
    last: Int32[Array, " max_rows"]
    repetition: Float32[Array, " reqs"]
    frequency: Float32[Array, " reqs"]
    presence: Float32[Array, " reqs"]
    allowed: UInt32[Array, "reqs words"] | None


class Adjusted(NamedTuple):
    """What one request's adjustments are made of.

    Attributes:
        params: What it asks for.
        prompt_ids: Its prompt, where it has penalties.
        output_ids: What it has generated and the host has read, likewise.
        end_ids: Tokens that end it, where it has min_tokens.
        num_generated: How many it has generated and the host has read.
        pending_row: Row of the step before whose token it waits for; -1 = none.
        allowed: What its mask allows; None = it has none.
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
        """False where the logits stay as they are."""
        bans = self.num_generated < self.params.min_tokens
        return bool(self.params.has_penalties or self.params.logit_bias or bans or self.allowed is not None)


def build_adjustments(
    requests: Sequence[Adjusted], last: Array, *, num_rows: int, vocab_size: int
) -> Adjustments | None:
    """Puts what each request asks for into the row of its number; None where nobody asks for anything.

    Lists are padded to powers of two, prompts and outputs to one length for both: a longer one compiles the
    sampler anew, a few times in all.
    """
    if not any(one.is_needed for one in requests):
        return None
    rows = np.arange(len(requests))
    table = lambda lists, width: _table(lists, num_rows, width, vocab_size)
    column = lambda values, off, dtype: in_rows(values, rows, np.full(num_rows, off, dtype))
    params = [one.params for one in requests]
    bias_rows, bias_ids, biases = _biases(params, vocab_size)
    ends = [one.end_ids for one in requests]
    prompts, outputs = [one.prompt_ids for one in requests], [one.output_ids for one in requests]
    longest = _width(prompts + outputs, SHORTEST_TEXT)
    penalised = [one if one.params.has_penalties else None for one in requests]
    return Adjustments(
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        biases=biases,
        end_ids=table(ends, _width(ends, SHORTEST_LIST)),
        # What int32 cannot hold is beyond every text, and so is the most that it can.
        min_tokens=column([min(one.min_tokens, INT32_MAX) for one in params], 0, np.int32),
        prompt_ids=table(prompts, longest),
        output_ids=table(outputs, longest),
        pending_rows=column([one.pending_row if one else -1 for one in penalised], -1, np.int32),
        last=last,
        repetition=column([one.repetition_penalty for one in params], 1, np.float32),
        frequency=column([one.frequency_penalty for one in params], 0, np.float32),
        presence=column([one.presence_penalty for one in params], 0, np.float32),
        allowed=_allowed([one.allowed for one in requests], num_rows, vocab_size),
    )


def adjusted(
    logits: Float32[Array, "reqs vocab"], by: Adjustments, num_generated: Int[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Logits with biases and penalties; -inf for what would end a text too soon or may not come. Traced.

    Source: vLLM V1 `MinTokensLogitsProcessor`, `LogitBiasLogitsProcessor`, `apply_all_penalties`.
    """
    num_rows, vocab_size = logits.shape
    row = jnp.arange(num_rows)[:, None]
    banned = jnp.where((num_generated < by.min_tokens)[:, None], by.end_ids, vocab_size)
    logits = logits.at[row, banned].set(-jnp.inf, mode="drop")
    logits = logits.at[by.bias_rows, by.bias_ids].add(by.biases, mode="drop")
    pending = jnp.where(by.pending_rows >= 0, by.last[by.pending_rows], vocab_size)
    outputs = jnp.concatenate([by.output_ids, pending[:, None]], axis=1)
    counts = jnp.zeros(logits.shape, jnp.int32).at[row, outputs].add(1, mode="drop")
    is_seen = (counts > 0).at[row, by.prompt_ids].set(True, mode="drop")
    factor = by.repetition[:, None]
    logits = jnp.where(is_seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - by.frequency[:, None] * counts.astype(jnp.float32)
    logits = logits - by.presence[:, None] * (counts > 0).astype(jnp.float32)
    if by.allowed is None:
        return logits
    bits = (by.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return jnp.where(bits.reshape(num_rows, -1)[:, :vocab_size] != 0, logits, -jnp.inf)


def _biases(params: Sequence[SamplingParams], vocab_size: int) -> tuple[Any, Any, Any]:
    """Rows, tokens and values of all biases, padded to a power of two."""
    each = [(row, *one.biases) for row, one in enumerate(params) if one.logit_bias]
    width = _width([range(sum(len(ids) for _, ids, _ in each))], SHORTEST_BIASES)
    rows, tokens = np.zeros(width, np.int32), np.full(width, vocab_size, np.int32)
    values, end = np.zeros(width, np.float32), 0
    for row, ids, added in each:
        part = slice(end, end := end + len(ids))
        rows[part], tokens[part], values[part] = row, ids, added
    return rows, tokens, values


def _allowed(masks: Sequence[np.ndarray | None], num_rows: int, vocab_size: int) -> Any:
    """Masks as rows of a table; rows without one allow everything."""
    if all(mask is None for mask in masks):
        return None
    table = np.full((num_rows, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
    for row, mask in enumerate(masks):
        if mask is not None:
            table[row] = mask
    return table


def _width(lists: Sequence[Sized], shortest: int) -> int:
    """Columns of a table of lists: a power of two."""
    return max(shortest, 1 << (max(map(len, lists), default=1) - 1).bit_length())


def _table(lists: Sequence[Sequence[int] | np.ndarray], num_rows: int, width: int, pad: int) -> Any:
    """Lists as rows of a table."""
    table = np.full((num_rows, width), pad, np.int32)
    for row, values in enumerate(lists):
        if len(values):
            table[row, : len(values)] = values
    return table


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
