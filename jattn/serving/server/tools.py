"""Tools that a model may call: what a request says of them, and what that means for its answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import ChatCompletionBody, NamedToolChoice, Tool
from jattn.serving.server.tool_call_formats import LLAMA3_JSON, CallFormat
from jattn.serving.server.tool_call_grammar import required_calls, strict_calls
from jattn.serving.server.tool_call_parser import CallReader, NamedReader, ToolReader
from pallas_kernels.checks import require


class Calling(NamedTuple):
    """What a request's tools mean for its answers.

    Attributes:
        make_reader: Makes what finds a completion's calls; None = there are none.
        form: The parameter that wants the text to have a form, and the form; None = none does.
        has_special_tokens: Calls stand between tokens that are special, so that the text must show them.
    """

    make_reader: Callable[[], ToolReader] | None = None
    form: tuple[str, StructuredOutputsParams] | None = None
    has_special_tokens: bool = False


def calling(body: ChatCompletionBody, form: CallFormat | None, tokenizer: Any) -> Calling:
    """How calls are made and found.

    Args:
        body: The request.
        form: How the model writes calls; None = nobody knows.
        tokenizer: A `tokenizers.Tokenizer`.

    Raises:
        ValueError: A function is named that is not among the tools, or one of none is required.
        ApiError: Nobody knows what a call looks like in what this model says.
    """
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, NamedToolChoice):
        function = named_tool(tools, choice).function
        # Arguments are an object, also where the schema tells of its properties alone.
        schema = StructuredOutputsParams(json={"type": "object"} | (function.parameters or {}))
        return Calling(lambda: NamedReader(function.name), ("tool_choice", schema))
    is_required = choice == "required"
    require(bool(tools) or not is_required, "tool_choice", "come with tools", repr(choice))
    if not tools or choice == "none":
        return Calling()
    if form is None and not is_required:
        told = "tools: the chat template asks for calls in no way that is known. "
        told += 'Have tool_choice be "required", or start the server with --tool-call-parser.'
        raise ApiError(422, told, "tools", "unsupported")
    known = form or LLAMA3_JSON  # what no template asks for, the grammar does
    most = 1 if body.parallel_tool_calls is False else None
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    grammar: tuple[str, StructuredOutputsParams] | None = None
    if is_required:
        text = required_calls(known, tools, special, most=most)
        grammar = "tool_choice", StructuredOutputsParams(grammar=text)
    elif any(tool.function.strict for tool in tools):
        grammar = "tools", StructuredOutputsParams(grammar=strict_calls(known, tools, special, most=most))
    names = {tool.function.name for tool in tools}
    make_reader = lambda: CallReader(known, names=names, most=most)
    return Calling(make_reader, grammar, special.get(known.opening, False))


def named_tool(tools: Sequence[Tool], choice: NamedToolChoice) -> Tool:
    """The tool that a request's tool_choice names.

    Raises:
        ValueError: It has none of that name.
    """
    found = [tool for tool in tools if tool.function.name == choice.function.name]
    names = sorted(tool.function.name for tool in tools)
    require(len(found) > 0, "tool_choice", f"name one of the tools {names}", choice.function.name)
    return found[0]


def with_objects(name: str, calls: Any) -> list[dict[str, Any]]:
    """A conversation's calls as templates want them: arguments are an object, where clients send its JSON.

    Where there are none it is empty, as in vLLM.

    Raises:
        ValueError: They are no calls, or their arguments no JSON; `name` is what they are called.
    """
    require(isinstance(calls, list), name, "be a list of calls", repr(calls))
    found = []
    for call in calls:
        is_call = isinstance(call, dict) and isinstance(call.get("function"), dict)
        require(is_call, name, "be calls of functions", repr(call))
        function: dict[str, Any] = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                require(False, f"{name}.function.arguments", "be JSON", repr(arguments))
        found.append(call | {"function": function | {"arguments": arguments}})
    return found
