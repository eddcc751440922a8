"""Tools: what templates are told of them, and calls found in what a model says."""

import json

import openai
import pytest

from jattn.serving.server.tools import NamedReader, TaggedReader, whole_calls
from tests.serving.server.running import running

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "boolean"}},
    "required": ["celsius"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of today", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }} as <tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.celsius }}{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"celsius": true}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with running(engine, chat_template=file, served_model_names=("tiny",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def read(reader, pieces):
    """Content, calls as (name, arguments), and the reason of the end."""
    said = [*(reader.feed(piece) for piece in pieces), reader.end()]
    calls = whole_calls([call for one in said for call in one.calls])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(one.content for one in said), found, reader.finish_reason


WHETHER = ("weather", '{"celsius": true}')


class TestTaggedReader:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ("plain <text> of <tool", "plain <text> of <tool", []),
            (CALL, "", [WHETHER]),
            (f"Well. {CALL}\n{CALL}", "Well. ", [WHETHER, WHETHER]),
            ('<tool_call>{"name": "f", "parameters": {"é": "<"}}</tool_call>', "", [("f", '{"é": "<"}')]),
            ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
            ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
            ('<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', []),
            ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
            (CALL[:-3], CALL[:-3], []),
        ],
    )
    def test_finds_whole_calls_wherever_the_text_is_cut(self, text, content, calls):
        want = content, calls, "tool_calls" if calls else "stop"
        for cut in range(len(text) + 1):
            assert read(TaggedReader(), [text[:cut], text[cut:]]) == want
        assert read(TaggedReader(), text) == want

    def test_holds_back_no_more_than_what_may_become_a_tag(self):
        reader = TaggedReader()
        assert [reader.feed(piece).content for piece in ("a <", "b <tool", "_", "x")] == [
            "a ",
            "<b ",
            "",
            "<tool_x",
        ]

    def test_leaves_out_further_calls_where_one_is_wanted(self):
        assert read(TaggedReader(most=1), [f"{CALL}{CALL}"]) == ("", [WHETHER], "tool_calls")


def test_a_named_reader_takes_all_for_arguments():
    assert read(NamedReader("f"), ['{"a"', "", ": 1}"]) == ("", [("f", '{"a": 1}')], "stop")


class TestChat:
    def test_a_call_is_found_at_once_and_streamed(self, client):
        asked = {"model": "tiny", "messages": [USER], "tools": [TOOL, OTHER], "max_tokens": 200}
        asked["extra_body"] = {"guided_choice": [f"Let me see. {CALL}"]}
        (choice,) = client.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert (call.type, call.function.name, call.function.arguments) == ("function", *WHETHER)
        with client.chat.completions.stream(**asked) as stream:
            pieces = [event for event in stream if event.type == "content.delta"]
            (choice,) = stream.get_final_completion().choices
        assert len(pieces) > 5  # as they came
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert choice.message.tool_calls[0].function.arguments == WHETHER[1]
        assert choice.message.tool_calls[0].id.startswith("call_")

    def test_a_named_function_gets_arguments_of_its_schema(self, client):
        choice = {"type": "function", "function": {"name": "weather"}}
        asked = {
            "model": "tiny",
            "messages": [USER],
            "tools": [OTHER, TOOL],
            "tool_choice": choice,
            "seed": 1,
        }
        whole = client.chat.completions.create(**asked, max_tokens=200).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.function.name, whole.message.content, whole.finish_reason) == ("weather", None, "stop")
        assert json.loads(call.function.arguments) in ({"celsius": True}, {"celsius": False})
        chunks = list(client.chat.completions.create(**asked, max_tokens=200, stream=True))
        pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
        assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
        assert len(pieces) > 5

    def test_a_template_is_told_of_tools_and_of_calls_that_were_made(self, server):
        template = server.server.service.chat_template
        seen = []
        render = template.render
        template.render = lambda *args, **named: seen.append(render(*args, **named)) or seen[-1]
        try:
            said = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]}
            said["tool_calls"][0]["function"] = {"name": "weather", "arguments": '{"celsius": 7}'}
            back = {"role": "tool", "tool_call_id": "a", "content": "warm"}
            server.post(CHAT, messages=[USER, said, back], tools=[OTHER], max_tokens=1)
            server.post(CHAT, messages=[USER], tools=[OTHER], tool_choice="none", max_tokens=1)
        finally:
            del template.render
        assert seen == [json.dumps(OTHER) + " as <tool_call>hiNone7warm", "hi"]

    @pytest.mark.parametrize(
        ("body", "status", "param", "message"),
        [
            ({"tool_choice": "required", "tools": [TOOL]}, 422, "tool_choice", "'required' is not served"),
            (
                {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]},
                400,
                "tool_choice",
                r"tool_choice must name one of the tools \['weather'\], got x",
            ),
            ({"tools": [{"type": "browser"}]}, 400, "tools", "tools.0.type: Input should be 'function'"),
            ({"tools": [{"type": "function"}]}, 400, "tools", "tools.0.function: Field required"),
            (
                {
                    "tools": [TOOL],
                    "tool_choice": {"type": "function", "function": {"name": "weather"}},
                    "guided_regex": "a",
                },
                400,
                "guided_regex",
                "be the only one of its kind",
            ),
            (
                {"tools": [TOOL], "chat_template_kwargs": {"tools": []}},
                400,
                "chat_template_kwargs",
                r"\['tools'\]",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": 5}]},
                400,
                "messages",
                "be a list of calls, got 5",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [5]}]},
                400,
                "messages",
                "calls of functions, got 5",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
                400,
                "messages",
                r"messages\[0\].tool_calls.function.arguments must be JSON, got '{'",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, server, body, status, param, message):
        got, error = server.error(CHAT, **{"messages": [USER]} | body)
        assert (got, error["param"]) == (status, param), error
        with pytest.raises(ValueError, match=message):
            raise ValueError(error["message"])
