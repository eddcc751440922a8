"""Resolution of a request's tools and tool_choice into a parser and an output constraint."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import ChatCompletionBody, NamedToolChoice
from jattn.serving.server.reasoning import REASONING_START, ReasoningFormat
from jattn.serving.server.sampling_params import OutputConstraint
from jattn.serving.server.tool_call_formats import LLAMA3_JSON, ToolCallFormat, parse_arguments
from jattn.serving.server.tool_call_grammar import required_calls_grammar, strict_calls_grammar
from jattn.serving.server.tool_call_parser import NamedFunctionParser, ToolCallParser, make_tool_call_parser


class ToolCalling(NamedTuple):
    """The way that a request's tools are called.

    Attributes:
        make_parser: Function that makes the tool-call parser of one completion; None if no tool can be
            called.
        constraint: Constraint on the output that the tools require, or None.
        keeps_special_tokens: Whether the tags of calls are special tokens, which the text must contain.
    """

    make_parser: Callable[[], ToolCallParser] | None = None
    constraint: OutputConstraint | None = None
    keeps_special_tokens: bool = False


def resolve_tool_calling(
    body: ChatCompletionBody,
    call_format: ToolCallFormat | None,
    tokenizer: Any,
    reasoning_format: ReasoningFormat | None = None,
) -> ToolCalling:
    """Return how a request's tools are called.

    Args:
        body: Parsed JSON body of the request.
        call_format: The model's tool-call format, or None if it is unknown.
        tokenizer: A `tokenizers.Tokenizer`.
        reasoning_format: The model's reasoning format; gpt-oss's also finds the calls.

    Raises:
        ValueError: If tool_choice names a missing tool, or is "required" without tools.
        ApiError: If the model's tool-call format is unknown and tool_choice is "auto".
    """
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, NamedToolChoice):
        functions = {tool.function.name: tool.function for tool in tools}
        function = functions.get(choice.function.name)
        if function is None:
            raise ValueError(
                f"tool_choice names the function {choice.function.name!r}, which is not in tools: "
                f"{sorted(functions)}."
            )
        # Arguments are an object, even if the schema only lists properties.
        schema = StructuredOutputsParams(json={"type": "object"} | (function.parameters or {}))
        return ToolCalling(
            lambda: NamedFunctionParser(function.name), OutputConstraint("tool_choice", schema)
        )
    is_required = choice == "required"
    if is_required and not tools:
        raise ValueError('tool_choice="required" needs at least one tool in tools.')
    finds_calls = reasoning_format is not None and reasoning_format.make_harmony_parser is not None
    if not tools or choice == "none" or (finds_calls and not is_required):
        return ToolCalling()
    if call_format is None and not is_required:
        message = (
            "tools: The tool-call format of this model is unknown. Pass tool_choice="
            '"required", or start the server with --tool-call-parser.'
        )
        raise ApiError(422, message, "tools", "unsupported")
    # A grammar enforces a format that the template does not mention.
    known_format = call_format or LLAMA3_JSON
    max_calls = 1 if body.parallel_tool_calls is False else None
    special_tokens = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    constraint: OutputConstraint | None = None
    if is_required:
        grammar = required_calls_grammar(known_format, tools, special_tokens, max_calls=max_calls)
        constraint = OutputConstraint("tool_choice", StructuredOutputsParams(grammar=grammar))
    elif any(tool.function.strict for tool in tools):
        grammar = strict_calls_grammar(
            known_format,
            tools,
            special_tokens,
            max_calls=max_calls,
            excluded_start=None if reasoning_format is None else REASONING_START,
        )
        constraint = OutputConstraint("tools", StructuredOutputsParams(grammar=grammar))
    function_names = {tool.function.name for tool in tools}

    def make_parser() -> ToolCallParser:
        return make_tool_call_parser(known_format, function_names=function_names, max_calls=max_calls)

    return ToolCalling(make_parser, constraint, special_tokens.get(known_format.start_tag, False))


def parse_call_arguments(param: str, calls: Any) -> list[dict[str, Any]]:
    """Replace the JSON arguments of a message's tool calls by objects, as chat templates expect them.

    Missing arguments become an empty object, as in vLLM.

    Args:
        param: Name of the calls in error messages.
        calls: The message's "tool_calls".

    Raises:
        ValueError: If an entry is not a function call, or its arguments are not a JSON object.
    """
    if not isinstance(calls, list):
        raise ValueError(f"{param} must be a list of tool calls, got {calls!r}.")
    parsed_calls = []
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("function"), dict)):
            raise ValueError(f"{param} must contain function calls, got {call!r}.")
        function: dict[str, Any] = call["function"]
        try:
            arguments = parse_arguments(function.get("arguments"))
        except ValueError as error:
            raise ValueError(f"{param}.function.arguments {error}") from None
        parsed_calls.append(call | {"function": function | {"arguments": arguments}})
    return parsed_calls
