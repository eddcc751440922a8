"""Grammars of tool calls."""

import json

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st

from jattn.serving.engine.structured_outputs import Grammars, StructuredOutputsParams
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON
from jattn.serving.server.tool_call_grammar import required_calls_grammar, strict_calls_grammar
from jattn.serving.server.tool_call_parser import make_tool_call_parser, merge_tool_call_deltas
from tests.serving.server.tool_cases import HERMES_CALL, LLAMA_CALL, OTHER, TOOL
from tests.serving.tiny import BYTES, byte_tokenizer

TOOLS = [Tool.model_validate(single) for single in (TOOL, OTHER)]


STRICT_TOOLS = [Tool.model_validate(TOOL | {"function": TOOL["function"] | {"strict": True}}), TOOLS[1]]


INVALID_CALL = '{"name": "weather", "arguments": {"celsius": 7}}'


OTHER_CALL = '{"name": "other", "arguments": {"a": 7}}'


def accepts(grammar, text, tokenizer=BYTES):
    """Return whether the grammar accepts the text: each of its tokens, and then the end."""
    return accepts_ids(grammar, tokenizer.encode(text).ids, tokenizer)


def accepts_ids(grammar, ids, tokenizer):
    mask = Grammars(tokenizer, 320, ()).mask(StructuredOutputsParams(grammar=grammar))
    for token in ids:
        if not mask.allowed_bitmask()[token // 32] >> (token % 32) & 1:
            return False
        mask.accept(token)
    return mask._matcher.is_accepting()


def tagged_tokenizer(*, is_special):
    tokenizer = byte_tokenizer()
    tags = [HERMES.start_tag, HERMES.end_tag]
    tokenizer.add_tokens([tokenizers.AddedToken(tag, special=is_special) for tag in tags])
    return tokenizer


def added_tokens(tokenizer):
    return {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}


def strict_tool(name):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    )


STRICT_H = strict_calls_grammar(LLAMA3_JSON, [strict_tool("h")], {}, max_calls=None)
FRAGMENTS = [
    *("{", "}", '"', ":", ",", " ", "\n", "; ", "<|python_tag|>", "<tool_call>", "</tool_call>", "text"),
    *(
        '"name"',
        '"h"',
        '"parameters"',
        '"arguments"',
        "null",
        '{"a": 1}',
        '{"a": "x"}',
        r'"{\"a\": 1}"',
        r"\u0068",
    ),
    *('"name": "h"', '"parameters": {"a": 1}', '"parameters": {"a": "x"}', '{"name": "h", "parameters": '),
]


