"""Parsers of reasoning."""

import functools
import json
import sys
import types

import pytest

from jattn.serving.engine.structured_outputs import Grammars, StructuredOutputsParams
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.protocol import ChatCompletionBody
from jattn.serving.server.reasoning import load_reasoning_format
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON
from jattn.serving.server.tool_call_parser import make_tool_call_parser, merge_tool_call_deltas
from jattn.serving.server.tools import resolve_tool_calling
from tests.serving.server.live_server import run_server
from tests.serving.server.tool_cases import HERMES_CALL, TOOL, WEATHER_CALL
from tests.serving.tiny import BYTES, byte_tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TEMPLATE = "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ end or '' }}"


def read(parser, pieces):
    """Return the reasoning, the content and the calls as (name, arguments)."""
    deltas = [*(parser.feed(piece) for piece in pieces), parser.end()]
    calls = merge_tool_call_deltas([call for delta in deltas for call in delta.tool_calls])
    texts = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "content"))
    return *texts, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("name", "tail", "text", "reasoning", "content"),
    [
        ("qwen3", "user\n", "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
        ("qwen3", "user\n", "\n<think>Hm", "Hm", ""),
        ("qwen3", "user\n", "Yes </think> <think>no</think>.", "", "Yes </think> <think>no</think>."),
        ("qwen3", "user\n", "<thi", "", "<thi"),
        ("qwen3", "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("deepseek_r1", "user\n", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", "user\n", "<think>Hm.</think>Yes </think>.", "Hm.", "Yes </think>."),
        ("deepseek_r1", "user\n", "Hm </thi", "Hm </thi", ""),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ],
)
def test_think_parser_splits_reasoning_from_content_however_the_text_is_split(
    name, tail, text, reasoning, content
):
    reasoning_format = load_reasoning_format(name, BYTES)
    for cut in range(len(text) + 1):
        parser = reasoning_format.make_parser(tail, None)
        assert read(parser, [text[:cut], text[cut:]]) == (reasoning, content, [])
    assert read(reasoning_format.make_parser(tail, None), text) == (reasoning, content, [])


def test_tool_calls_follow_the_reasoning():
    text = f"<think>I could write {HERMES_CALL}</think>So: {HERMES_CALL}"
    expected = f"I could write {HERMES_CALL}", "So: ", [WEATHER_CALL]
    for pieces in ([text], text):
        parser = load_reasoning_format("qwen3", BYTES).make_parser("", lambda: make_tool_call_parser(HERMES))
        assert read(parser, pieces) == expected
        assert parser.finish_reason == "tool_calls"


@functools.cache
def tag_tokenizer(is_special):
    """Return a tokenizer of bytes, with the tags of reasoning as tokens unless `is_special` is None."""
    tokenizer = byte_tokenizer()
    if is_special is not None:
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(["<think>", "</think>"])
    return tokenizer


@functools.cache
def grammars(is_special):
    """Return the grammars for a tokenizer with tags."""
    return Grammars(tag_tokenizer(is_special), 320, ())


@pytest.mark.parametrize("is_special", [False, True])
def test_special_tags_stay_in_the_text(is_special):
    tokenizer = tag_tokenizer(is_special)
    assert load_reasoning_format("qwen3", tokenizer).keeps_special_tokens == is_special


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with run_server(engine, chat_template=file, reasoning_parser="qwen3") as server:
        yield server


