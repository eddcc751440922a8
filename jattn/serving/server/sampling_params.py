"""Conversion of a request's parameters to SamplingParams."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jattn.serving.engine.sampling_params import NUM_SEEDS, SamplingParams
from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import GenerationBody, ResponseFormat

# Parameters that have the same name and meaning in SamplingParams.
COPIED = (
    *("n", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs"),
)
# Known parameters that are not supported, with the values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **{"priority": (0,), "use_beam_search": (False,), "length_penalty": (1,)},
    **dict.fromkeys(("logits_processors", "guided_whitespace_pattern", "cache_salt"), ()),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs"), ()),
}
# Every new token is compared with all stop strings of its request: a thousand of them take 1 ms per token and
# delay all requests. Bad words are tokenized before the request is served, in 14 us each.
MAX_STRINGS = {"stop": 128, "bad_words": 1024}
# Parameters with a default in the checkpoint.
CHECKPOINT_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's guided_ parameters, without their prefix.


class OutputConstraint(NamedTuple):
    """A constraint on the output's structure.

    Attributes:
        param: Request parameter that sets the constraint.
        structured_outputs: Constraint of the generated text.
    """

    param: str
    structured_outputs: StructuredOutputsParams


def default_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the defaults of requests: the checkpoint's, with temperature 1 instead of greedy.

    OpenAI clients rely on temperature 1, for example if they request several completions.

    Args:
        params: `Engine.default_sampling_params`.

    Source: vLLM `--generation-config auto`, which ignores do_sample.
    """
    defaults = {name: getattr(params, name) for name in CHECKPOINT_DEFAULTS}
    return defaults if params.temperature else defaults | {"temperature": 1.0}


def to_sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    constraint: OutputConstraint | None,
    **overrides: Any,
) -> SamplingParams:
    """Return the SamplingParams of a request.

    Args:
        body: Parsed JSON body of the request.
        defaults: Values of parameters that the request does not set.
        constraint: Constraint on the output's structure, or None.
        overrides: Arguments of SamplingParams that replace the request's.

    Raises:
        ValueError: If a value is out of its range; the message names the parameter.
    """
    requested = {name: getattr(body, name) for name in COPIED if getattr(body, name) is not None}
    for name, max_strings in MAX_STRINGS.items():
        strings = requested.get(name, ())
        if not isinstance(strings, str) and len(strings) > max_strings:
            raise ValueError(f"{name} must contain at most {max_strings} strings, got {len(strings)}.")
    if body.seed is not None and body.seed != -1:  # In vLLM, -1 means no seed.
        requested["seed"] = body.seed % NUM_SEEDS
    if body.logit_bias:
        requested["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if constraint is not None:
        requested["structured_outputs"] = constraint.structured_outputs
    return SamplingParams(**{**defaults, **requested, **overrides})


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise ValueError(f"logit_bias must map token ids to numbers, got the key {key!r}.")
    return int(key)


def check_supported(body: GenerationBody, endpoint_unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Reject unsupported parameters, and those that do not fit the value of `stream`.

    Args:
        body: Parsed JSON body of the request.
        endpoint_unsupported: Unsupported parameters of this endpoint, in addition to UNSUPPORTED, with the
            values that have no effect and are accepted.

    Raises:
        ApiError: If an unsupported parameter is set.
        ValueError: If a parameter requires, or excludes, a streaming response.
    """
    unsupported = UNSUPPORTED | dict(endpoint_unsupported)
    if not body.skip_special_tokens:  # Without special tokens, the spaces between them do not matter.
        unsupported |= {"spaces_between_special_tokens": (True,)}
    for name, accepted in unsupported.items():
        check_unsupported(name, getattr(body, name), accepted)
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options requires stream=true. Set stream=true, or omit stream_options.")
    if body.prompt_logprobs is not None and body.stream:
        raise ValueError("prompt_logprobs is not supported with stream=true. Set stream=false.")


def check_unsupported(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Reject an unsupported parameter, unless its value is None or has no effect.

    Args:
        name: Name of the parameter.
        value: Its value in the request.
        accepted: Values that have no effect.

    Raises:
        ApiError: If the value is not accepted.
    """
    if value is not None and value not in accepted:
        message = f"{name}: {value!r} is not supported. Omit this parameter."
        raise ApiError(400, message, name, "unsupported_value")


def check_context_length(param: str, num_prompt: int, max_tokens: int | None, max_model_len: int) -> None:
    """Check that the prompt and the new tokens, at least one, fit into the model's context.

    Args:
        param: Request parameter that holds the prompt.
        num_prompt: Number of prompt tokens.
        max_tokens: Maximum number of new tokens, or None.
        max_model_len: Maximum context length, in tokens.

    Raises:
        ApiError: If they do not fit, with OpenAI's message and code, which clients look for.
    """
    num_new = 1 if max_tokens is None else max_tokens
    if num_prompt + num_new > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested"
            f" {num_prompt + num_new} tokens ({num_prompt} in the {param}, {num_new} in the completion)."
            f" Please reduce the length of the {param} or completion."
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def truncate_prompt(
    body: GenerationBody, token_ids: list[int], max_len: int, max_tokens: int | None
) -> list[int]:
    """Return the last tokens of a prompt, as many as `truncate_prompt_tokens` keeps.

    Args:
        body: Parsed JSON body of the request.
        token_ids: Token ids of the prompt.
        max_len: Maximum number of tokens of a request.
        max_tokens: Maximum number of new tokens among them; None reserves one.

    Source: vLLM `truncate_prompt_tokens`; -1 keeps as many as leave room for the new tokens.
    """
    num_kept = body.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept < 0:
        num_kept = max(max_len - (1 if max_tokens is None else max_tokens), 1)
    return token_ids[max(len(token_ids) - num_kept, 0) :]


def output_constraint(
    body: GenerationBody, tool_constraint: OutputConstraint | None = None
) -> OutputConstraint | None:
    """Return the constraint on a request's output, or None.

    Args:
        body: Parsed JSON body of the request.
        tool_constraint: Constraint that the request's tools set, or None.

    Raises:
        ValueError: If several parameters set a constraint.
        ApiError: If a constraint is invalid.
    """
    arguments: dict[str, dict[str, Any]] = {
        f"guided_{name}": {name: value}
        for name in GUIDED
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if body.structured_outputs is not None:
        arguments["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if body.response_format is not None and body.response_format.type != "text":
        arguments["response_format"] = _response_format_arguments(body.response_format)
    params = [*arguments, *([tool_constraint.param] if tool_constraint else [])]
    if not params:
        return None
    if len(params) > 1:
        raise ValueError(f"{params[0]} cannot be combined with {', '.join(params[1:])}.")
    if tool_constraint:
        return tool_constraint
    try:
        return OutputConstraint(params[0], StructuredOutputsParams(**arguments[params[0]]))
    except ValueError as error:
        message = str(error) if params[0] == "structured_outputs" else f"{params[0]}: {error}"
        raise ApiError(400, message, params[0]) from error


def _response_format_arguments(response_format: ResponseFormat) -> dict[str, Any]:
    """Return the arguments of StructuredOutputsParams for a response_format."""
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.json_schema is None:
        raise ValueError('response_format must have a json_schema if its type is "json_schema".')
    return {"json": response_format.json_schema.schema_}
