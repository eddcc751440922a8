"""Validation of prompts and sampling parameters, and their conversion to requests."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.serving.engine.detokenizer import IncrementalDetokenizer, tokenize
from jattn.serving.engine.logits_processors import token_masks
from jattn.serving.engine.outputs import GenerationResult
from jattn.serving.engine.prefix_cache import BlockHashes
from jattn.serving.engine.processes import ProcessGroup, require_leader
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.structured_outputs import Grammars
from jattn.serving.engine.weights import Weights
from pallas_kernels.checks import require, require_type

type Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """The limits of a prompt.

    Attributes:
        vocab_size: Size of the vocabulary; token ids must be smaller.
        max_model_len: Maximum context length in tokens.
        capacity_tokens: Maximum number of tokens of a request that fit the KV cache.
        block_size: Number of tokens per cache block.
        enable_prefix_caching: Whether requests share the blocks of common prefixes.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    block_size: int
    enable_prefix_caching: bool


class Request(NamedTuple):
    """A prompt, its text if it was given as text, and `params.n` sequences that differ in their seeds."""

    prompt: str | None
    params: SamplingParams
    sequences: list[SequenceState]

    @property
    def is_finished(self) -> bool:
        """True if all sequences are finished."""
        return all([sequence.finish_reason is not None for sequence in self.sequences])

    def result(self) -> GenerationResult:
        """Return the result of a finished request."""
        first, *others = (completion.result(i, self.prompt) for i, completion in enumerate(self.sequences))
        return dataclasses.replace(first, outputs=(first, *others))


def build_requests(
    prompts: Sequence[Prompt],
    max_tokens: int | Sequence[int] | None,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    *,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    eos_ids: frozenset[int],
    tokenizer: Any | None,
    limits: PromptLimits,
    grammars: Grammars,
) -> list[Request]:
    """Build one Request per prompt.

    Args:
        prompts: Text or token ids of each prompt.
        max_tokens: Maximum number of new tokens; see `Engine.generate`.
        sampling_params: Sampling parameters; see `Engine.generate`.
        stop_ids: Additional stop tokens of all prompts.
        ignore_eos: Whether generation continues after the model's EOS token.
        eos_ids: The model's EOS tokens.
        tokenizer: Tokenizer of text prompts; None if the model has none.
        limits: Limits that prompts must keep.
        grammars: Compiler of structured outputs.

    Raises:
        ValueError: If a prompt cannot be served. The message contains its index and the invalid value.
    """
    require(_is_list(prompts), "prompts", "be a list of prompts", repr(prompts))
    params_list = per_prompt(
        "sampling_params",
        sampling_params,
        len(prompts),
        is_valid_value=lambda params: isinstance(params, SamplingParams),
        kind="SamplingParams (for a number of tokens use max_tokens=)",
    )
    require_list_of_ints("stop_ids", stop_ids)
    if len(stop_ids) or ignore_eos:  # replace() validates again, so avoid it.
        params_list = [
            dataclasses.replace(
                params,
                stop_token_ids=(*(params.stop_token_ids or ()), *stop_ids),
                ignore_eos=params.ignore_eos or ignore_eos,
            )
            for params in params_list
        ]
    if max_tokens is not None:
        counts = per_prompt("max_tokens", max_tokens, len(prompts), is_valid_value=_is_int, kind="an int")
        params_list = [
            dataclasses.replace(params, max_tokens=int(count))
            for params, count in zip(params_list, counts, strict=True)
        ]
    return [
        build_request(
            f"prompts[{i}]",
            prompt,
            params,
            eos_ids=eos_ids,
            tokenizer=tokenizer,
            limits=limits,
            grammars=grammars,
        )
        for i, (prompt, params) in enumerate(zip(prompts, params_list, strict=True))
    ]


def build_request(
    name: str,
    prompt: object,
    params: SamplingParams,
    *,
    eos_ids: frozenset[int],
    tokenizer: Any | None,
    limits: PromptLimits,
    grammars: Grammars,
) -> Request:
    """Build the Request of one prompt. Error messages refer to the prompt as `name`.

    Raises:
        ValueError: If the prompt cannot be served.
    """
    token_ids = prompt_token_ids_of(name, prompt, tokenizer=tokenizer, vocab_size=limits.vocab_size)
    for kind in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        ids = getattr(params, kind) or ()
        invalid = [i for i in ids if not 0 <= i < limits.vocab_size]
        require(not invalid, kind, f"be in the vocabulary, [0, {limits.vocab_size})", invalid)
    if params.stop and tokenizer is None:
        raise ValueError(
            f"stop={params.stop!r} requires a tokenizer, but the model has no tokenizer.json. "
            "Pass stop_token_ids instead."
        )
    params = params.with_seed()
    max_new_tokens = _max_new_tokens(name, len(token_ids), params.max_tokens, limits)
    new_mask = token_masks(params, tokenizer=tokenizer, vocab_size=limits.vocab_size, grammars=grammars)

    # prompt_logprobs need the logits of every prompt token, so no cached prefix is used.
    is_shared = limits.enable_prefix_caching and params.prompt_logprobs is None
    hashes = BlockHashes(limits.block_size, token_ids) if is_shared else None

    def new_sequence(params: SamplingParams) -> SequenceState:
        return SequenceState(
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_tokens=max_new_tokens,
            sampling_params=params,
            eos_ids=frozenset() if params.ignore_eos else eos_ids,
            text=IncrementalDetokenizer(tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens),
            hashes=None if hashes is None else hashes.copy(),
            mask=new_mask(),
        )

    text = prompt if isinstance(prompt, str) else None
    first, *others = (new_sequence(params.of_completion(index)) for index in range(params.n))
    for completion in others:  # The prompt is computed once, by any of them.
        completion.prompt_logprobs = first.prompt_logprobs
    return Request(text, params, [first, *others])


