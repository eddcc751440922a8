"""Streaming parsers that find tool calls in a model's output."""

import json
import re
import uuid
from collections.abc import Collection, Generator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jattn.serving.server.tool_call_formats import (
    ARGUMENTS_KEY,
    HERMES,
    LLAMA3_JSON,
    STRING,
    ToolCallFormat,
    call_head,
    name_member,
    parse_arguments,
    quote_name,
)

WHITESPACE, ARGUMENTS = " \t\r\n", re.compile(ARGUMENTS_KEY)


class ParsedDelta(NamedTuple):
    """The content, tool calls and reasoning in a piece of the output.

    Attributes:
        content: Text for the user.
        tool_calls: New calls, or further arguments of the last one, in the format of stream chunks.
        reasoning: Text that precedes the answer.
    """

    content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""


@runtime_checkable
class ToolCallParser(Protocol):
    """Parser that separates the tool calls, and the reasoning, of one completion from its content."""

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Parse the next piece of the output."""

    def end(self) -> ParsedDelta:
        """Return the rest of the output, which was not returned yet. Call it once, at the end."""


class NamedFunctionParser:
    """Parser of outputs that consist of the arguments of one function, which tool_choice names."""

    finish_reason = "stop"  # As in OpenAI's API: a client that names a function expects the call.

    def __init__(self, name: str) -> None:
        self._name, self._has_begun = name, False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Return the text as arguments of the call."""
        if self._has_begun:
            return ParsedDelta(tool_calls=(arguments_delta(0, text),) if text else ())
        self._has_begun = True
        return ParsedDelta(tool_calls=(new_call(0, self._name, text),))

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
    """Base class of the parsers. Text that is not a call is content, unchanged.

    A parser is a generator that consumes the buffer and yields whenever it needs more text.
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
            call_format: Format of the calls.
            function_names: Names of the available functions, or None for any name. Only checked if the
                format has no start tag.
            max_calls: Maximum number of calls; further ones are dropped. None for no limit.
        """
        self._format, self._max_calls, self._num_calls = call_format, max_calls, 0
        self._names = None if call_format.start_tag else function_names
        name = STRING if self._names is None else f"(?:{'|'.join(map(quote_name, self._names))})"
        self._head = re.compile(call_head(f"({name})") + r"(?=\{)")
        self._name_member = re.compile(name_member(name))
        self._buffer, self._has_ended = "", False  # Text that has not been consumed yet.
        self._is_after_call = False  # Whether only whitespace has followed the last call.
        self._content, self._tool_calls = "", list[dict[str, Any]]()
        self._parsing = self._parse()

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself: "tool_calls" if there was a call."""
        return "tool_calls" if self._num_calls else "stop"

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Parse the next piece of the output."""
        self._buffer += text
        self._content, self._tool_calls = "", []
        next(self._parsing, None)
        return ParsedDelta(self._content, tuple(self._tool_calls))

    def end(self) -> ParsedDelta:
        """Return the buffered text as content, unless it belongs to the arguments of an unfinished call."""
        self._has_ended = True
        return self.feed("")

    def _parse(self) -> Generator[None]:
        raise NotImplementedError

    def _read_call(self, first: int) -> Generator[None, None, bool]:
        """Read an object at an index of the buffer; return whether it was a call. If not, keep the buffer.

        Arguments that follow the name are streamed. An object with another order of keys is read to its end.
        """
        braces, num_counted, end = BraceCounter(), first, None
        while end is None:
            new, num_counted = self._buffer[num_counted:], len(self._buffer)
            if "{" in new and (head := self._head.match(self._buffer, first)):
                name = _decode_name(head[1])
                if name is None:
                    return False
                yield from self._stream_arguments(name, head)
                return True
            end = braces.find_end(new, 0)
            if end is not None:
                end += num_counted - len(new)
            elif self._has_ended:
                return False
            else:
                yield
        call = self._parse_call(self._buffer[first:end])
        if call is None:
            return False
        if self._begin_call():
            self._tool_calls.append(new_call(self._num_calls - 1, *call))
        self._buffer = self._buffer[end:]
        return True

    def _stream_arguments(self, name: str, head: re.Match[str]) -> Generator[None]:
        """Read a call whose head has been found, to the end of the object."""
        is_accepted = self._begin_call()
        if is_accepted:
            self._tool_calls.append(new_call(self._num_calls - 1, name, ""))
        braces = BraceCounter()
        braces.find_end(head[0], 0)
        self._buffer = self._buffer[head.end() :]
        for depth in (1, 0):  # The end of the arguments and of the object.
            while (end := braces.find_end(self._buffer, depth)) is None and not self._has_ended:
                self._consume_arguments(len(self._buffer), is_accepted and depth == 1)
                yield
            self._consume_arguments(len(self._buffer) if end is None else end, is_accepted and depth == 1)

    def _parse_call(self, text: str) -> tuple[str, str] | None:
        """Return the name and arguments of a complete object, or None if it is not a call."""
        if not self._format.start_tag and not (self._name_member.search(text) and ARGUMENTS.search(text)):
            return None
        try:
            value = json.loads(text)
            parsed = parse_arguments(value.get("arguments", value.get("parameters")))
            arguments = json.dumps(parsed, ensure_ascii=False)
            arguments.encode()  # Text with half a surrogate pair cannot be sent.
        except (ValueError, RecursionError):
            return None
        name = _decode_name(json.dumps(value.get("name")))
        return (
            None
            if name is None or (self._names is not None and name not in self._names)
            else (name, arguments)
        )

    def _consume_arguments(self, count: int, is_accepted: bool) -> None:
        if count and is_accepted:
            self._tool_calls.append(arguments_delta(self._num_calls - 1, self._buffer[:count]))
        self._buffer = self._buffer[count:]

    def _begin_call(self) -> bool:
        """Count a call; return False if it exceeds max_calls."""
        is_accepted = self._max_calls is None or self._num_calls < self._max_calls
        self._num_calls += is_accepted
        self._is_after_call = True
        return is_accepted

    def _emit_content(self, count: int) -> None:
        """Move characters from the buffer to the content, without whitespace that follows a call."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        text = text.lstrip() if self._is_after_call else text
        self._is_after_call &= not text
        self._content += text


class HermesParser(JsonToolCallParser):
    """Parser of calls between tags. Every object with a name is a call; its arguments may be missing."""

    def _parse(self) -> Generator[None]:
        start_tag = self._format.start_tag
        while True:
            while (start := self._buffer.find(start_tag)) < 0:
                num_held = 0 if self._has_ended else overlap(self._buffer, start_tag)
                self._emit_content(len(self._buffer) - num_held)
                if self._has_ended:
                    return
                yield
            self._emit_content(start)
            while not (text := self._buffer[len(start_tag) :].lstrip(WHITESPACE)) and not self._has_ended:
                yield
            if text.startswith("{") and (yield from self._read_call(len(self._buffer) - len(text))):
                yield from self._skip_end_tag()
            else:
                self._emit_content(len(start_tag))

    def _skip_end_tag(self) -> Generator[None]:
        """Skip the end tag, which small models omit, and superfluous braces before it."""
        end_tag = self._format.end_tag
        while not (text := self._buffer.lstrip(WHITESPACE + "}")).startswith(end_tag):
            if not end_tag.startswith(text):
                return
            if self._has_ended:
                self._buffer = ""
                return
            yield
        self._buffer = text[len(end_tag) :]


class Llama3JsonParser(JsonToolCallParser):
    """Parser of outputs that begin with calls: objects with an available function's name and arguments."""

    def _parse(self) -> Generator[None]:
        is_call, lead = True, re.compile(self._format.lead)
        while is_call:
            while not self._has_ended and self._format.lead_token.startswith(self._after(lead)):
                yield
            text = self._after(lead)
            is_call = text.startswith("{") and (yield from self._read_call(len(self._buffer) - len(text)))
        while not self._has_ended:
            self._emit_content(len(self._buffer))
            yield
        self._emit_content(len(self._buffer))

    def _after(self, lead: re.Pattern[str]) -> str:
        """Return the buffer after the text that may precede a call."""
        match = lead.match(self._buffer)
        return self._buffer[match.end() if match else 0 :]


PARSERS = {HERMES.name: HermesParser, LLAMA3_JSON.name: Llama3JsonParser}


def make_tool_call_parser(
    call_format: ToolCallFormat,
    *,
    function_names: Collection[str] | None = None,
    max_calls: int | None = None,
) -> ToolCallParser:
    """Return the parser of a format; the arguments are those of `JsonToolCallParser`."""
    return PARSERS[call_format.name](call_format, function_names=function_names, max_calls=max_calls)


def new_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return the first delta of a call."""
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def arguments_delta(index: int, arguments: str) -> dict[str, Any]:
    """Return further arguments of a call."""
    return {"index": index, "function": {"arguments": arguments}}


def _decode_name(text: str) -> str | None:
    """Return the name that a JSON string contains, or None if the text is no JSON string that can be sent."""
    try:
        name = json.loads(text, strict=False)
        name.encode()
    except (ValueError, AttributeError):
        return None
    return name


def overlap(text: str, tag: str) -> int:
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
