"""From a request's parameters to SamplingParams."""

from collections.abc import Mapping
from typing import Any

from jattn.serving.engine.sampling_params import NUM_SEEDS, SamplingParams
from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import GenerationBody, ResponseFormat
from pallas_kernels.checks import require

COPIED = (
    *("n", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs"),
)
# What is known and not served, with the values that ask for nothing.
OFF: dict[str, tuple[Any, ...]] = {
    **{"priority": (0,), "use_beam_search": (False,), "length_penalty": (1,)},
    **dict.fromkeys(("logits_processors", "guided_whitespace_pattern", "cache_salt"), ()),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs"), ()),
}
# Every token of a text is compared with all of its stop strings: a thousand take 1 ms a token, and all other
# requests wait for it. Words become tokens before it is served, 14 us each.
MAX_TEXTS = {"stop": 128, "bad_words": 1024}
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # as checkpoints have them

type Form = tuple[str, StructuredOutputsParams]  # which parameter wants a form, and which form


def default_sampling(params: SamplingParams) -> dict[str, Any]:
    """What a request gets where it says nothing: the engine's, but never greedily; then temperature 1.

    OpenAI's clients take that for granted, as where they ask for several completions.

    Args:
        params: `Engine.default_sampling_params`.

    Source: vLLM `--generation-config auto`; there do_sample is not looked at.
    """
    own = {name: getattr(params, name) for name in DEFAULTED}
    return own if params.temperature else own | {"temperature": 1.0}


def sampling_params(
    body: GenerationBody, defaults: Mapping[str, Any], form: Form | None, **others: Any
) -> SamplingParams:
    """What a request asks for; `others` as SamplingParams has them.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """
    asked = {name: getattr(body, name) for name in COPIED if getattr(body, name) is not None}
    for name, most in MAX_TEXTS.items():
        texts = asked.get(name, ())
        is_few = isinstance(texts, str) or len(texts) <= most
        require(is_few, name, f"hold at most {most} strings", len(texts))
    if body.seed is not None and body.seed != -1:  # vLLM's word for none
        asked["seed"] = body.seed % NUM_SEEDS
    if body.logit_bias:
        asked["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if form is not None:
        asked["structured_outputs"] = form[1]
    return SamplingParams(**{**defaults, **asked, **others})


def _token_id(key: str) -> int:
    require(key.isascii() and key.isdigit(), "logit_bias", "map token ids to numbers", repr(key))
    return int(key)


def refuse(body: GenerationBody, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses what is known and not served, and what asks for something in a stream or out of one.

    Args:
        body: The request.
        allowed: Names of its kind, besides those of all kinds, with the values that each may have, or none at
            all.

    Raises:
        ApiError: One has another.
        ValueError: Something goes with a stream alone, or with none.
    """
    spaces = () if body.skip_special_tokens else (True,)  # with it, they make no difference
    names = OFF | dict(allowed) | ({"spaces_between_special_tokens": spaces} if spaces else {})
    for name, values in names.items():
        refuse_other(name, getattr(body, name), values)
    is_alone = body.stream_options is None or body.stream
    require(is_alone, "stream_options", "be null without stream", body.stream_options)
    wants_prompt = body.prompt_logprobs is not None and body.stream
    require(not wants_prompt, "prompt_logprobs", "be null with stream", body.prompt_logprobs)


def refuse_other(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuses a parameter that is known and not served, but for values that ask for nothing; None is one.

    Raises:
        ApiError: It has another.
    """
    if value is not None and value not in allowed:
        told = f"{name}: {value!r} is not served. Leave it out."
        raise ApiError(400, told, name, "unsupported_value")


def require_place(name: str, num_prompt: int, max_tokens: int | None, max_model_len: int) -> None:
    """Prompt and new tokens must fit the context, at least one; `name` is what the prompt is called.

    Raises:
        ApiError: They do not. Clients look for OpenAI's words and code.
    """
    num_new = 1 if max_tokens is None else max_tokens
    if num_prompt + num_new > max_model_len:
        told = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested"
            f" {num_prompt + num_new} ({num_prompt} in the {name}, {num_new} in the completion)."
        )
        raise ApiError(400, told, name, "context_length_exceeded")


def truncated(body: GenerationBody, token_ids: list[int], longest: int, max_tokens: int | None) -> list[int]:
    """A prompt's last tokens, as many as are wanted.

    Args:
        body: The request.
        token_ids: The prompt.
        longest: Most tokens of a request.
        max_tokens: New ones among them; None = at least one.

    Source: vLLM `truncate_prompt_tokens`; -1 = as many as leave a place for the new tokens.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most < 0:
        most = max(longest - (1 if max_tokens is None else max_tokens), 1)
    return token_ids[max(len(token_ids) - most, 0) :]


GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's guided_ parameters


def wanted_form(body: GenerationBody, of_tools: Form | None = None) -> Form | None:
    """Which parameter wants a form, and which form; None = none does.

    Args:
        body: The request.
        of_tools: The form that its tools want.

    Raises:
        ValueError: Several do, or one wants no form, or several.
    """
    found: dict[str, dict[str, Any]] = {
        f"guided_{name}": {name: value}
        for name in GUIDED
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if body.structured_outputs is not None:
        told = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        found["structured_outputs"] = told
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = _of_response_format(body.response_format)
    names = [*found, *([of_tools[0]] if of_tools else [])]
    if not names:
        return None
    name, *others = names
    require(not others, name, "be the only one of its kind", names)
    if of_tools:
        return of_tools
    try:
        return name, StructuredOutputsParams(**found[name])
    except ValueError as error:
        raise ApiError(400, str(error), name) from error


def _of_response_format(told: ResponseFormat) -> dict[str, Any]:
    if told.type == "json_object":
        return {"json_object": True}
    has_one = told.json_schema is not None
    require(has_one, "response_format", 'have a json_schema with type "json_schema"', None)
    assert told.json_schema is not None
    return {"json": told.json_schema.schema_}
