"""LangChain's ChatOpenAI with a server on this machine."""

import asyncio

import pydantic
import pytest

from tests.serving.server.live_server import run_server

TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}{{ messages[-1].content }}"


class Weather(pydantic.BaseModel):
    """The weather of today."""

    celsius: bool


@pytest.fixture(scope="module")
def model(engine, tmp_path_factory):
    from langchain_openai import ChatOpenAI  # takes a second, which only the worker with these tests needs

    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with run_server(engine, chat_template=file, served_model_names=("tiny",)) as server:
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "seed": 1}
        yield ChatOpenAI(**options, max_tokens=200, max_retries=0)


def test_invoke_stream_and_batch(model):
    short = model.bind(max_tokens=6)
    message = short.invoke("hi")
    assert (message.usage_metadata["output_tokens"], message.response_metadata["finish_reason"]) == (
        6,
        "length",
    )
    assert "".join(piece.content for piece in short.stream("hi")) == message.content
    assert asyncio.run(short.abatch(["hi", "hi"]))[1].content == message.content


def test_structured_output_fills_a_class(model):
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke("hi"), Weather)


def test_bound_tool_is_called(model):
    text = 'So: <tool_call>{"name": "Weather", "arguments": {"celsius": true}}</tool_call>'
    message = model.bind_tools([Weather]).bind(extra_body={"guided_choice": [text]}).invoke("hi")
    assert message.content == "So: "
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("Weather", {"celsius": True})]
