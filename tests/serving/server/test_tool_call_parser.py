"""Parsers of tool calls."""

import json

import pytest

from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON
from jattn.serving.server.tool_call_parser import (
    NamedFunctionParser,
    make_tool_call_parser,
    merge_tool_call_deltas,
)
from tests.serving.server.tool_cases import HERMES_CALL, LLAMA_CALL, WEATHER_CALL


def call_object(arguments):
    return f'{{"name": "f", "arguments": {arguments}}}'


# Arguments that are no object, and names that are no text.
NO_CALLS = [
    *(f"<tool_call>{call_object(arguments)}</tool_call>" for arguments in ("3", "[1, 2]", '"Rome"', '"{"')),
    *(f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>' for name in ('"\\x"', '"\\ud800"')),
    '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
]


def read(parser, pieces):
    """Return the content, the calls as (name, arguments) and the finish reason."""
    deltas = [*(parser.feed(piece) for piece in pieces), parser.end()]
    calls = merge_tool_call_deltas([call for delta in deltas for call in delta.tool_calls])
    name_and_arguments = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(delta.content for delta in deltas), name_and_arguments, parser.finish_reason


class TestToolCallParser:
    @pytest.mark.parametrize(
        ("call_format", "text", "content", "calls"),
        [
            (HERMES, "plain <text> of <tool", "plain <text> of <tool", []),
            (HERMES, HERMES_CALL, "", [WEATHER_CALL]),
            (HERMES, f"Well. {HERMES_CALL}\n{HERMES_CALL}", "Well. ", [WEATHER_CALL, WEATHER_CALL]),
            (HERMES, f"{HERMES_CALL} {{}} {HERMES_CALL}.", "{} .", [WEATHER_CALL, WEATHER_CALL]),
            (
                HERMES,
                '<tool_call>{"name": "f", "parameters": {"é": "<"}}</tool_call>',
                "",
                [("f", '{"é": "<"}')],
            ),
            (
                HERMES,
                '<tool_call>{"arguments": {"a": {}}, "name": "f"}</tool_call>b',
                "b",
                [("f", '{"a": {}}')],
            ),
            (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
            (HERMES, '<tool_call>{"name": "\\"{", "arguments": {}}</tool_call>', "", [('"{', "{}")]),
            (
                HERMES,
                '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
                "",
                [("f", '{"a": "}</tool_call>\\"{"}')],
            ),
            (
                HERMES,
                '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call> b',
                "b",
                [("f", '{"a": {}')],
            ),
            (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
            (HERMES, '<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', []),
            (HERMES, '<tool_call> {"name": 1}</tool_call>', '<tool_call> {"name": 1}</tool_call>', []),
            (HERMES, '<tool_call>{"name</tool_call>', '<tool_call>{"name</tool_call>', []),
            (HERMES, HERMES_CALL[:-3], "", [WEATHER_CALL]),
            (
                HERMES,
                f"{HERMES_CALL[:-12]}{HERMES_CALL}",
                "",
                [WEATHER_CALL, WEATHER_CALL],
            ),  # Small models omit the end tag.
            (HERMES, f"{HERMES_CALL[:-12]}\nThat is all.", "That is all.", [WEATHER_CALL]),
            (HERMES, HERMES_CALL[:-15], "", [("weather", '{"celsius": true')]),
            (LLAMA3_JSON, LLAMA_CALL, "", [WEATHER_CALL]),
            (LLAMA3_JSON, f" {LLAMA_CALL}; {LLAMA_CALL}", "", [WEATHER_CALL, WEATHER_CALL]),
            (LLAMA3_JSON, f"<|python_tag|>{LLAMA_CALL}<|eom_id|>", "<|eom_id|>", [WEATHER_CALL]),
            (LLAMA3_JSON, f"Well. {LLAMA_CALL}", f"Well. {LLAMA_CALL}", []),
            (LLAMA3_JSON, '{"answer": {"name": 5}} it is', '{"answer": {"name": 5}} it is', []),
            (LLAMA3_JSON, '{"parameters": {}, "name": "f"}', "", [("f", "{}")]),
            (LLAMA3_JSON, '{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
            (LLAMA3_JSON, "<|pyth", "<|pyth", []),
            (LLAMA3_JSON, ' <|python_tag|> {"a": 1}', ' <|python_tag|> {"a": 1}', []),
            (LLAMA3_JSON, '{"name": "f", "parameters": null}', "", [("f", "{}")]),
            (LLAMA3_JSON, '{"name": "f", "parameters": [1]}', '{"name": "f", "parameters": [1]}', []),
            (
                HERMES,
                f"<tool_call>{call_object(json.dumps('{"city": "Rome"}'))}</tool_call>",
                "",
                [("f", '{"city": "Rome"}')],
            ),
            (HERMES, f"<tool_call>{call_object('null')}</tool_call>", "", [("f", "{}")]),
            *((HERMES, text, text, []) for text in NO_CALLS),
            (
                HERMES,
                '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": "see </tool_call> tags"}</tool_call>'
                "after",
                "after",
                [("f", '{"a": 1}')],
            ),
            (HERMES, f"<tool_call>{call_object('{}')}}} </tool_call>after", "after", [("f", "{}")]),
        ],
    )
    def test_finds_calls_however_the_text_is_split(self, call_format, text, content, calls):
        expected = content, calls, "tool_calls" if calls else "stop"
        for cut in range(len(text) + 1):
            assert read(make_tool_call_parser(call_format), [text[:cut], text[cut:]]) == expected
        assert read(make_tool_call_parser(call_format), text) == expected

    @pytest.mark.parametrize("text", [LLAMA_CALL, '{"parameters": {}, "name": "weather"}'])
    def test_format_without_start_tag_accepts_available_functions_only(self, text):
        for pieces in ([text], text):
            assert read(make_tool_call_parser(LLAMA3_JSON, function_names={"other"}), pieces) == (
                text,
                [],
                "stop",
            )
            assert (
                read(make_tool_call_parser(LLAMA3_JSON, function_names={"weather"}), pieces)[2]
                == "tool_calls"
            )
        assert read(make_tool_call_parser(HERMES, function_names={"other"}), HERMES_CALL) == (
            "",
            [WEATHER_CALL],
            "tool_calls",
        )

    def test_holds_back_only_a_possible_start_of_a_tag(self):
        parser = make_tool_call_parser(HERMES)
        assert [parser.feed(piece).content for piece in ("a <", "b <tool", "_", "x")] == [
            "a ",
            "<b ",
            "",
            "<tool_x",
        ]

    def test_streams_the_name_first_and_then_the_arguments(self):
        parser = make_tool_call_parser(HERMES)
        calls = [call for symbol in HERMES_CALL for call in parser.feed(symbol).tool_calls]
        first, *argument_deltas = calls
        assert (first["index"], first["type"], first["function"]) == (
            0,
            "function",
            {"name": "weather", "arguments": ""},
        )
        assert first["id"].startswith("call_")
        assert [call["function"]["arguments"] for call in argument_deltas] == list(WEATHER_CALL[1])
        assert {tuple(call) for call in argument_deltas} == {("index", "function")}

    @pytest.mark.parametrize("call_format", [HERMES, LLAMA3_JSON])
    def test_drops_calls_beyond_max_calls(self, call_format):
        text = f"{HERMES_CALL}{HERMES_CALL}" if call_format is HERMES else f"{LLAMA_CALL}; {LLAMA_CALL}"
        assert read(make_tool_call_parser(call_format, max_calls=1), [text]) == (
            "",
            [WEATHER_CALL],
            "tool_calls",
        )
        assert read(make_tool_call_parser(call_format, max_calls=1), text) == (
            "",
            [WEATHER_CALL],
            "tool_calls",
        )


def test_named_function_parser_returns_all_text_as_arguments():
    assert read(NamedFunctionParser("f"), ['{"a"', "", ": 1}"]) == ("", [("f", '{"a": 1}')], "stop")
