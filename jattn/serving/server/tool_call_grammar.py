"""Grammars that constrain the output to valid tool calls: existing tools, with arguments of their schemas.

Grammars are in Lark's syntax with llguidance's extensions.
"""

import json
from collections.abc import Collection, Sequence

from jattn.serving.engine.structured_outputs import JSON_OPTIONS
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import ToolCallFormat

ANY_TEXT, NO_CALL = r"/(.|\n)*/", r"/[^{](.|\n)*/"


def required_calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    special_tokens: Collection[str],
    *,
    max_calls: int | None,
) -> str:
    """Return the grammar of outputs that consist of one or more calls.

    Args:
        call_format: Format of the calls.
        tools: Available tools; every call's arguments follow its schema.
        special_tokens: Texts of the special tokens, which grammars distinguish from the same characters.
        max_calls: Maximum number of calls: 1, or None for no limit.
    """
    call = f"{_tag(call_format.start_tag, special_tokens)} {_call_body(call_format, tools, special_tokens)}"
    functions = _function_rules(call_format, tools, only_strict=False)
    return f"start: call {_more_calls(call_format, max_calls)}\ncall: {call}\n{functions}"


def strict_calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    special_tokens: Collection[str],
    *,
    max_calls: int | None,
) -> str:
    """Return the grammar of any text in which the calls of strict tools follow their schemas.

    Args:
        call_format: Format of the calls.
        tools: Available tools; calls of those that are not strict may have any arguments.
        special_tokens: Texts of the special tokens, which grammars distinguish from the same characters.
        max_calls: Maximum number of calls: 1, or None for no limit.
    """
    call = _call_body(call_format, tools, special_tokens)
    functions = _function_rules(call_format, tools, only_strict=True)
    if not call_format.start_tag:
        start = f"start: (call {_more_calls(call_format, max_calls)} | NO_CALL)?"
        return f"{start}\nNO_CALL: {NO_CALL}\ncall: {call}\n{functions}"
    rules = [f"start: text_and_call{'*' if max_calls is None else '?'} TEXT", f"TEXT: {ANY_TEXT}"]
    if call_format.start_tag in special_tokens:
        rules.append(f"text_and_call: TEXT {call_format.start_tag} {call}")
    else:  # Lazy matching ends the text at the first start tag.
        rules += [
            f"text_and_tag[lazy]: TEXT {json.dumps(call_format.start_tag)}",
            f"text_and_call: text_and_tag {call}",
        ]
    return "\n".join([*rules, functions])


def _tag(text: str, special_tokens: Collection[str]) -> str:
    return text if text in special_tokens else json.dumps(text) if text else ""


def _more_calls(call_format: ToolCallFormat, max_calls: int | None) -> str:
    return f"({json.dumps(call_format.separator)} call)*" if max_calls is None else ""


def _call_body(call_format: ToolCallFormat, tools: Sequence[Tool], special_tokens: Collection[str]) -> str:
    """Return the rule for a call after its start tag."""
    newline = json.dumps("\n") if call_format.start_tag else ""
    functions = " | ".join(f"function_{i}" for i in range(len(tools)))
    return f"{newline} ({functions}) {newline} {_tag(call_format.end_tag, special_tokens)}"


def _function_rules(call_format: ToolCallFormat, tools: Sequence[Tool], *, only_strict: bool) -> str:
    """Return one rule per tool: an object whose name precedes the arguments, so that it is known first."""
    rules = []
    for i, tool in enumerate(tools):
        is_unconstrained = only_strict and not tool.function.strict
        schema = {"type": "object"} | (tool.function.parameters or {} if not is_unconstrained else {})
        schema["x-guidance"] = JSON_OPTIONS
        head = f'{{"name": {json.dumps(tool.function.name)}, "{call_format.arguments_key}": '
        rules.append(f'function_{i}: {json.dumps(head)} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules)