def _max_new_tokens(name: str, num_prompt_tokens: int, max_tokens: int | None, limits: PromptLimits) -> int:
    """Return `max_tokens`, limited by the context length. The last token needs no position in the context."""
    longest, capacity = limits.max_model_len, limits.capacity_tokens
    if num_prompt_tokens > longest:
        raise ValueError(
            f"{name} has {num_prompt_tokens} tokens, but max_model_len is {longest}. "
            "Shorten the prompt or increase max_model_len."
        )
    remaining = longest - num_prompt_tokens + 1
    if max_tokens is None:
        if num_prompt_tokens > capacity:
            raise ValueError(
                f"{name} has {num_prompt_tokens} tokens, but the KV cache holds only {capacity}. "
                "Shorten the prompt or increase num_blocks."
            )
        return min(remaining, capacity - num_prompt_tokens + 1)
    max_tokens = min(max_tokens, remaining)
    if num_prompt_tokens + max_tokens - 1 > capacity:
        raise ValueError(
            f"{name} has {num_prompt_tokens} tokens and max_tokens={max_tokens}, but the KV cache holds only "
            f"{capacity} tokens. Increase num_blocks or reduce max_tokens."
        )
    return max_tokens


def require_single_completions(requests: Sequence[Request], where: str) -> None:
    """Check that each request has one completion.

    Raises:
        ValueError: If a request has n > 1. `where` names the feature that does not support it.
    """
    for request in requests:
        require(request.params.n == 1, "n", f"be 1 {where}", request.params.n)


def per_prompt[T](
    name: str, values: T | Sequence[T], count: int, *, is_valid_value: Callable[[Any], bool], kind: str
) -> list[T]:
    """Return one value per prompt, given one value for all prompts or a list.

    Raises:
        ValueError: If the value has another type, or the list has another length.
    """
    if is_valid_value(values):
        return [values] * count  # type: ignore[list-item]
    require(_is_list(values), name, f"be {kind}, or a list with one entry per prompt", repr(values))
    values_list: list[T] = list(values)  # type: ignore[arg-type]
    require(len(values_list) == count, name, f"have one entry per prompt ({count})", len(values_list))
    for i, value in enumerate(values_list):
        require(is_valid_value(value), f"{name}[{i}]", f"be {kind}", repr(value))
    return values_list


def require_list_of_ints(name: str, values: Any) -> None:
    """Check that `values` is a list, tuple or array of ints."""
    require(_is_list(values) and all(map(_is_int, values)), name, "be a list of ints", repr(values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def prompt_token_ids_of(name: str, prompt: object, *, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """Return a prompt's token ids.

    Raises:
        ValueError: If the prompt is empty, has another type, contains a token outside the vocabulary or
            invalid text, or is text while there is no tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text, but the model has no tokenizer.json. Pass token ids.")
        token_ids: np.ndarray = np.asarray(tokenize(name, prompt, tokenizer), np.int64)
    else:
        try:
            token_ids = np.asarray(prompt)
        except ValueError:  # nested lists of different lengths
            token_ids = np.zeros((0, 0))
    require(token_ids.ndim == 1, name, "be text or a list of token ids", repr(prompt))
    if token_ids.size == 0:
        raise ValueError(f"{name} is empty. Pass at least one token.")
    require(token_ids.dtype.kind in "iu", name, "be text or a list of token ids", repr(prompt))
    invalid = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    for i in invalid[:1]:
        require(False, f"{name}[{i}]", f"be in the vocabulary, [0, {vocab_size})", token_ids[i])
    return token_ids.tolist()


class InputProcessor:
    """Converts prompts to requests for one model."""

    def __init__(
        self, model: ServedModel, limits: PromptLimits, weights: Weights, processes: ProcessGroup | None
    ) -> None:
        """Store the model and its limits.

        Args:
            model: Model that serves the requests.
            limits: Limits of a prompt.
            weights: The model's weights, which are checked for changes before each request.
            processes: Process group that this process must lead; None for a single process.
        """
        self._model, self.limits, self._weights, self._processes = model, limits, weights, processes
        self.tokenizer = model.tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of prompts and generated text; None if only token ids are supported."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.__dict__.pop("grammars", None)  # They depend on the tokenizer.

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs; see `Engine.grammars`."""
        config = self._model.config
        return Grammars(self.tokenizer, config.vocab_size, config.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Build the request of `Engine.add_request`.

        Raises:
            ValueError: If the prompt cannot be served.
        """
        require_type(
            "params", params, SamplingParams, "for a number of tokens: SamplingParams(max_tokens=...)"
        )
        self._require_ready()
        return build_request(
            "prompt",
            prompt,
            params,
            eos_ids=frozenset(self._model.config.eos_token_ids),
            tokenizer=self.tokenizer,
            limits=self.limits,
            grammars=self.grammars,
        )

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        max_tokens: int | Sequence[int] | None,
        *,
        stop_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Request]:
        """Build the requests of `Engine.generate`.

        Raises:
            ValueError: If a prompt cannot be served.
        """
        self._require_ready()
        return build_requests(
            prompts,
            max_tokens,
            sampling_params,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            eos_ids=frozenset(self._model.config.eos_token_ids),
            tokenizer=self.tokenizer,
            limits=self.limits,
            grammars=self.grammars,
        )

    def _require_ready(self) -> None:
        require_leader(self._processes)
        self._weights.refresh()
