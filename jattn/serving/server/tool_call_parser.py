"""Streaming parsers that find tool calls in a model's output."""

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jattn.serving.server.tool_call_formats import ToolCallFormat

# The start of a call whose arguments can be streamed, because the name precedes them.
CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
PYTHON_TAG = "<|python_tag|>"  # Llama writes it before a call.


class ParsedDelta(NamedTuple):
    """The content and tool calls in a piece of the output.

    Attributes:
        content: Text for the user.
        tool_calls: New calls, or further arguments of the last one, in the format of stream chunks.
    """

    content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@runtime_checkable
class ToolCallParser(Protocol):
    """Parser that separates the tool calls of one completion from its content."""

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself."""

    def feed(self, text: str) -> ParsedDelta:
        """Parse the next piece of the output."""

    def end(self) -> ParsedDelta:
        """Return the rest of the output, which was not returned yet. Call it once, at the end."""


class NamedFunctionParser:
    """Parser of outputs that consist of the arguments of one function, which tool_choice names."""

    finish_reason = "stop"  # As in OpenAI's API: a client that names a function expects the call.

    def __init__(self, name: str) -> None:
        self._name, self._has_begun = name, False

    def feed(self, text: str) -> ParsedDelta:
        """Return the text as arguments of the call."""
        if self._has_begun:
            return ParsedDelta(tool_calls=(_arguments_delta(0, text),) if text else ())
        self._has_begun = True
        return ParsedDelta(tool_calls=(_new_call(0, self._name, text),))

    def end(self) -> ParsedDelta:
        """Return an empty delta, because `feed` returns all text at once."""
        return ParsedDelta()


class BraceCounter:
    """Incremental counter of the nesting depth of braces in JSON, ignoring those in strings."""

    def __init__(self) -> None:
        self._depth, self._is_string, self._is_escaped = 0, False, False

    def find_end(self, text: str, depth: int) -> int | None:
        """Return the index after the brace that closes down to a depth; None if the text does not reach it.

        "<" outside a string begins a tag, which is not JSON and ends every open object.
        """
        for index, char in enumerate(text):
            if self._is_string:
                self._is_string = char != '"' or self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == depth:
                    return index + 1
            elif char == "<":
                return index
        return None


class JsonToolCallParser:
    """Parser of tool calls in a `ToolCallFormat`. Text that is not a call is content, unchanged.

    The parser is a state machine: each state method consumes what it can of the buffer and returns whether
    another state has to look at the remaining text.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        *,
        function_names: Collection[str] | None = None,
        max_calls: int | None = None,
    ) -> None:
        """Start parsing one completion.

        Args:
            call_format: Format of the calls. Without a start tag, an object with arguments is a call.
            function_names: Names of the available functions, or None for any name. Only checked if the
                format has no start tag.
            max_calls: Maximum number of calls; further ones are dropped. None for no limit.
        """
        self._format, self._max_calls, self._num_calls = call_format, max_calls, 0
        self._function_names = None if call_format.start_tag else function_names
        self._buffer = ""  # Text that has not been returned yet.
        self._is_after_call = False  # Whether only whitespace has followed the last call.
        self._state: Callable[[], bool] = self._outside if call_format.start_tag else self._at_start
        self._content, self._tool_calls = "", list[dict[str, Any]]()
        self._braces, self._num_read = BraceCounter(), 0  # Characters of the buffer that _braces has counted.
        self._is_accepted = True  # Whether the current call is within max_calls.

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself: "tool_calls" if there was a call."""
        return "tool_calls" if self._num_calls else "stop"

    def feed(self, text: str) -> ParsedDelta:
        """Parse the next piece of the output."""
        self._buffer += text
        self._content, self._tool_calls = "", []
        while self._state():
            pass
        return ParsedDelta(self._content, tuple(self._tool_calls))

    def end(self) -> ParsedDelta:
        """Return the buffered text as content, unless it belongs to the arguments of an unfinished call."""
        self._content = ""
        if self._state == self._after_arguments:
            end = self._braces.find_end(self._buffer, 0)
            tail = "" if end is None else self._buffer[end:].strip()
            self._buffer = "" if self._format.end_tag.startswith(tail) else tail
        if self._state != self._in_arguments:
            self._emit_content(len(self._buffer))
        return ParsedDelta(self._content)

    def _outside(self) -> bool:
        """State: look for the start tag."""
        start_tag = self._format.start_tag
        index = self._buffer.find(start_tag)
        if index < 0:
            self._emit_content(len(self._buffer) - _overlap(self._buffer, start_tag))
            return False
        self._emit_content(index)
        self._enter_head()
        return True

    def _at_start(self) -> bool:
        """State: a brace begins a call, after whitespace and a tag, or after a call and a semicolon."""
        text = self._buffer.lstrip(" \n;" if self._is_after_call else " \n")
        text = text.removeprefix(PYTHON_TAG).lstrip()
        if not text or (PYTHON_TAG.startswith(text) and text != PYTHON_TAG):
            return False
        self._state = self._plain
        if text.startswith("{"):
            self._buffer = text
            self._enter_head()
        return True

    def _enter_head(self) -> None:
        self._braces, self._num_read, self._state = BraceCounter(), 0, self._in_head

    def _plain(self) -> bool:
        """State: the output is content up to its end."""
        self._emit_content(len(self._buffer))
        return False

    def _in_head(self) -> bool:
        """State: read up to the arguments. An object with another order of keys is read to its end."""
        start_len = len(self._format.start_tag)
        first = len(self._buffer) - len(self._buffer[start_len:].lstrip())
        self._num_read = max(self._num_read, first)
        if self._buffer[first : first + 1] not in ("", "{"):
            return self._reject_call()
        new, self._num_read = self._buffer[self._num_read :], len(self._buffer)
        if "{" in new and (match := CALL_HEAD.match(self._buffer, first)):
            name = json.loads(match[1], strict=False)
            if not self._is_available(name):
                return self._reject_call()
            self._begin_call(name, "")
            self._enter_body(self._in_arguments, match[0], match.end())
            return True
        end = self._braces.find_end(new, 0)
        if end is None:
            return False
        end += self._num_read - len(new)
        call = _parse_call(self._buffer[first:end], needs_arguments=not start_len)
        if call is None or not self._is_available(call[0]):
            return self._reject_call()
        self._begin_call(*call)
        self._enter_body(self._after_arguments, self._buffer[first : end - 1], end - 1)
        return True

    def _enter_body(self, state: Callable[[], bool], read_text: str, index: int) -> None:
        """Enter a state after part of the object has been read, which ends at an index of the buffer."""
        self._braces = BraceCounter()
        self._braces.find_end(read_text, 0)
        self._buffer, self._state = self._buffer[index:], state

    def _is_available(self, name: str) -> bool:
        return self._function_names is None or name in self._function_names

    def _reject_call(self) -> bool:
        """Return to content: what looked like a call is none."""
        self._emit_content(len(self._format.start_tag))
        self._state = self._outside if self._format.start_tag else self._plain
        return True

    def _in_arguments(self) -> bool:
        """State: stream the arguments."""
        end = self._braces.find_end(self._buffer, 1)
        text, self._buffer = self._buffer[:end], self._buffer[end:] if end is not None else ""
        if text and self._is_accepted:
            self._tool_calls.append(_arguments_delta(self._num_calls - 1, text))
        if end is None:
            return False
        self._state = self._after_arguments
        return True

    def _after_arguments(self) -> bool:
        """State: read to the end of the object, and to the end tag or the start tag of the next call."""
        has_tags = bool(self._format.end_tag)
        end = self._buffer.find(self._format.end_tag) if has_tags else self._braces.find_end(self._buffer, 0)
        next_start = self._buffer.find(self._format.start_tag) if has_tags else -1
        is_closed = end is not None and 0 <= end < next_start
        if next_start >= 0 and not is_closed:
            self._buffer, self._is_after_call = self._buffer[next_start:], True
            self._state = self._outside
            return True
        if end is None or end < 0:
            self._buffer = self._buffer if has_tags else ""
            return False
        self._buffer = self._buffer[end + len(self._format.end_tag) :]
        self._is_after_call = True
        self._state = self._outside if self._format.start_tag else self._at_start
        return True

    def _begin_call(self, name: str, arguments: str) -> None:
        self._is_accepted = self._max_calls is None or self._num_calls < self._max_calls
        if self._is_accepted:
            self._tool_calls.append(_new_call(self._num_calls, name, arguments))
            self._num_calls += 1

    def _emit_content(self, count: int) -> None:
        """Move characters from the buffer to the content, without whitespace that follows a call."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        text = text.lstrip() if self._is_after_call else text
        self._is_after_call &= not text
        self._content += text


def _new_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _arguments_delta(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def _parse_call(text: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Return the name and arguments of a complete call, or None if the text is not a call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if needs_arguments and not {"arguments", "parameters"} & value.keys():
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, tag: str) -> int:
    """Return the number of last characters of the text that may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def merge_tool_call_deltas(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the deltas of each call into one, in the order of their indices."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        index, function = delta["index"], delta["function"]
        if index in calls:
            calls[index]["function"]["arguments"] += function["arguments"]
        else:
            calls[index] = delta | {"function": dict(function)}
    return [calls[index] for index in sorted(calls)]
