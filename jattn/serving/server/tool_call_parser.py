"""Calls of tools found in what a model says: the name first, then the arguments as they come."""

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jattn.serving.server.tool_call_formats import CallFormat

# A call whose arguments can be told as they come: the name before them.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
PYTHON_TAG = "<|python_tag|>"  # Llama's, before a call


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

    finish_reason = "stop"  # whoever asked for a call knows that it is one

    def __init__(self, name: str) -> None:
        """Of the function so called."""
        self._name, self._has_begun = name, False

    def feed(self, text: str) -> Said:
        """As ToolReader."""
        if self._has_begun:
            return Said(calls=(_more(0, text),) if text else ())
        self._has_begun = True
        return Said(calls=(_call(0, self._name, text),))

    def end(self) -> Said:
        """As ToolReader."""
        return Said()


class Braces:
    """Counts the braces of JSON as it comes, those in its strings apart."""

    def __init__(self) -> None:
        """Before the first one."""
        self._depth, self._is_string, self._is_escaped = 0, False, False

    def end(self, text: str, depth: int) -> int | None:
        """Place in the text behind the brace that closes down to a depth; None = it is not there.

        A tag is no JSON: it ends whatever is open.
        """
        for place, symbol in enumerate(text):
            if self._is_string:
                self._is_string = symbol != '"' or self._is_escaped
                self._is_escaped = symbol == "\\" and not self._is_escaped
            elif symbol == '"':
                self._is_string = True
            elif symbol == "{":
                self._depth += 1
            elif symbol == "}":
                self._depth -= 1
                if self._depth == depth:
                    return place + 1
            elif symbol == "<":
                return place
        return None


