"""Request bodies: the OpenAI API's, with vLLM's extra parameters."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from jattn.serving.server.errors import ApiError
from jattn.serving.server.options import ServerOptions

MAX_COMPLETIONS = 128  # Maximum n of a prompt, as in the OpenAI API.


class Body(BaseModel):
    """A request's JSON object. Unknown fields are rejected, and values are not converted to other types.

    A field with the value null is treated as missing, since some clients send null for every unset field.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    """Options of streams: whether the last chunk, or every chunk, contains the token counts."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A JSON schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The structure of the output: text, any JSON object, or JSON with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsBody(Body):
    """vLLM's `structured_outputs` parameter."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body):
    """Parameters of text and chat completions; None selects the model's default."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's parameters
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Metadata for the client's use, which is ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Only the default is supported
    priority: int = 0
    use_beam_search: bool = False
    length_penalty: float = 1.0
    logits_processors: Any = None
    guided_whitespace_pattern: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    # Only the default is supported
    suffix: str | None = None


class Message(BaseModel):
    """A message of a conversation. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[str | dict[str, Any]] | None = None


class ToolFunction(Body):
    """A function that the model may call, with a JSON schema of its parameters."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call; only functions are supported."""

    type: Literal["function"]
    function: ToolFunction


class ChatTemplateBody(Body):
    """Parameters of the chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # Not supported


class FunctionName(Body):
    """The name of a tool's function."""

    name: str


class NamedToolChoice(Body):
    """A tool_choice that requires a call of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionBody(GenerationBody, ChatTemplateBody):
    """Body of `POST /v1/chat/completions`."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Only the default is supported
    modalities: list[str] | None = None
    echo: bool = False
    include_reasoning: bool = True
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    verbosity: str | None = None
    moderation: Any = None
    mm_processor_kwargs: Any = None


class TokenizeCompletionBody(Body):
    """Body of `POST /tokenize` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateBody):
    """Body of `POST /tokenize` with a conversation."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


async def read_body(request: Request, body_type: Any) -> Any:
    """Read and validate the body of a request.

    Args:
        request: HTTP request.
        body_type: A Body class, or a union of them.

    Raises:
        ApiError: If the body is too large (413).
        pydantic.ValidationError: If the body is invalid.
    """
    options: ServerOptions = request.app.state.service.options
    body = await _read_bytes(request, options.max_body_bytes)
    return pydantic.TypeAdapter(body_type).validate_json(body)


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    content_length = request.headers.get("content-length", "0")
    if content_length.isdigit() and int(content_length) > max_bytes:
        raise _too_large(max_bytes, int(content_length))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes, len(body))
    return bytes(body)


def _too_large(max_bytes: int, num_bytes: int) -> ApiError:
    return ApiError(413, f"The request body of {num_bytes} bytes exceeds the maximum of {max_bytes} bytes.")
