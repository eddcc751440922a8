"""Grammars that constrain the output to valid tool calls: existing tools, with arguments of their schemas.

Grammars are in Lark's syntax with llguidance's extensions.
"""

import json
from collections.abc import Mapping, Sequence

from jattn.serving.engine.structured_outputs import JSON_OPTIONS
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import (
    ANY_TEXT,
    ARGUMENTS_KEY,
    SPACE,
    ToolCallFormat,
    call_head,
    name_member,
    quote,
    quote_name,
)


def required_calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    special_tokens: Mapping[str, bool],
    *,
    max_calls: int | None,
) -> str:
    """Return the grammar of outputs that consist of one or more calls.

    Args:
        call_format: Format of the calls.
        tools: Available tools; every call's arguments follow its schema.
        special_tokens: Texts of the added tokens, with whether each is special. Grammars distinguish these
            tokens from the same characters.
        max_calls: Maximum number of calls: 1, or None for no limit.
    """
    newline = json.dumps("\n") if call_format.start_tag else ""
    start_tag, end_tag = (_tag(tag, special_tokens) for tag in (call_format.start_tag, call_format.end_tag))
    more_calls = f"({json.dumps(call_format.separator)} call)*" if max_calls is None else ""
    rules = [
        f"start: call {more_calls}",
        f"call: {start_tag} {newline} ({_alternatives(tools)}) {newline} {end_tag}",
    ]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "{call_format.arguments_key}": '
        rules.append(f'function_{i}: {json.dumps(head)} {_arguments(tool, only_strict=False)} "}}"')
    return "\n".join(rules)


def strict_calls_grammar(
    call_format: ToolCallFormat,
    tools: Sequence[Tool],
    special_tokens: Mapping[str, bool],
    *,
    max_calls: int | None,
    excluded_start: str | None = None,
) -> str:
    """Return the grammar of any text in which the calls of strict tools follow their schemas.

    The text between calls is any text that the parser does not take for a call.

    Args:
        call_format: Format of the calls.
        tools: Available tools; calls of those that are not strict may have any arguments.
        special_tokens: Texts of the added tokens, with whether each is special. Grammars distinguish these
            tokens from the same characters.
        max_calls: Maximum number of calls: 1, or None for no limit.
        excluded_start: Pattern that a text without calls must not start with, because the rest of the text is
            parsed alone; None = there is none. Calls behind a start tag follow the grammar in any case.
    """
    many = "*" if max_calls is None else "?"
    rules = [f"functions: {_alternatives(tools)}"]
    for i, tool in enumerate(tools):
        head = call_format.lead + call_head(quote_name(tool.function.name))
        rules += [f"function_{i}: HEAD_{i} {_arguments(tool, only_strict=True)} END", f"HEAD_{i}: /{head}/"]
    rules.append(rf"END: /{SPACE}\}}/")
    if not call_format.start_tag:
        lead_token = call_format.lead_token
        lead = f"{lead_token}?" if lead_token in special_tokens else ""
        calls = "functions+" if max_calls is None else "functions"
        names = "|".join(quote_name(tool.function.name) for tool in tools)
        is_object_with_name = rf"{call_format.lead}\{{{ANY_TEXT}{name_member(f'(?:{names})')}{ANY_TEXT}"
        has_arguments = f"{ANY_TEXT}{ARGUMENTS_KEY}{ANY_TEXT}"
        no_call = f"/{ANY_TEXT}/ & (~/{is_object_with_name}/ | ~/{has_arguments}/)"
        if excluded_start is not None:
            no_call += f" & ~/{excluded_start}{ANY_TEXT}/"
        return "\n".join([f"start: {lead} ({calls} | NO_CALL)?", f"NO_CALL: {no_call}", *rules])
    start_tag, end_tag = call_format.start_tag, _tag(call_format.end_tag, special_tokens)
    text_and_tag = "spelled_tag"
    if start_tag in special_tokens:
        text_and_tag += f" | TEXT {start_tag}"
    return "\n".join(
        [
            f"start: (text_and_tag SPACE functions SPACE {end_tag}){many} TEXT",
            f"text_and_tag: {text_and_tag}",
            # Lazy matching ends the text at the first start tag.
            f"spelled_tag[lazy]: /{ANY_TEXT}{quote(start_tag)}/",
            f"TEXT: /{ANY_TEXT}/ & ~/{ANY_TEXT}{quote(start_tag)}{ANY_TEXT}/",
            f"SPACE: /{SPACE}/",
            *rules,
        ]
    )


def _tag(text: str, special_tokens: Mapping[str, bool]) -> str:
    return text if text in special_tokens else json.dumps(text) if text else ""


def _alternatives(tools: Sequence[Tool]) -> str:
    return " | ".join(f"function_{i}" for i in range(len(tools)))


def _arguments(tool: Tool, *, only_strict: bool) -> str:
    """Return the grammar of a tool's arguments, which are any object if only strict tools are constrained."""
    is_constrained = tool.function.strict or not only_strict
    schema = {"type": "object"} | ((tool.function.parameters or {}) if is_constrained else {})
    return f"%json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}"