class TestServer:
    def test_reasoning_content_in_complete_and_streamed_responses(self, server):
        # The bias makes the model repeat one character; the template opens the reasoning.
        (letter,) = server.post("/tokenize", prompt="x")["tokens"]
        body = {"messages": [USER], "max_tokens": 6, "logit_bias": {str(letter): 100}, "tools": [TOOL]}
        body["chat_template_kwargs"] = {"end": "<think>\n"}
        (choice,) = server.post(CHAT, **body)["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("x" * 6, None)
        deltas = [event["choices"][0]["delta"] for event in server.events(CHAT, **body)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "x" * 6
        assert not any(delta.get("content") for delta in deltas)
        body["chat_template_kwargs"] = {"end": "<think></think>"}
        message = server.post(CHAT, **body)["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "x" * 6)

    @pytest.mark.parametrize(("letter", "names"), [("y", ["content"]), ("<", ["reasoning_content"])])
    def test_constraint_applies_after_the_reasoning(self, server, letter, names):
        (token,) = server.post("/tokenize", prompt=letter)["tokens"]
        body = {
            "messages": [USER],
            "max_tokens": 20,
            "guided_choice": ["yes"],
            "logit_bias": {str(token): 100},
        }
        message = server.post(CHAT, **body)["choices"][0]["message"]
        assert [name for name in ("content", "reasoning_content") if message.get(name)] == names
        assert message["content"] in ("yes", None)


@pytest.mark.parametrize("is_special", [None, False, True])
@pytest.mark.parametrize(
    "text", ["yes", "<think>no</think>yes", "no</think>yes", "<think>no</think>no", "no"]
)
@pytest.mark.parametrize(("name", "tail"), [("qwen3", ""), ("qwen3", "<think>"), ("deepseek_r1", "")])
def test_grammar_of_the_reasoning_allows_what_the_parser_separates(name, tail, text, is_special):
    tokenizer = tag_tokenizer(is_special)
    reasoning_format = load_reasoning_format(name, tokenizer)
    params = reasoning_format.constrain(tail, StructuredOutputsParams(choice=["yes"]))
    _, content, _ = read(reasoning_format.make_parser(tail, None), text)
    for ids in (tokenizer.encode(text).ids, BYTES.encode(text).ids):
        mask = grammars(is_special).mask(params)
        accepted = all(is_allowed_next(mask, token) for token in ids)
        assert (accepted and mask._matcher.is_accepting()) == (content == "yes")


BAD_CALL = '{"name": "h", "parameters": {"a": "x"}}'


@pytest.mark.parametrize("is_special", [None, False, True])
@pytest.mark.parametrize(
    "lead", ["", "<think>no</think>", " \n<think></think>\n", "<think>a</think>\n;", "a</think>"]
)
@pytest.mark.parametrize(("name", "tail"), [("qwen3", ""), ("qwen3", "<think>"), ("deepseek_r1", "")])
def test_strict_calls_behind_the_reasoning_follow_their_schema(name, tail, lead, is_special):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "h", "strict": True, "parameters": schema}
    body = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    tokenizer = tag_tokenizer(is_special)
    reasoning_format = load_reasoning_format(name, tokenizer)
    calling = resolve_tool_calling(
        ChatCompletionBody.model_validate(body), LLAMA3_JSON, tokenizer, reasoning_format
    )
    params = reasoning_format.constrain(tail, calling.constraint.structured_outputs)
    for text in (lead + BAD_CALL, f"</think>{lead}{BAD_CALL}", lead + BAD_CALL.replace('"x"', "1")):
        _, _, calls = read(reasoning_format.make_parser(tail, calling.make_parser), text)
        for ids in (tokenizer.encode(text).ids, BYTES.encode(text).ids):
            mask = grammars(is_special).mask(params)
            accepted = all(is_allowed_next(mask, token) for token in ids) and mask._matcher.is_accepting()
            assert not (accepted and calls and BAD_CALL in text), text
            assert accepted or not calls or BAD_CALL in text, text


def is_allowed_next(mask, token):
    is_allowed = bool(mask.allowed_bitmask()[token // 32] >> (token % 32) & 1)
    if is_allowed:
        mask.accept(token)
    return is_allowed


class TestHarmony:
    """Channels of gpt-oss, with a stand-in for openai-harmony's parser: its vocabulary is a download."""

    @pytest.fixture
    def harmony(self, monkeypatch):
        module = types.ModuleType("openai_harmony")
        module.HarmonyError = type("HarmonyError", (RuntimeError,), {})
        module.Role = types.SimpleNamespace(ASSISTANT="assistant")
        module.HarmonyEncodingName = types.SimpleNamespace(HARMONY_GPT_OSS="gpt-oss")
        module.load_harmony_encoding = lambda name: name
        steps = [  # The channel, recipient and text after each token.
            (None, None, None),
            ("analysis", None, None),
            ("analysis", None, "Hm."),
            ("commentary", "functions.f", None),
            ("commentary", "functions.f", '{"a":'),
            ("commentary", "functions.f", " 1}"),
            (None, None, None),
            ("final", None, None),
            ("final", None, "Yes."),
        ]

        class StreamableParser:
            def __init__(self, encoding, role, *, strict):
                self.current_channel = self.current_recipient = self.last_content_delta = None

            def process(self, token):
                if token >= len(steps):
                    raise module.HarmonyError("unexpected token")
                self.current_channel, self.current_recipient, self.last_content_delta = steps[token]

        module.StreamableParser = StreamableParser
        monkeypatch.setitem(sys.modules, "openai_harmony", module)
        return module

    @pytest.mark.parametrize("size", [1, 2, 9])
    def test_channels_become_reasoning_calls_and_content(self, harmony, size):
        parser = load_reasoning_format("openai_gptoss", BYTES).make_parser("", None)
        deltas = [parser.feed("text", list(range(9))[i : i + size]) for i in range(0, 9, size)]
        calls = merge_tool_call_deltas([call for delta in deltas for call in delta.tool_calls])
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
            ("f", {"a": 1})
        ]
        assert "".join(delta.reasoning for delta in deltas) == "Hm."
        assert "".join(delta.content for delta in deltas) == "Yes."
        assert parser.finish_reason == "tool_calls"

    def test_output_in_another_format_is_content(self, harmony):
        parser = load_reasoning_format("openai_gptoss", BYTES).make_parser("", None)
        assert parser.feed("a", [99]).content + parser.feed("b", [1]).content == "ab"

    def test_missing_package_or_vocabulary_is_a_clear_error(self, harmony, monkeypatch):
        def fail(name):
            raise harmony.HarmonyError("no network")

        harmony.load_harmony_encoding = fail
        with pytest.raises(ValueError, match=r"vocabulary: no network. Without .* TIKTOKEN_ENCODINGS_BASE"):
            load_reasoning_format("openai_gptoss", BYTES)
        monkeypatch.setitem(sys.modules, "openai_harmony", None)
        with pytest.raises(ValueError, match="requires openai-harmony: pip install openai-harmony"):
            load_reasoning_format("openai_gptoss", BYTES)


def test_unknown_reasoning_parser_is_an_error():
    with pytest.raises(ValueError, match=r"reasoning_parser must be one of 'qwen3', .*, got 'other'"):
        ServerOptions(reasoning_parser="other")