class CallReader:
    """Calls of a format; what is no call is content, as it came."""

    def __init__(
        self, form: CallFormat, *, names: Collection[str] | None = None, most: int | None = None
    ) -> None:
        """For one text.

        Args:
            form: How calls are written. Where nothing opens them, an object is one if it has arguments.
            names: Of functions that can be called; None = of any. Looked at where nothing opens a call.
            most: So many calls at most; None = any number.
        """
        self._form, self._most, self._num_calls = form, most, 0
        self._names = None if form.opening else names
        self._held = ""  # of the text what has not been told
        self._is_behind_call = False  # and nothing but blanks since
        self._stage: Callable[[], bool] = self._outside if form.opening else self._at_start
        self._content, self._calls = "", list[dict[str, Any]]()
        self._braces, self._read = Braces(), 0  # of a call's object, and characters held that are in it
        self._is_wanted = True  # the call that is being read

    @property
    def finish_reason(self) -> str:
        """As ToolReader."""
        return "tool_calls" if self._num_calls else "stop"

    def feed(self, text: str) -> Said:
        """As ToolReader."""
        self._held += text
        self._content, self._calls = "", []
        while self._stage():
            pass
        return Said(self._content, tuple(self._calls))

    def end(self) -> Said:
        """As ToolReader: a call without its end is content until its arguments begin, and behind them."""
        self._content = ""
        if self._stage == self._behind:
            end = self._braces.end(self._held, 0)
            rest = "" if end is None else self._held[end:].strip()
            self._held = "" if self._form.closing.startswith(rest) else rest
        if self._stage != self._in_arguments:
            self._show(len(self._held))
        return Said(self._content)

    # Each stage tells what it can, and returns whether another has to look at the rest.

    def _outside(self) -> bool:
        opening = self._form.opening
        first = self._held.find(opening)
        if first < 0:
            self._show(len(self._held) - _overlap(self._held, opening))
            return False
        self._show(first)
        self._enter_head()
        return True

    def _at_start(self) -> bool:
        """Where a brace begins a call: behind blanks and the tag, or behind a call and a semicolon."""
        rest = self._held.lstrip(" \n;" if self._is_behind_call else " \n")
        rest = rest.removeprefix(PYTHON_TAG).lstrip()
        if not rest or (PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG):
            return False
        self._stage = self._plain
        if rest.startswith("{"):
            self._held = rest
            self._enter_head()
        return True

    def _enter_head(self) -> None:
        self._braces, self._read, self._stage = Braces(), 0, self._in_head

    def _plain(self) -> bool:
        self._show(len(self._held))
        return False

    def _in_head(self) -> bool:
        """Up to the arguments; an object that has them elsewhere is waited for as a whole."""
        opening = len(self._form.opening)
        first = len(self._held) - len(self._held[opening:].lstrip())
        self._read = max(self._read, first)
        if self._held[first : first + 1] not in ("", "{"):
            return self._no_call()
        new, self._read = self._held[self._read :], len(self._held)
        if "{" in new and (found := HEAD.match(self._held, first)):
            name = json.loads(found[1], strict=False)
            if not self._is_known(name):
                return self._no_call()
            self._begin(name, "")
            self._go_to(self._in_arguments, found[0], found.end())
            return True
        end = self._braces.end(new, 0)
        if end is None:
            return False
        end += self._read - len(new)
        call = _parsed(self._held[first:end], needs_arguments=not opening)
        if call is None or not self._is_known(call[0]):
            return self._no_call()
        self._begin(*call)
        self._go_to(self._behind, self._held[first : end - 1], end - 1)
        return True

    def _go_to(self, stage: Callable[[], bool], read: str, place: int) -> None:
        """What has been read of the object, and where in what is held that ends."""
        self._braces = Braces()
        self._braces.end(read, 0)
        self._held, self._stage = self._held[place:], stage

    def _is_known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _no_call(self) -> bool:
        self._show(len(self._form.opening))
        self._stage = self._outside if self._form.opening else self._plain
        return True

    def _in_arguments(self) -> bool:
        end = self._braces.end(self._held, 1)
        text, self._held = self._held[:end], self._held[end:] if end is not None else ""
        if text and self._is_wanted:
            self._calls.append(_more(self._num_calls - 1, text))
        if end is None:
            return False
        self._stage = self._behind
        return True

    def _behind(self) -> bool:
        """Up to the end of the object, and to the tag that closes the call, or opens the next one."""
        end = self._held.find(self._form.closing) if self._form.closing else self._braces.end(self._held, 0)
        following = self._held.find(self._form.opening) if self._form.closing else -1
        is_closed = end is not None and 0 <= end < following
        if following >= 0 and not is_closed:
            self._held, self._is_behind_call, self._stage = self._held[following:], True, self._outside
            return True
        if end is None or end < 0:
            self._held = self._held if self._form.closing else ""
            return False
        self._held = self._held[end + len(self._form.closing) :]
        self._is_behind_call = True
        self._stage = self._outside if self._form.opening else self._at_start
        return True

    def _begin(self, name: str, arguments: str) -> None:
        self._is_wanted = self._most is None or self._num_calls < self._most
        if self._is_wanted:
            self._calls.append(_call(self._num_calls, name, arguments))
            self._num_calls += 1

    def _show(self, count: int) -> None:
        """Content, without the blanks behind a call."""
        text, self._held = self._held[:count], self._held[count:]
        text = text.lstrip() if self._is_behind_call else text
        self._is_behind_call &= not text
        self._content += text


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _more(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def _parsed(text: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments of a call that is there as a whole; None = it is none."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("name"), str):
        return None
    if needs_arguments and not {"arguments", "parameters"} & told.keys():
        return None
    arguments = told.get("arguments", told.get("parameters", {}))
    return told["name"], json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of a text may become the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def merged_calls(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls, or the pieces of them in one chunk of a stream, each put together of its pieces."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        index, function = piece["index"], piece["function"]
        if index in calls:
            calls[index]["function"]["arguments"] += function["arguments"]
        else:
            calls[index] = piece | {"function": dict(function)}
    return [calls[index] for index in sorted(calls)]
