"""From what a caller hands over to what the engine runs: everything that can be wrong is found here."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jattn.serving.generation import Generation
from jattn.serving.sampler import SamplingParams
from jattn.serving.text import TextStream
from pallas_kernels.checks import require, require_positive

type Prompt = str | Sequence[int] | np.ndarray

GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """What a prompt must fit.

    Attributes:
        vocab_size: Token ids are below it.
        max_model_len: Positions of the model.
        capacity_tokens: Tokens that the cache holds.
    """

    vocab_size: int
    max_model_len: int
    capacity_tokens: int


def build_generations(
    prompts: Sequence[Prompt],
    max_tokens: int | Sequence[int],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    stop_ids: frozenset[int],
    tokenizer: Any | None,
    limits: PromptLimits,
) -> list[Generation]:
    """One Generation for each prompt; arguments as `Engine.generate`.

    Raises:
        ValueError: A prompt cannot be served; the message names it and the value.
    """
    require(_is_list(prompts), "prompts", "be a list of prompts", repr(prompts))
    counts = per_prompt("max_tokens", max_tokens, len(prompts), is_one=_is_int, kind="an int")
    samplers = per_prompt(
        "sampling_params",
        GREEDY if sampling_params is None else sampling_params,
        len(prompts),
        is_one=lambda params: isinstance(params, SamplingParams),
        kind="SamplingParams (how many tokens is max_tokens=)",
    )
    generations = []
    for index, (prompt, count, params) in enumerate(zip(prompts, counts, samplers, strict=True)):
        name = f"prompts[{index}]"
        token_ids = token_ids_of(name, prompt, tokenizer=tokenizer, vocab_size=limits.vocab_size)
        generations.append(
            Generation(
                index=index,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                max_tokens=_most_new_tokens(name, len(token_ids), int(count), limits),
                sampling_params=params.with_seed(),
                stop_ids=stop_ids,
                text=TextStream(tokenizer),
            )
        )
    return generations


def _most_new_tokens(name: str, num_prompt_tokens: int, max_tokens: int, limits: PromptLimits) -> int:
    """`max_tokens`, or fewer where the model's context ends; the last one needs no place in it."""
    require_positive(max_tokens=max_tokens)
    longest, capacity = limits.max_model_len, limits.capacity_tokens
    count = f"{num_prompt_tokens} tokens"
    require(num_prompt_tokens <= longest, name, f"fit the model's {longest} positions", count)
    max_tokens = min(max_tokens, longest - num_prompt_tokens + 1)
    fits = num_prompt_tokens + max_tokens - 1 <= capacity
    need = f"{num_prompt_tokens} + {max_tokens} tokens (raise num_blocks or lower max_tokens)"
    require(fits, f"{name} and its max_tokens", f"fit the cache's {capacity} tokens", need)
    return max_tokens


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


def stop_ids_of(stop_ids: Sequence[int], eos_token_ids: Sequence[int]) -> frozenset[int]:
    """The tokens that end a text.

    Raises:
        ValueError: stop_ids is not a list of ints.
    """
    require_list_of_ints("stop_ids", stop_ids)
    return frozenset(map(int, stop_ids)) | frozenset(eos_token_ids)


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
        ValueError: It is text and there is no tokenizer, it is empty, not a list of ints, or a token is not
            in the vocabulary.
    """
    if isinstance(prompt, str):
        require(tokenizer is not None, name, "be token ids (the model has no tokenizer.json)", repr(prompt))
        assert tokenizer is not None
        token_ids = np.asarray(tokenizer.encode(prompt).ids, np.int64)
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
