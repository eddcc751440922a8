"""Tools: what templates are told of them, and calls found in what a model says."""

import json

import openai
import pydantic
import pytest
import tokenizers

from jattn.serving.engine.structured_outputs import Grammars, StructuredOutputsParams
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON, call_format
from jattn.serving.server.tool_call_grammar import required_calls, strict_calls
from jattn.serving.server.tool_call_parser import CallReader, NamedReader, merged_calls
from jattn.serving.server.tools import with_objects
from tests.serving.server.live_server import running
from tests.serving.tiny import BYTES, byte_tokenizer

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "boolean"}},
    "required": ["celsius"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of today", "parameters": SCHEMA}}
NONSENSE = {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}
OTHER = {"type": "function", "function": {"name": "other"}}
USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }} as <tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.celsius }}{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"celsius": true}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    celsius: bool


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
    calls = merged_calls([call for one in said for call in one.calls])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(one.content for one in said), found, reader.finish_reason


WHETHER = ("weather", '{"celsius": true}')


LLAMA = '{"name": "weather", "parameters": {"celsius": true}}'


class TestCallReader:
    @pytest.mark.parametrize(
        ("form", "text", "content", "calls"),
        [
            (HERMES, "plain <text> of <tool", "plain <text> of <tool", []),
            (HERMES, CALL, "", [WHETHER]),
            (HERMES, f"Well. {CALL}\n{CALL}", "Well. ", [WHETHER, WHETHER]),
            (HERMES, f"{CALL} {{}} {CALL}.", "{} .", [WHETHER, WHETHER]),
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
            (HERMES, CALL[:-3], "", [WHETHER]),
            (HERMES, f"{CALL[:-12]}{CALL}", "", [WHETHER, WHETHER]),  # not closed, as small models do
            (HERMES, f"{CALL[:-12]}\nThat is all.", "That is all.", [WHETHER]),
            (HERMES, CALL[:-15], "", [("weather", '{"celsius": true')]),
            (LLAMA3_JSON, LLAMA, "", [WHETHER]),
            (LLAMA3_JSON, f" {LLAMA}; {LLAMA}", "", [WHETHER, WHETHER]),
            (LLAMA3_JSON, f"<|python_tag|>{LLAMA}<|eom_id|>", "<|eom_id|>", [WHETHER]),
            (LLAMA3_JSON, f"Well. {LLAMA}", f"Well. {LLAMA}", []),
            (LLAMA3_JSON, '{"answer": {"name": 5}} it is', '{"answer": {"name": 5}} it is', []),
            (LLAMA3_JSON, '{"parameters": {}, "name": "f"}', "", [("f", "{}")]),
            (LLAMA3_JSON, '{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
            (LLAMA3_JSON, "<|pyth", "<|pyth", []),
        ],
    )
    def test_finds_calls_wherever_the_text_is_cut(self, form, text, content, calls):
        want = content, calls, "tool_calls" if calls else "stop"
        for cut in range(len(text) + 1):
            assert read(CallReader(form), [text[:cut], text[cut:]]) == want
        assert read(CallReader(form), text) == want

    @pytest.mark.parametrize("text", [LLAMA, '{"parameters": {}, "name": "weather"}'])
    def test_only_tools_are_called_where_nothing_opens_a_call(self, text):
        for pieces in ([text], text):
            assert read(CallReader(LLAMA3_JSON, names={"other"}), pieces) == (text, [], "stop")
            assert read(CallReader(LLAMA3_JSON, names={"weather"}), pieces)[2] == "tool_calls"
        assert read(CallReader(HERMES, names={"other"}), CALL) == ("", [WHETHER], "tool_calls")

    def test_holds_back_no_more_than_what_may_become_a_tag(self):
        reader = CallReader(HERMES)
        assert [reader.feed(piece).content for piece in ("a <", "b <tool", "_", "x")] == [
            "a ",
            "<b ",
            "",
            "<tool_x",
        ]

    def test_tells_the_name_before_the_arguments_and_these_as_they_come(self):
        reader = CallReader(HERMES)
        calls = [call for symbol in CALL for call in reader.feed(symbol).calls]
        first, *rest = calls
        assert (first["index"], first["type"], first["function"]) == (
            0,
            "function",
            {"name": "weather", "arguments": ""},
        )
        assert first["id"].startswith("call_")
        assert [call["function"]["arguments"] for call in rest] == list(WHETHER[1])
        assert {tuple(call) for call in rest} == {("index", "function")}

    @pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
    def test_leaves_out_further_calls_where_one_is_wanted(self, form):
        text = f"{CALL}{CALL}" if form is HERMES else f"{LLAMA}; {LLAMA}"
        assert read(CallReader(form, most=1), [text]) == ("", [WHETHER], "tool_calls")
        assert read(CallReader(form, most=1), text) == ("", [WHETHER], "tool_calls")


class TestFormats:
    def test_are_known_by_what_a_template_asks_for(self):
        llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name'
        assert call_format(None, TEMPLATE) is HERMES
        assert call_format(None, llama) is LLAMA3_JSON
        assert call_format(None, "<tool_call>\n<function=f>") is None  # Qwen3-Coder's
        assert call_format(None, "{{ messages }}") is call_format(None, None) is None
        assert call_format("llama3_json", TEMPLATE) is LLAMA3_JSON
        with pytest.raises(ValueError, match=r"tool_call_parser must be one of \['hermes', .*, got 'other'"):
            ServerOptions(tool_call_parser="other")


def follows(grammar, text, tokenizer=BYTES):
    """Whether a text has the form: each of its tokens may come, and then the end."""
    mask = Grammars(tokenizer, 320, ()).mask(StructuredOutputsParams(grammar=grammar))
    for token in tokenizer.encode(text).ids:
        if not mask.allowed()[token // 32] >> (token % 32) & 1:
            return False
        mask.accept(token)
    return mask._matcher.is_accepting()


TOOLS = [Tool.model_validate(one) for one in (TOOL, OTHER)]
STRICT = [Tool.model_validate(TOOL | {"function": TOOL["function"] | {"strict": True}}), TOOLS[1]]
UNLIKE = '{"name": "weather", "arguments": {"celsius": 7}}'
FREE = '{"name": "other", "arguments": {"a": 7}}'


def tagged_tokenizer(*, is_special):
    tokenizer = byte_tokenizer()
    tags = [HERMES.opening, HERMES.closing]
    tokenizer.add_tokens([tokenizers.AddedToken(tag, special=is_special) for tag in tags])
    return tokenizer


class TestGrammars:
    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=False)])
    def test_calls_that_are_required_are_all_there_is(self, tokenizer):
        special = [HERMES.opening, HERMES.closing] if tokenizer is not BYTES else []
        some = required_calls(HERMES, TOOLS, special, most=None)
        one = required_calls(HERMES, TOOLS, special, most=1)
        fits = lambda grammar, text: follows(grammar, text, tokenizer)
        other = f"<tool_call>\n{FREE}\n</tool_call>"
        assert [fits(g, t) for g in (some, one) for t in (CALL, other)] == [True] * 4
        assert (fits(some, f"{CALL}\n{other}"), fits(one, f"{CALL}\n{other}")) == (True, False)
        for text in ("", "Well.", CALL[:-1], f"<tool_call>\n{UNLIKE}\n</tool_call>", f"{CALL} yes"):
            assert not fits(some, text), text

    def test_llama_s_are_objects_between_semicolons(self):
        some = required_calls(LLAMA3_JSON, TOOLS, (), most=None)
        assert follows(some, f"{LLAMA}; {LLAMA}")
        assert not follows(some, f"{LLAMA} yes")
        strict = strict_calls(LLAMA3_JSON, STRICT, (), most=1)
        assert [
            follows(strict, text) for text in ("", "Well {", LLAMA, FREE.replace("arguments", "parameters"))
        ] == [True] * 4
        assert not follows(strict, LLAMA.replace("true", "7"))

    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=True)])
    def test_strict_tools_are_called_with_what_they_take_and_others_with_anything(self, tokenizer):
        special = [HERMES.opening, HERMES.closing] if tokenizer is not BYTES else []
        grammar = strict_calls(HERMES, STRICT, special, most=None)
        other = f"<tool_call>\n{FREE}\n</tool_call>"
        for text in ("", "Well <tool.\n", CALL, f"So: {CALL}\n{other} and", f"{other}{CALL}"):
            assert follows(grammar, text, tokenizer), text
        for text in (f"So: <tool_call>\n{UNLIKE}\n</tool_call>", CALL[:-1]):
            assert not follows(grammar, text, tokenizer), text


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
        assert len(pieces) > 1  # as they came; who is late gets some in one
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert choice.message.tool_calls[0].function.arguments == WHETHER[1]
        assert choice.message.tool_calls[0].id.startswith("call_")

    def test_an_answer_in_json_is_no_call_of_llama_s(self, server):
        text = '{"name": "John", "age": 3}'
        asked = {"messages": [USER], "tools": [TOOL], "max_tokens": 60, "guided_choice": [text]}
        service = server.server.service
        before, service.call_format = service.call_format, LLAMA3_JSON
        try:
            (choice,) = server.post(CHAT, **asked)["choices"]
            streamed = [event["choices"][0] for event in server.events(CHAT, **asked)]
        finally:
            service.call_format = before
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "".join(one["delta"].get("content", "") for one in streamed) == text

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
        assert len(pieces) > 1

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_arguments_are_an_object_where_the_schema_does_not_say_so(self, server, seed):
        schema = {name: value for name, value in SCHEMA.items() if name != "type"}
        asked = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
        asked["tool_choice"] = {"type": "function", "function": {"name": "f"}}
        (choice,) = server.post(CHAT, messages=[USER], max_tokens=200, seed=seed, **asked)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"celsius": True}, {"celsius": False})

    def test_a_call_that_is_required_comes_in_any_case(self, client):
        asked = {"model": "tiny", "messages": [USER], "tools": [TOOL], "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False, "max_tokens": 200, "seed": 1}
        (choice,) = client.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.message.content, choice.finish_reason) == (
            "weather",
            None,
            "tool_calls",
        )
        assert json.loads(call.function.arguments) in ({"celsius": True}, {"celsius": False})
        with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            (same,) = stream.get_final_completion().choices
        assert kinds.count("tool_calls.function.arguments.delta") > 5  # as they came
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert same.message.tool_calls[0].function.arguments == call.function.arguments
        assert same.finish_reason == "tool_calls"

    def test_a_stream_has_no_empty_chunks_where_a_call_s_name_is_written(self, server):
        asked = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "seed": 3}
        deltas = [event["choices"][0] for event in server.events(CHAT, **asked)]
        assert any("tool_calls" in one["delta"] for one in deltas)
        assert all(any(one["delta"].values()) or one["finish_reason"] for one in deltas)

    def test_a_strict_tool_is_called_with_what_it_takes(self, server, client):
        """The model says what it likes, but for calls: here it likes braces, with which Llama's begin."""
        (brace,) = server.post("/tokenize", prompt="{")["tokens"]
        service = server.server.service
        tool = openai.pydantic_function_tool(Weather, name="weather")
        assert tool["function"]["strict"]
        asked = {"model": "tiny", "messages": [USER], "tools": [tool], "max_tokens": 240, "seed": 3}
        asked |= {"parallel_tool_calls": False, "logit_bias": {str(brace): 100}}
        before, service.call_format = service.call_format, LLAMA3_JSON
        try:
            (choice,) = client.chat.completions.create(**asked).choices
        finally:
            service.call_format = before
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) in ({"celsius": True}, {"celsius": False})

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
        "function", [{"name": "f"}, *({"name": "f", "arguments": x} for x in (None, ""))]
    )
    def test_a_call_without_arguments_was_made_with_none(self, function):
        assert with_objects("calls", [{"function": function}]) == [
            {"function": {"name": "f", "arguments": {}}}
        ]

    def test_who_called_nothing_and_said_nothing_said_no_none(self, server):
        said = {"role": "assistant", "content": None, "tool_calls": []}
        (answer, silent) = (
            server.post("/tokenize", messages=[USER, one]) for one in (said, said | {"content": ""})
        )
        assert answer == silent

    @pytest.mark.parametrize(
        ("body", "status", "param", "message"),
        [
            (
                {"tool_choice": "required"},
                400,
                "tool_choice",
                "tool_choice must come with tools, got 'required'",
            ),
            (
                {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"},
                400,
                "guided_regex",
                "be the only one of its kind",
            ),
            (
                {"tool_choice": "required", "tools": [{"type": "function", "function": NONSENSE}]},
                400,
                "tool_choice",
                "must be a constraint that llguidance supports",
            ),
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
