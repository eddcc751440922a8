"""Validation of prompts and sampling parameters, and their conversion to requests."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.serving.engine.block_manager import BlockHashes
from jattn.serving.engine.config import ResolvedConfig
from jattn.serving.engine.detokenizer import IncrementalDetokenizer, tokenize
from jattn.serving.engine.logits_processors import token_masks
from jattn.serving.engine.outputs import GenerationResult
from jattn.serving.engine.processes import ProcessGroup, require_leader
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.structured_outputs import Grammars
from jattn.serving.engine.weights import Weights
from pallas_kernels.checks import require, require_type

type Prompt = str | Sequence[int] | np.ndarray


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


def require_single_completions(requests: Sequence[Request], where: str) -> None:
    """Check that each request has one completion.

    Raises:
        ValueError: If a request has n > 1. `where` names the feature that does not support it.
    """
    for request in requests:
        require(request.params.n == 1, "n", f"be 1 {where}", request.params.n)


def is_list(value: object) -> bool:
    """Return whether a value is a list, tuple or array, but not text."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def per_prompt[T](name: str, values: T | Sequence[T], count: int) -> list[T]:
    """Return one value per prompt, given one value for all prompts or a list.

    Raises:
        ValueError: If the list has another length.
    """
    if not is_list(values):
        return [values] * count  # type: ignore[list-item]
    values_list: list[T] = list(values)  # type: ignore[arg-type]
    require(len(values_list) == count, name, f"have one entry per prompt ({count})", len(values_list))
    return values_list


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
        self,
        model: ServedModel,
        config: ResolvedConfig,
        weights: Weights,
        processes: ProcessGroup | None,
        *,
        capacity_tokens: int,
    ) -> None:
        """Store the model and its limits.

        Args:
            model: Model that serves the requests.
            config: Configuration of the engine.
            weights: The model's weights, which are checked for changes before each request.
            processes: Process group that this process must lead; None for a single process.
            capacity_tokens: Maximum number of tokens of a request that fit the KV cache.
        """
        self._model, self._config, self._weights, self._processes = model, config, weights, processes
        self._capacity_tokens = capacity_tokens
        self._vocab_size = model.config.vocab_size
        self._tokenizer = model.tokenizer
        self._seeds = random.Random(config.seed)  # of requests without a seed

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
        return Grammars(self.tokenizer, self._vocab_size, self._model.config.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Build the request of `Engine.add_request`.

        Raises:
            ValueError: If the prompt cannot be served.
        """
        require_type(
            "params", params, SamplingParams, "for a number of tokens: SamplingParams(max_tokens=...)"
        )
        require_leader(self._processes)
        self._weights.refresh()
        return self._build("prompt", prompt, params)

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        max_tokens: int | Sequence[int] | None,
        *,
        stop_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Request]:
        """Build the requests of `Engine.generate`, one per prompt; see there for the arguments.

        Raises:
            ValueError: If a prompt cannot be served. The message contains its index and the invalid value.
        """
        require_leader(self._processes)
        self._weights.refresh()
        require(is_list(prompts), "prompts", "be a list of prompts", repr(prompts))
        params_list = per_prompt("sampling_params", sampling_params, len(prompts))
        for params in params_list:
            require_type("sampling_params", params, SamplingParams, "for a number of tokens use max_tokens=")
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
            counts = per_prompt("max_tokens", max_tokens, len(prompts))
            params_list = [
                dataclasses.replace(params, max_tokens=int(count))
                for params, count in zip(params_list, counts, strict=True)
            ]
        return [
            self._build(f"prompts[{i}]", prompt, params)
            for i, (prompt, params) in enumerate(zip(prompts, params_list, strict=True))
        ]

    def _build(self, name: str, prompt: object, params: SamplingParams) -> Request:
        """Build the request of one prompt. Error messages refer to the prompt as `name`."""
        tokenizer, vocab_size = self.tokenizer, self._vocab_size
        token_ids = prompt_token_ids_of(name, prompt, tokenizer=tokenizer, vocab_size=vocab_size)
        for kind in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(params, kind) or ()
            invalid = [i for i in ids if not 0 <= i < vocab_size]
            require(not invalid, kind, f"be in the vocabulary, [0, {vocab_size})", invalid)
        if params.stop and tokenizer is None:
            raise ValueError(
                f"stop={params.stop!r} requires a tokenizer, but the model has no tokenizer.json. "
                "Pass stop_token_ids instead."
            )
        params = params.with_seed(self._seeds.getrandbits(32))
        max_new_tokens = self._max_new_tokens(name, len(token_ids), params.max_tokens)
        new_mask = token_masks(params, tokenizer=tokenizer, vocab_size=vocab_size, grammars=self.grammars)
        eos_ids = frozenset() if params.ignore_eos else frozenset(self._model.config.eos_token_ids)

        # prompt_logprobs need the logits of every prompt token, so no cached prefix is used.
        is_shared = self._config.enable_prefix_caching and params.prompt_logprobs is None
        hashes = BlockHashes(self._config.block_size, token_ids) if is_shared else None
        sequences = [
            SequenceState(
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                max_tokens=max_new_tokens,
                sampling_params=params.of_completion(index),
                eos_ids=eos_ids,
                text=IncrementalDetokenizer(
                    tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens
                ),
                hashes=None if hashes is None else hashes.copy(),
                mask=new_mask(),
            )
            for index in range(params.n)
        ]
        for completion in sequences[1:]:  # The prompt is computed once, by any of them.
            completion.prompt_logprobs = sequences[0].prompt_logprobs
        return Request(prompt if isinstance(prompt, str) else None, params, sequences)

    def _max_new_tokens(self, name: str, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return `max_tokens`, limited by the context length.

        The last token needs no position in the context.
        """
        longest, capacity = self._config.max_model_len, self._capacity_tokens
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
                f"{name} has {num_prompt_tokens} tokens and max_tokens={max_tokens}, but the KV cache holds "
                f"only {capacity} tokens. Increase num_blocks or reduce max_tokens."
            )
        return max_tokens
