"""Where prompts come in: checked against what the engine can serve, and made into requests."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.serving.engine.detokenizer import TextStream, tokens_of
from jattn.serving.engine.logits_processors import token_masks
from jattn.serving.engine.outputs import GenerationResult
from jattn.serving.engine.prefix_cache import BlockHashes
from jattn.serving.engine.processes import Processes, must_lead
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.structured_outputs import Grammars
from jattn.serving.engine.weights import Weights
from pallas_kernels.checks import require, require_type

type Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """What a prompt must fit.

    Attributes:
        vocab_size: Token ids are below it.
        max_model_len: Positions of the model.
        capacity_tokens: Tokens that the cache holds.
        block_size: Tokens of a block.
        shares_prefixes: Blocks are found by what they hold.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    block_size: int
    shares_prefixes: bool


class Request(NamedTuple):
    """A prompt, its text if it has one, and as many generations as params.n, alike but for their seeds."""

    prompt: str | None
    params: SamplingParams
    generations: list[Generation]

    @property
    def is_finished(self) -> bool:
        """Whether all of them are."""
        return all([generation.finish_reason is not None for generation in self.generations])

    def result(self) -> GenerationResult:
        """What the prompt became, once all are finished."""
        first, *others = (one.result(i, self.prompt) for i, one in enumerate(self.generations))
        return dataclasses.replace(first, outputs=(first, *others))


