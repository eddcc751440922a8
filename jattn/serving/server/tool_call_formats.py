"""Formats in which models write tool calls, and the definition of a call that parser and grammar share.

A call is a JSON object with a "name" and with "arguments" (or "parameters"), which are an object, the JSON
text of an object, or null. The patterns below are regular expressions that Python and llguidance understand:
the parser searches for them, and the grammars of strict tools are built from them, so that every text that
the parser takes for a call follows the grammar of calls.
"""

import dataclasses
import json
from typing import Any

from pallas_kernels.checks import require_one_of

ANY_TEXT = r"(?:.|\n)*"
SPACE = r"[ \t\r\n]{0,40}"  # Whitespace between the parts of a call.
STRING = r'"(?:[^"\\]|\\.)*"'
ARGUMENTS_KEY = rf'"(?:arguments|parameters)"{SPACE}:'


@dataclasses.dataclass(frozen=True)
class ToolCallFormat:
    """A format of tool calls: the text around a call's JSON object.

    Attributes:
        name: vLLM's name of the format (`--tool-call-parser`).
        start_tag: Text before a call. "" means that an output which starts with a brace may be a call.
        end_tag: Text after a call.
        separator: Text between two calls.
        arguments_key: Key of the arguments that constrained calls use.
        lead: Pattern of the text that may precede the brace of a call without a start tag.
        lead_token: Special token that may precede a call without a start tag, or "".
    """

    name: str
    start_tag: str
    end_tag: str
    separator: str
    arguments_key: str
    lead: str = ""
    lead_token: str = ""


HERMES = ToolCallFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")  # Also used by Qwen.
LLAMA3_JSON = ToolCallFormat(
    "llama3_json",
    "",
    "",
    "; ",
    "parameters",
    lead=r"[ \t\r\n;]*(?:<\|python_tag\|>[ \t\r\n]*)?",
    lead_token="<|python_tag|>",
)
FORMATS = {call_format.name: call_format for call_format in (HERMES, LLAMA3_JSON)}

# Text in a chat template that identifies the format.
TEMPLATE_MARKERS = {HERMES.name: HERMES.start_tag, LLAMA3_JSON.name: '"parameters": dictionary of argument'}
# Text that identifies unsupported formats with Hermes' tags: the formats of Qwen3-Coder and GLM.
UNSUPPORTED_MARKERS = ("<function=", "<arg_key>")


def name_member(name: str) -> str:
    """Return the pattern of a call's name in its JSON object, from the pattern of the name's JSON string."""
    return rf'"name"{SPACE}:{SPACE}{name}'


def call_head(name: str) -> str:
    """Return the pattern of the text before a call's arguments, from the pattern of the name's JSON string.

    Calls with another order of keys have no such head.
    """
    return rf"\{{{SPACE}{name_member(name)}{SPACE},{SPACE}{ARGUMENTS_KEY}{SPACE}"


def quote(text: str) -> str:
    """Return the pattern of a text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)


def quote_name(name: str) -> str:
    """Return the pattern of a function name's JSON string."""
    return quote(json.dumps(name, ensure_ascii=False))


def parse_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; None and "" become an empty one.

    Args:
        arguments: Value of the call's arguments: an object, the JSON text of one, or None.

    Raises:
        ValueError: If they are no object; the message is a predicate.
    """
    value = {} if arguments in (None, "") else arguments
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"must be JSON, got {arguments!r}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {arguments!r}.")
    return value


def find_tool_call_format(name: str | None, template: str | None) -> ToolCallFormat | None:
    """Return the format with a name, or the one that a chat template asks for; None if it is unknown.

    Args:
        name: Name of the format, or None to detect it from the template.
        template: Source of the chat template, or None.

    Raises:
        ValueError: If no format has the name.
    """
    if name is not None:
        require_one_of("tool_call_parser", name, sorted(FORMATS))
        return FORMATS[name]
    if template is None or any(marker in template for marker in UNSUPPORTED_MARKERS):
        return None
    return next((FORMATS[name] for name, marker in TEMPLATE_MARKERS.items() if marker in template), None)