class TestGrammars:
    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=False)])
    def test_required_calls_grammar_accepts_calls_only(self, tokenizer):
        special_tokens = added_tokens(tokenizer)
        several = required_calls_grammar(HERMES, TOOLS, special_tokens, max_calls=None)
        single = required_calls_grammar(HERMES, TOOLS, special_tokens, max_calls=1)
        accepts_text = lambda grammar, text: accepts(grammar, text, tokenizer)
        other_call = f"<tool_call>\n{OTHER_CALL}\n</tool_call>"
        assert [accepts_text(g, t) for g in (several, single) for t in (HERMES_CALL, other_call)] == [
            True
        ] * 4
        assert (
            accepts_text(several, f"{HERMES_CALL}\n{other_call}"),
            accepts_text(single, f"{HERMES_CALL}\n{other_call}"),
        ) == (True, False)
        for text in (
            "",
            "Well.",
            HERMES_CALL[:-1],
            f"<tool_call>\n{INVALID_CALL}\n</tool_call>",
            f"{HERMES_CALL} yes",
        ):
            assert not accepts_text(several, text), text

    def test_llama_calls_are_separated_by_semicolons(self):
        several = required_calls_grammar(LLAMA3_JSON, TOOLS, {}, max_calls=None)
        assert accepts(several, f"{LLAMA_CALL}; {LLAMA_CALL}")
        assert not accepts(several, f"{LLAMA_CALL} yes")
        strict = strict_calls_grammar(LLAMA3_JSON, STRICT_TOOLS, {}, max_calls=1)
        assert [
            accepts(strict, text)
            for text in ("", "Well {", LLAMA_CALL, OTHER_CALL.replace("arguments", "parameters"))
        ] == [True] * 4
        assert not accepts(strict, LLAMA_CALL.replace("true", "7"))

    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=True)])
    def test_strict_calls_grammar_checks_the_arguments_of_strict_tools_only(self, tokenizer):
        special_tokens = added_tokens(tokenizer)
        grammar = strict_calls_grammar(HERMES, STRICT_TOOLS, special_tokens, max_calls=None)
        other_call = f"<tool_call>\n{OTHER_CALL}\n</tool_call>"
        for text in (
            "",
            "Well <tool.\n",
            HERMES_CALL,
            f"So: {HERMES_CALL}\n{other_call} and",
            f"{other_call}{HERMES_CALL}",
        ):
            assert accepts(grammar, text, tokenizer), text
        for text in (f"So: <tool_call>\n{INVALID_CALL}\n</tool_call>", HERMES_CALL[:-1]):
            assert not accepts(grammar, text, tokenizer), text

    @pytest.mark.parametrize("lead", ["", "\n", "  ", "<|python_tag|>", "\n<|python_tag|> "])
    @pytest.mark.parametrize(
        "call",
        [
            '{"name": "h", "parameters": {"a": %s}}',
            '{\n"name" : "h","arguments":{"a" : %s} }',
            '{"name": "h", "parameters": {"a": 1}}; {"name": "h", "parameters": {"a": %s}}',
        ],
    )
    def test_strict_llama_calls_follow_their_schema_behind_any_lead(self, lead, call):
        assert accepts(STRICT_H, lead + call % "5")
        assert not accepts(STRICT_H, lead + call % '"not an integer"')

    @pytest.mark.parametrize(
        "text",
        [
            '{"answer": 1}',
            ' {"answer": {"name": "h"}} it is',
            '{"name": "John", "parameters": {"a": "x"}}',
            "{ no JSON",
            'Call {"name": "h", "parameters": {"a": "x"}}',
        ],
    )
    def test_strict_llama_grammar_accepts_content(self, text):
        assert accepts(STRICT_H, text)

    @pytest.mark.parametrize(
        "text", ['{"parameters": {"a": "x"}, "name": "h"}', r'{"name": "h", "parameters": "{\"a\": \"x\"}"}']
    )
    def test_strict_llama_grammar_rejects_calls_in_another_form(self, text):
        assert not accepts(STRICT_H, text)

    def test_special_token_may_precede_a_strict_llama_call(self):
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([LLAMA3_JSON.lead_token])
        grammar = strict_calls_grammar(LLAMA3_JSON, STRICT_TOOLS, added_tokens(tokenizer), max_calls=None)
        call = f"{LLAMA3_JSON.lead_token}{LLAMA_CALL}"
        for text in (call, f"{call}; {LLAMA_CALL}", f"{LLAMA3_JSON.lead_token}print(1)"):
            assert accepts(grammar, text, tokenizer), text
        assert not accepts(grammar, call.replace("true", "7"), tokenizer)

    @pytest.mark.parametrize("is_special", [False, True])
    def test_strict_hermes_calls_follow_their_schema_even_if_the_tag_is_spelled(self, is_special):
        tokenizer = tagged_tokenizer(is_special=is_special)
        grammar = strict_calls_grammar(HERMES, STRICT_TOOLS, added_tokens(tokenizer), max_calls=None)
        spelled_tag = BYTES.encode(f"So: {HERMES.start_tag}").ids

        def accepts_call(value):
            call = HERMES_CALL.removeprefix(HERMES.start_tag).replace("true", value)
            return accepts_ids(grammar, [*spelled_tag, *tokenizer.encode(call).ids], tokenizer)

        assert accepts_call("true")
        assert not accepts_call("7")

    @pytest.mark.kernels
    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(
        st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join), st.sampled_from([HERMES, LLAMA3_JSON])
    )
    def test_calls_in_any_accepted_text_follow_their_schema(self, text, call_format):
        if call_format is HERMES:
            text = f"<tool_call>{text}</tool_call>"
        grammar = strict_calls_grammar(call_format, [strict_tool("h")], {}, max_calls=None)
        parser = make_tool_call_parser(call_format, function_names={"h"})
        deltas = parser.feed(text).tool_calls + parser.end().tool_calls
        calls = merge_tool_call_deltas(deltas)
        has_valid_calls = all(has_integer(call["function"]["arguments"]) for call in calls)
        hypothesis.target(float(len(calls)))
        assert has_valid_calls or not accepts(grammar, text)


def has_integer(arguments):
    try:
        return isinstance(json.loads(arguments)["a"], int)
    except (ValueError, KeyError):
        return False
