"""Formats in which models write tool calls: JSON objects between tags or separators."""

import dataclasses

from pallas_kernels.checks import require_one_of


@dataclasses.dataclass(frozen=True)
class ToolCallFormat:
    """A format of tool calls: a JSON object with a name and arguments, and the text around it.

    Attributes:
        name: vLLM's name of the format (`--tool-call-parser`).
        start_tag: Text before a call. "" means that an output which starts with a brace is a call.
        end_tag: Text after a call.
        separator: Text between two calls.
        arguments_key: Key of the arguments in the JSON object.
    """

    name: str
    start_tag: str
    end_tag: str
    separator: str
    arguments_key: str


HERMES = ToolCallFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")  # Also used by Qwen.
LLAMA3_JSON = ToolCallFormat("llama3_json", "", "", "; ", "parameters")
FORMATS = {call_format.name: call_format for call_format in (HERMES, LLAMA3_JSON)}

# Text in a chat template that identifies the format.
TEMPLATE_MARKERS = {HERMES.name: HERMES.start_tag, LLAMA3_JSON.name: '"parameters": dictionary of argument'}
# Text that identifies unsupported formats with Hermes' tags: the formats of Qwen3-Coder and GLM.
UNSUPPORTED_MARKERS = ("<function=", "<arg_key>")


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
