"""Grammars of texts with calls of tools: each is of a tool that there is, with arguments of its schema."""

import json
from collections.abc import Collection, Sequence

from jattn.serving.engine.structured_outputs import JSON_OPTIONS
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import CallFormat

ANY_TEXT, NO_CALL = r"/(.|\n)*/", r"/[^{](.|\n)*/"


def required_calls(
    form: CallFormat, tools: Sequence[Tool], special: Collection[str], *, most: int | None
) -> str:
    """Calls and nothing else, at least one; in Lark's syntax, as llguidance takes it.

    Args:
        form: How calls are written.
        tools: What may be called, all with arguments of their schemas.
        special: Texts that are tokens of their own, which a grammar tells from their letters.
        most: So many calls at most, 1 or None = any number.
    """
    call = f"{_tag(form.opening, special)} {_inside(form, tools, special)}"
    return f"start: call {_others(form, most)}\ncall: {call}\n{_functions(form, tools, only_strict=False)}"


def strict_calls(
    form: CallFormat, tools: Sequence[Tool], special: Collection[str], *, most: int | None
) -> str:
    """Any text; calls in it of strict tools have arguments of their schemas. Arguments as required_calls."""
    inside = _inside(form, tools, special)
    functions = _functions(form, tools, only_strict=True)
    if not form.opening:
        return (
            f"start: (call {_others(form, most)} | NO_CALL)?\nNO_CALL: {NO_CALL}\ncall: {inside}\n{functions}"
        )
    lines = [f"start: said{'*' if most is None else '?'} TEXT", f"TEXT: {ANY_TEXT}"]
    if form.opening in special:
        lines.append(f"said: TEXT {form.opening} {inside}")
    else:  # the text ends where the tag does
        lines += [f"opened[lazy]: TEXT {json.dumps(form.opening)}", f"said: opened {inside}"]
    return "\n".join([*lines, functions])


def _tag(text: str, special: Collection[str]) -> str:
    return text if text in special else json.dumps(text) if text else ""


def _others(form: CallFormat, most: int | None) -> str:
    return f"({json.dumps(form.between)} call)*" if most is None else ""


def _inside(form: CallFormat, tools: Sequence[Tool], special: Collection[str]) -> str:
    """What stands behind a call's opening, to its end."""
    line_end = json.dumps("\n") if form.opening else ""
    functions = " | ".join(f"function_{i}" for i in range(len(tools)))
    return f"{line_end} ({functions}) {line_end} {_tag(form.closing, special)}"


def _functions(form: CallFormat, tools: Sequence[Tool], *, only_strict: bool) -> str:
    """The object of each tool, its name first, so that it is known before the arguments."""
    lines = []
    for i, tool in enumerate(tools):
        is_free = only_strict and not tool.function.strict
        schema = {"type": "object"} | (tool.function.parameters or {} if not is_free else {})
        schema["x-guidance"] = JSON_OPTIONS
        head = f'{{"name": {json.dumps(tool.function.name)}, "{form.arguments}": '
        lines.append(f'function_{i}: {json.dumps(head)} %json {json.dumps(schema)} "}}"')
    return "\n".join(lines)
