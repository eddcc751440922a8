"""Tools that a model may call: what a request says of them, and calls found in what the model says."""

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jattn.serving.server.protocol import NamedToolChoice, Tool
from pallas_kernels.checks import require

OPEN, CLOSE = (
    "<tool_call>",
    "</tool_call>",
)  # around a call as JSON: what Qwen's and Hermes' templates ask for


class Said(NamedTuple):
    """A piece of what a model says.

    Attributes:
        content: For the user.
        calls: New calls, or more of the arguments of one that is there: as chunks of a stream have them.
    """

    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()


@runtime_checkable
class ToolReader(Protocol):
    """Tells calls from content in one text."""

    @property
    def finish_reason(self) -> str:
        """Of a text that ends by itself."""

    def feed(self, text: str) -> Said:
        """Takes a piece of the text."""

    def end(self) -> Said:
        """What was held back, once no more comes."""


class NamedReader:
    """All of the text is the arguments of one function: the one that the request names."""

    def __init__(self, name: str) -> None:
        """Of the function so called."""
        self._name, self._has_begun = name, False

    @property
    def finish_reason(self) -> str:
        """As ToolReader: whoever asked for a call knows that it is one."""
        return "stop"

    def feed(self, text: str) -> Said:
        """As ToolReader."""
        if self._has_begun:
            return Said(calls=({"index": 0, "function": {"arguments": text}},) if text else ())
        self._has_begun = True
        return Said(calls=(_call(0, self._name, text),))

    def end(self) -> Said:
        """As ToolReader."""
        return Said()


class TaggedReader:
    """Calls stand between tags, whole; what is no call there is content, as it came."""

    def __init__(self, *, most: int | None = None) -> None:
        """Of so many calls at most; None = any number."""
        self._held, self._num_calls, self._most = "", 0, most
        self._is_behind_call = False  # and nothing but blanks since

    @property
    def finish_reason(self) -> str:
        """As ToolReader."""
        return "tool_calls" if self._num_calls else "stop"

    def feed(self, text: str) -> Said:
        """As ToolReader."""
        self._held += text
        content, calls = "", list[dict[str, Any]]()
        while (first := self._held.find(OPEN)) >= 0:
            content += self._shown(self._held[:first])
            self._held = self._held[first:]
            end = self._held.find(CLOSE)
            if end < 0:
                return Said(content, tuple(calls))
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            call = self._read(whole[len(OPEN) : -len(CLOSE)])
            if call is None:
                content += self._shown(whole)
                continue
            self._is_behind_call = True
            if self._most is None or self._num_calls < self._most:
                calls.append(call)
                self._num_calls += 1
        shown = len(self._held) - _overlap(self._held, OPEN)
        content += self._shown(self._held[:shown])
        self._held = self._held[shown:]
        return Said(content, tuple(calls))

    def end(self) -> Said:
        """As ToolReader."""
        held, self._held = self._held, ""
        return Said(self._shown(held))

    def _shown(self, text: str) -> str:
        """Content, without the blanks behind a call."""
        text = text.lstrip() if self._is_behind_call else text
        self._is_behind_call &= not text
        return text

    def _read(self, text: str) -> dict[str, Any] | None:
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(told, dict) or not isinstance(told.get("name"), str):
            return None
        arguments = told.get("arguments", told.get("parameters", {}))
        return _call(self._num_calls, told["name"], json.dumps(arguments, ensure_ascii=False))


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of a text may become the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def whole_calls(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that pieces are of, put together."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        index, function = piece["index"], piece["function"]
        if index in calls:
            calls[index]["function"]["arguments"] += function["arguments"]
        else:
            calls[index] = {name: piece[name] for name in ("id", "type")} | {"function": dict(function)}
    return [calls[index] for index in sorted(calls)]


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

    Raises:
        ValueError: They are no calls, or their arguments no JSON; `name` is what they are called.
    """
    require(isinstance(calls, list), name, "be a list of calls", repr(calls))
    found = []
    for call in calls:
        is_call = isinstance(call, dict) and isinstance(call.get("function"), dict)
        require(is_call, name, "be calls of functions", repr(call))
        function: dict[str, Any] = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                require(False, f"{name}.function.arguments", "be JSON", repr(arguments))
        found.append(call | {"function": function | {"arguments": arguments}})
    return found
