"""Requests with tools."""

import json

import openai
import pydantic
import pytest

from jattn.serving.server.protocol import ChatCompletionBody
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON
from jattn.serving.server.tool_call_grammar import strict_calls_grammar
from jattn.serving.server.tools import parse_call_arguments, resolve_tool_calling
from tests.serving.server.live_server import run_server
from tests.serving.server.tool_cases import HERMES_CALL, OTHER, SCHEMA, TOOL, WEATHER_CALL

CHAT = "/v1/chat/completions"


INVALID_FUNCTION = {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}


USER = {"role": "user", "content": "hi"}


TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }} as <tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.celsius }}{% endfor %}{% endfor %}"
)


class Weather(pydantic.BaseModel):
    celsius: bool


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with run_server(engine, chat_template=file, served_model_names=("tiny",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestChat:
    def test_call_in_complete_and_streamed_responses(self, client):
        request_body = {"model": "tiny", "messages": [USER], "tools": [TOOL, OTHER], "max_tokens": 200}
        request_body["extra_body"] = {"guided_choice": [f"Let me see. {HERMES_CALL}"]}
        (choice,) = client.chat.completions.create(**request_body).choices
        (call,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert (call.type, call.function.name, call.function.arguments) == ("function", *WEATHER_CALL)
        with client.chat.completions.stream(**request_body) as stream:
            pieces = [event for event in stream if event.type == "content.delta"]
            (choice,) = stream.get_final_completion().choices
        assert len(pieces) > 1  # Several events; a late reader gets some of them at once.
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert choice.message.tool_calls[0].function.arguments == WEATHER_CALL[1]
        assert choice.message.tool_calls[0].id.startswith("call_")

    def test_json_answer_is_not_a_llama_call(self, server):
        text = '{"name": "John", "age": 3}'
        request_body = {"messages": [USER], "tools": [TOOL], "max_tokens": 60, "guided_choice": [text]}
        service = server.server.service
        previous, service.tool_call_format = service.tool_call_format, LLAMA3_JSON
        try:
            (choice,) = server.post(CHAT, **request_body)["choices"]
            streamed = [event["choices"][0] for event in server.events(CHAT, **request_body)]
        finally:
            service.tool_call_format = previous
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "".join(choice["delta"].get("content", "") for choice in streamed) == text

    @pytest.mark.kernels
    def test_named_function_is_called_with_arguments_of_its_schema(self, client):
        choice = {"type": "function", "function": {"name": "weather"}}
        request_body = {
            "model": "tiny",
            "messages": [USER],
            "tools": [OTHER, TOOL],
            "tool_choice": choice,
            "seed": 1,
        }
        complete = client.chat.completions.create(**request_body, max_tokens=200).choices[0]
        (call,) = complete.message.tool_calls
        assert (call.function.name, complete.message.content, complete.finish_reason) == (
            "weather",
            None,
            "stop",
        )
        assert json.loads(call.function.arguments) in ({"celsius": True}, {"celsius": False})
        chunks = list(client.chat.completions.create(**request_body, max_tokens=200, stream=True))
        pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
        assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
        assert len(pieces) > 1

    @pytest.mark.kernels
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_arguments_are_an_object_even_without_a_schema_type(self, server, seed):
        schema = {name: value for name, value in SCHEMA.items() if name != "type"}
        request_body = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
        request_body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
        (choice,) = server.post(CHAT, messages=[USER], max_tokens=200, seed=seed, **request_body)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"celsius": True}, {"celsius": False})

    @pytest.mark.kernels
    def test_required_call_is_always_generated(self, client):
        request_body = {"model": "tiny", "messages": [USER], "tools": [TOOL], "tool_choice": "required"}
        request_body |= {"parallel_tool_calls": False, "max_tokens": 200, "seed": 1}
        (choice,) = client.chat.completions.create(**request_body).choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.message.content, choice.finish_reason) == (
            "weather",
            None,
            "tool_calls",
        )
        assert json.loads(call.function.arguments) in ({"celsius": True}, {"celsius": False})
        with client.chat.completions.stream(**request_body) as stream:
            event_types = [event.type for event in stream]
            (streamed_choice,) = stream.get_final_completion().choices
        assert event_types.count("tool_calls.function.arguments.delta") > 5  # Several deltas.
        assert event_types.count("tool_calls.function.arguments.done") == 1
        assert streamed_choice.message.tool_calls[0].function.arguments == call.function.arguments
        assert streamed_choice.finish_reason == "tool_calls"

    def test_stream_of_a_call_has_no_empty_chunks(self, server):
        request_body = {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 60,
            "seed": 3,
        }
        deltas = [event["choices"][0] for event in server.events(CHAT, **request_body)]
        assert any("tool_calls" in choice["delta"] for choice in deltas)
        assert all(any(choice["delta"].values()) or choice["finish_reason"] for choice in deltas)

    @pytest.mark.parametrize("call_format", [HERMES, LLAMA3_JSON])
    def test_strict_tool_constrains_the_output(self, server, call_format):
        tool = openai.pydantic_function_tool(Weather, name="weather")
        assert tool["function"]["strict"]
        request_body = {"messages": [USER], "tools": [tool, OTHER], "parallel_tool_calls": False}
        body = ChatCompletionBody.model_validate(request_body)
        constraint = resolve_tool_calling(body, call_format, server.server.service.tokenizer).constraint
        grammar = strict_calls_grammar(call_format, body.tools, {}, max_calls=1)
        assert (constraint.param, constraint.structured_outputs.grammar) == ("tools", grammar)
        assert server.post(CHAT, **request_body, max_tokens=9)["usage"]["completion_tokens"] == 9

    def test_template_receives_tools_and_previous_calls(self, server):
        template = server.server.service.chat_template
        rendered = []
        render = template.render
        template.render = lambda *args, **variables: (
            rendered.append(render(*args, **variables)) or rendered[-1]
        )
        try:
            assistant_message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function"}],
            }
            assistant_message["tool_calls"][0]["function"] = {
                "name": "weather",
                "arguments": '{"celsius": 7}',
            }
            tool_message = {"role": "tool", "tool_call_id": "a", "content": "warm"}
            server.post(CHAT, messages=[USER, assistant_message, tool_message], tools=[OTHER], max_tokens=1)
            server.post(CHAT, messages=[USER], tools=[OTHER], tool_choice="none", max_tokens=1)
        finally:
            del template.render
        assert rendered == [json.dumps(OTHER) + " as <tool_call>hiNone7warm", "hi"]

    @pytest.mark.parametrize(
        "function", [{"name": "f"}, *({"name": "f", "arguments": x} for x in (None, ""))]
    )
    def test_missing_arguments_of_a_previous_call_become_an_empty_object(self, function):
        assert parse_call_arguments("calls", [{"function": function}]) == [
            {"function": {"name": "f", "arguments": {}}}
        ]

    def test_assistant_message_without_content_is_empty(self, server):
        assistant_message = {"role": "assistant", "content": None, "tool_calls": []}
        (response, expected) = (
            server.post("/tokenize", messages=[USER, choice])
            for choice in (assistant_message, assistant_message | {"content": ""})
        )
        assert response == expected

    @pytest.mark.parametrize(
        ("body", "status", "param", "message"),
        [
            (
                {"tool_choice": "required"},
                400,
                "tool_choice",
                'tool_choice="required" needs at least one tool',
            ),
            (
                {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"},
                400,
                "guided_regex",
                "guided_regex cannot be combined with tool_choice",
            ),
            (
                {"tool_choice": "required", "tools": [{"type": "function", "function": INVALID_FUNCTION}]},
                400,
                "tool_choice",
                "is not supported by llguidance",
            ),
            (
                {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]},
                400,
                "tool_choice",
                r"tool_choice names the function 'x', which is not in tools: \['weather'\]",
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
                "guided_regex cannot be combined with tool_choice",
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
                "must be a list of tool calls, got 5",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [5]}]},
                400,
                "messages",
                "must contain function calls, got 5",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
                400,
                "messages",
                r"messages\[0\].tool_calls.function.arguments must be JSON, got '{'",
            ),
            *(
                (
                    {
                        "messages": [
                            USER,
                            {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]},
                        ]
                    },
                    400,
                    "messages",
                    r"messages\[1\].tool_calls.function.arguments must be a JSON object, got",
                )
                for arguments in ("[1, 2]", "3", [], [1, 2], 3)
            ),
        ],
    )
    def test_invalid_request_names_its_parameter(self, server, body, status, param, message):
        actual, error = server.error(CHAT, **{"messages": [USER]} | body)
        assert (actual, error["param"]) == (status, param), error
        with pytest.raises(ValueError, match=message):
            raise ValueError(error["message"])
