"""Parsers that separate the reasoning of a model from its answer (`--reasoning-parser`)."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.tool_call_formats import ANY_TEXT, quote
from jattn.serving.server.tool_call_parser import (
    ParsedDelta,
    ToolCallParser,
    arguments_delta,
    new_call,
    overlap,
)
from pallas_kernels.checks import require_one_of

THINK, END_THINK = "<think>", "</think>"
WHITESPACE = " \t\r\n"  # Characters that may precede the first tag.
REASONING_START = rf"[ \t\r\n]*{quote(THINK)}"  # Pattern of WHITESPACE and the first tag.
QWEN3, DEEPSEEK_R1, GPT_OSS = "qwen3", "deepseek_r1", "openai_gptoss"
NAMES = (QWEN3, DEEPSEEK_R1, GPT_OSS)
NUM_TAIL_TOKENS = 8  # Last tokens of a prompt, which may open or close the reasoning.
FUNCTIONS = "functions."  # Prefix of the recipients of gpt-oss's tool calls.


class ThinkParser:
    """Parser of outputs whose reasoning is at the start, between the tags <think> and </think>."""

    def __init__(self, content_parser: ToolCallParser | None, *, is_reasoning: bool) -> None:
        """Start parsing one completion.

        Args:
            content_parser: Parser of the text after the reasoning; None if no tool can be called.
            is_reasoning: Whether the output begins with reasoning even without <think>.

        Source: vLLM `Qwen3ReasoningParser`, `DeepSeekR1ReasoningParser`.
        """
        self._content_parser, self._is_reasoning = content_parser, is_reasoning
        self._buffer, self._has_begun = "", False

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself."""
        return "stop" if self._content_parser is None else self._content_parser.finish_reason

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Parse the next piece of the output."""
        self._buffer += text
        if not self._has_begun and not self._begin():
            return ParsedDelta()
        reasoning = ""
        if self._is_reasoning:
            end = self._buffer.find(END_THINK)
            count = len(self._buffer) - overlap(self._buffer, END_THINK) if end < 0 else end
            reasoning, self._buffer = self._buffer[:count], self._buffer[count:]
            if end < 0:
                return ParsedDelta(reasoning=reasoning)
            self._buffer, self._is_reasoning = self._buffer[len(END_THINK) :], False
        content, self._buffer = self._buffer, ""
        if self._content_parser is None:
            return ParsedDelta(content, reasoning=reasoning)
        return self._content_parser.feed(content)._replace(reasoning=reasoning)

    def end(self) -> ParsedDelta:
        """Return the rest of the output, which may be the beginning of a tag."""
        rest, self._buffer, self._has_begun = self._buffer, "", True
        if self._is_reasoning:
            return ParsedDelta(reasoning=rest)
        if self._content_parser is None:
            return ParsedDelta(rest)
        content, tool_calls, _ = self._content_parser.feed(rest)
        last_content, last_calls, _ = self._content_parser.end()
        return ParsedDelta(content + last_content, tool_calls + last_calls)

    def _begin(self) -> bool:
        """Skip the first tag; return False if more text is needed to recognize it."""
        text = self._buffer.lstrip(WHITESPACE)
        if THINK.startswith(text) and text != THINK:
            return False
        self._has_begun = True
        if text.startswith(THINK):
            self._buffer, self._is_reasoning = text[len(THINK) :], True
        return True


class HarmonyParser:
    """Parser of gpt-oss's channels: analysis is reasoning, and messages to functions are tool calls."""

    def __init__(self, harmony: Any, encoding: Any) -> None:
        """Start parsing one completion.

        Args:
            harmony: The module `openai_harmony`.
            encoding: Its encoding of gpt-oss's tokens.
        """
        self._parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT, strict=False)
        self._error, self._is_harmony = harmony.HarmonyError, True
        self._num_calls, self._recipient = 0, None

    @property
    def finish_reason(self) -> str:
        """Finish reason of an output that ends by itself: "tool_calls" if there was a call."""
        return "tool_calls" if self._num_calls else "stop"

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        """Parse the next tokens. The text counts only if the output does not follow the format."""
        content, reasoning, tool_calls = "", "", list[dict[str, Any]]()
        for token_id in token_ids if self._is_harmony else ():
            try:
                self._parser.process(token_id)
            except self._error:
                self._is_harmony = False
                break
            recipient, delta = self._parser.current_recipient, self._parser.last_content_delta or ""
            is_call = recipient is not None and recipient.startswith(FUNCTIONS)
            if is_call and recipient != self._recipient:
                tool_calls.append(new_call(self._num_calls, recipient.removeprefix(FUNCTIONS), ""))
                self._num_calls += 1
            self._recipient = recipient
            if is_call:
                tool_calls += [arguments_delta(self._num_calls - 1, delta)] if delta else []
            elif self._parser.current_channel == "analysis" or recipient is not None:
                reasoning += delta
            else:
                content += delta
        return ParsedDelta(content if self._is_harmony else content + text, tuple(tool_calls), reasoning)

    def end(self) -> ParsedDelta:
        """Return an empty delta, because `feed` returns everything at once."""
        return ParsedDelta()


