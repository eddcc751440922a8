"""How models write calls of tools: what stands around the JSON of a call."""

import dataclasses

from pallas_kernels.checks import require


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """One way to write calls: JSON objects with a name and arguments, and what is around them.

    Attributes:
        name: vLLM's, of `--tool-call-parser`.
        opening: Before a call. Empty = a text that begins with a brace is one.
        closing: Behind it.
        between: Between two of them.
        arguments: What the object calls the arguments.
    """

    name: str
    opening: str
    closing: str
    between: str
    arguments: str


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")  # Qwen's, too
LLAMA3_JSON = CallFormat("llama3_json", "", "", "; ", "parameters")
FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON)}

# What a template says where it asks for calls of a format, and what says that the tags are another's.
MARKS = {HERMES.name: HERMES.opening, LLAMA3_JSON.name: '"parameters": dictionary of argument'}
OTHERS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's, between the same tags


def call_format(name: str | None, template: str | None) -> CallFormat | None:
    """The format that a model writes: the one so named, or that of its chat template; None = nobody knows.

    Raises:
        ValueError: The name is none.
    """
    if name is not None:
        require(name in FORMATS, "tool_call_parser", f"be one of {sorted(FORMATS)}", repr(name))
        return FORMATS[name]
    if template is None or any(other in template for other in OTHERS):
        return None
    return next((FORMATS[name] for name, mark in MARKS.items() if mark in template), None)