def build_requests(
    prompts: Sequence[Prompt],
    max_tokens: int | Sequence[int] | None,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    *,
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    **served: Any,
) -> list[Request]:
    """One Request for each prompt; arguments as `Engine.generate`, `served` as build_request has them.

    Raises:
        ValueError: A prompt cannot be served; the message names it and the value.
    """
    require(_is_list(prompts), "prompts", "be a list of prompts", repr(prompts))
    samplers = per_prompt(
        "sampling_params",
        sampling_params,
        len(prompts),
        is_one=lambda params: isinstance(params, SamplingParams),
        kind="SamplingParams (how many tokens is max_tokens=)",
    )
    require_list_of_ints("stop_ids", stop_ids)
    if len(stop_ids) or ignore_eos:  # else they are looked at again for each prompt
        samplers = [
            dataclasses.replace(
                params,
                stop_token_ids=(*(params.stop_token_ids or ()), *stop_ids),
                ignore_eos=params.ignore_eos or ignore_eos,
            )
            for params in samplers
        ]
    if max_tokens is not None:
        counts = per_prompt("max_tokens", max_tokens, len(prompts), is_one=_is_int, kind="an int")
        samplers = [
            dataclasses.replace(params, max_tokens=int(count))
            for params, count in zip(samplers, counts, strict=True)
        ]
    return [
        build_request(f"prompts[{i}]", prompt, params, **served)
        for i, (prompt, params) in enumerate(zip(prompts, samplers, strict=True))
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
    """One prompt's Request; `name` is what errors call it.

    Raises:
        ValueError: It cannot be served; the message names what is wrong and the value.
    """
    token_ids = token_ids_of(name, prompt, tokenizer=tokenizer, vocab_size=limits.vocab_size)
    for kind in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        ids = getattr(params, kind) or ()
        wrong = [i for i in ids if not 0 <= i < limits.vocab_size]
        require(not wrong, kind, f"be in the vocabulary, [0, {limits.vocab_size})", wrong)
    has_text = tokenizer is not None or not params.stop
    require(has_text, "stop", "be empty (the model has no tokenizer.json)", params.stop)
    params = params.with_seed()
    most = _most_new_tokens(name, len(token_ids), params.max_tokens, limits)
    new_mask = token_masks(params, tokenizer=tokenizer, vocab_size=limits.vocab_size, grammars=grammars)

    # A prompt whose logits are wanted is computed, every token of it.
    is_shared = limits.shares_prefixes and params.prompt_logprobs is None
    hashes = BlockHashes(limits.block_size, token_ids) if is_shared else None

    def generation(params: SamplingParams) -> Generation:
        return Generation(
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_tokens=most,
            sampling_params=params,
            eos_ids=frozenset() if params.ignore_eos else eos_ids,
            text=TextStream(tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens),
            hashes=None if hashes is None else hashes.copy(),
            mask=new_mask(),
        )

    text = prompt if isinstance(prompt, str) else None
    first, *others = (generation(params.of_completion(index)) for index in range(params.n))
    for one in others:  # the prompt is computed once, by whichever of them
        one.prompt_logprobs = first.prompt_logprobs
    return Request(text, params, [first, *others])


def _most_new_tokens(name: str, num_prompt_tokens: int, max_tokens: int | None, limits: PromptLimits) -> int:
    """`max_tokens`, or fewer where the model's context ends; the last one needs no place in it."""
    longest, capacity = limits.max_model_len, limits.capacity_tokens
    count = f"{num_prompt_tokens} tokens"
    require(num_prompt_tokens <= longest, name, f"fit the model's {longest} positions", count)
    rest = longest - num_prompt_tokens + 1
    if max_tokens is None:
        require(num_prompt_tokens <= capacity, name, f"fit the cache's {capacity} tokens", count)
        return min(rest, capacity - num_prompt_tokens + 1)
    max_tokens = min(max_tokens, rest)
    fits = num_prompt_tokens + max_tokens - 1 <= capacity
    need = f"{num_prompt_tokens} + {max_tokens} tokens (raise num_blocks or lower max_tokens)"
    require(fits, f"{name} and its max_tokens", f"fit the cache's {capacity} tokens", need)
    return max_tokens


def require_one_each(requests: Sequence[Request], where: str) -> None:
    """Each request must have one completion.

    Raises:
        ValueError: One has several; `where` says what that does not go with.
    """
    for request in requests:
        require(request.params.n == 1, "n", f"be 1 {where}", request.params.n)


def per_prompt[T](
    name: str, values: T | Sequence[T], count: int, *, is_one: Callable[[Any], bool], kind: str
) -> list[T]:
    """One value for each prompt, from one for all of them or a list.

    Raises:
        ValueError: It is neither, or the list has another length.
    """
    if is_one(values):
        return [values] * count  # type: ignore[list-item]
    require(_is_list(values), name, f"be {kind}, or a list of one a prompt", repr(values))
    one_each: list[T] = list(values)  # type: ignore[arg-type]
    require(len(one_each) == count, name, f"have one entry per prompt ({count})", len(one_each))
    for i, value in enumerate(one_each):
        require(is_one(value), f"{name}[{i}]", f"be {kind}", repr(value))
    return one_each


def require_list_of_ints(name: str, values: Any) -> None:
    """`values` must be a list (or tuple, or array) of ints."""
    require(_is_list(values) and all(map(_is_int, values)), name, "be a list of ints", repr(values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def token_ids_of(name: str, prompt: object, *, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """A prompt's tokens.

    Raises:
        ValueError: It is text and there is no tokenizer, or it has halves of characters, it is empty, not a
            list of ints, or a token is not in the vocabulary.
    """
    if isinstance(prompt, str):
        require(tokenizer is not None, name, "be token ids (the model has no tokenizer.json)", repr(prompt))
        assert tokenizer is not None
        token_ids: np.ndarray = np.asarray(tokens_of(name, prompt, tokenizer), np.int64)
    else:
        try:
            token_ids = np.asarray(prompt)
        except ValueError:  # lists of several lengths
            token_ids = np.zeros((0, 0))
    require(token_ids.ndim == 1, name, "be text or a list of token ids", repr(prompt))
    require(token_ids.size > 0, name, "have at least one token", repr(prompt))
    require(token_ids.dtype.kind in "iu", name, "be text or a list of token ids", repr(prompt))
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    for i in wrong[:1]:
        require(False, f"{name}[{i}]", f"be in the vocabulary, [0, {vocab_size})", token_ids[i])
    return token_ids.tolist()


class Intake:
    """Makes requests for one engine.

    Attributes:
        limits: What a prompt must fit.
    """

    def __init__(
        self, model: ServedModel, limits: PromptLimits, weights: Weights, processes: Processes | None
    ) -> None:
        """Prepares nothing.

        Args:
            model: Whose tokens these are.
            limits: What a prompt must fit.
            weights: The model's, looked at before each prompt that comes in.
            processes: Of which this must be the one that leads; None = it is alone.
        """
        self._model, self.limits, self._weights, self._processes = model, limits, weights, processes
        self.tokenizer = model.tokenizer

    @property
    def tokenizer(self) -> Any:
        """Of texts, in and out; None = there are only token ids."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.__dict__.pop("grammars", None)  # those were of the one before

    @functools.cached_property
    def grammars(self) -> Grammars:
        """As `Engine.grammars`."""
        config = self._model.config
        return Grammars(self.tokenizer, config.vocab_size, config.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """As `Engine.add_request` takes them.

        Raises:
            ValueError: It cannot be served.
        """
        require_type("params", params, SamplingParams, "how many tokens is its max_tokens")
        self._look()
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
        """As `Engine.generate` takes them.

        Raises:
            ValueError: One cannot be served.
        """
        self._look()
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

    def _look(self) -> None:
        must_lead(self._processes)
        self._weights.refresh()