class ReasoningFormat(NamedTuple):
    """The way that a model separates its reasoning from its answer.

    Attributes:
        name: vLLM's name of the parser.
        added_tags: Tags that are single tokens of the vocabulary.
        keeps_special_tokens: Whether the tags are special tokens, which the text must contain.
        make_harmony_parser: Function that makes gpt-oss's parser of one completion; None for other models.
    """

    name: str
    added_tags: frozenset[str] = frozenset()
    keeps_special_tokens: bool = False
    make_harmony_parser: Callable[[], HarmonyParser] | None = None

    def make_parser(
        self, prompt_tail: str, make_content_parser: Callable[[], ToolCallParser] | None
    ) -> ToolCallParser:
        """Return the parser of one completion.

        Args:
            prompt_tail: End of the prompt's text, which may contain the first tag or an empty reasoning.
            make_content_parser: Function that makes the parser of the text after the reasoning; None if no
                tool can be called.
        """
        if self.make_harmony_parser is not None:
            return self.make_harmony_parser()
        is_open = self._is_open(prompt_tail)
        content_parser = None if make_content_parser is None else make_content_parser()
        return ThinkParser(content_parser, is_reasoning=is_open)

    def constrain(self, prompt_tail: str, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return a constraint that leaves the reasoning before the constrained text free.

        Args:
            prompt_tail: End of the prompt's text.
            params: Constraint of the text after the reasoning.
        """
        # Grammars distinguish a tag that is one token from the same characters.
        think = "SPELLED_THINK" + (f" | SPACE {THINK}" if THINK in self.added_tags else "")
        end = "spelled_end" + (f" | TEXT {END_THINK}" if END_THINK in self.added_tags else "")
        is_open = self._is_open(prompt_tail)
        rules = [
            f"start: {'think? end' if is_open else '(think end)?'} @answer",
            r"SPACE: /[ \t\r\n]*/",
            f"SPELLED_THINK: /{REASONING_START}/",
            f"think: {think}",
            f"end: {end}",
            f"spelled_end[lazy]: /{ANY_TEXT}{quote(END_THINK)}/",
            f"TEXT: /{ANY_TEXT}/ & ~/{ANY_TEXT}{quote(END_THINK)}{ANY_TEXT}/",
        ]
        return dataclasses.replace(params, prefix="\n".join(rules))

    def _is_open(self, prompt_tail: str) -> bool:
        """Return whether the output begins with reasoning even without its first tag."""
        tail = prompt_tail.rstrip()
        return tail.endswith(THINK) or (self.name == DEEPSEEK_R1 and not tail.endswith(END_THINK))


def load_reasoning_format(name: str | None, tokenizer: Any) -> ReasoningFormat | None:
    """Return the reasoning format with a name, or None without a name.

    Args:
        name: Name of the parser, or None.
        tokenizer: A `tokenizers.Tokenizer`.

    Raises:
        ValueError: If gpt-oss's parser cannot be loaded.
    """
    if name is None:
        return None
    check_reasoning_parser(name)
    if name != GPT_OSS:
        added_tokens = tokenizer.get_added_tokens_decoder().values()
        tags = {token.content: token.special for token in added_tokens if token.content in (THINK, END_THINK)}
        return ReasoningFormat(name, frozenset(tags), any(tags.values()))
    try:
        harmony: Any = importlib.import_module("openai_harmony")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reasoning_parser {name!r} requires openai-harmony: pip install openai-harmony"
        ) from error
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        raise ValueError(
            f"reasoning_parser {name!r} needs openai-harmony's vocabulary: {error}. Without network access,"
            " set TIKTOKEN_ENCODINGS_BASE to the folder of o200k_base.tiktoken."
        ) from error
    return ReasoningFormat(name, make_harmony_parser=lambda: HarmonyParser(harmony, encoding))


def check_reasoning_parser(name: str | None) -> None:
    """Check the name of a reasoning parser.

    Raises:
        ValueError: If no parser has the name.
    """
    if name is not None:
        require_one_of("reasoning_parser", name, NAMES)
