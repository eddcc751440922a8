"""LangChain's ChatOpenAI, as its users use it, against a server on this machine."""

import asyncio

import pydantic
import pytest

from tests.serving.server.live_server import running

langchain_openai = pytest.importorskip("langchain_openai")
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}{{ messages[-1].content }}"


class Weather(pydantic.BaseModel):
    """Of today."""

    celsius: bool


@pytest.fixture(scope="module")
def model(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with running(engine, chat_template=file, served_model_names=("tiny",)) as server:
        how = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "seed": 1}
        yield langchain_openai.ChatOpenAI(**how, max_tokens=200, max_retries=0)


def test_at_once_streamed_and_many_at_once(model):
    short = model.bind(max_tokens=6)
    said = short.invoke("hi")
    assert (said.usage_metadata["output_tokens"], said.response_metadata["finish_reason"]) == (6, "length")
    assert "".join(piece.content for piece in short.stream("hi")) == said.content
    assert asyncio.run(short.abatch(["hi", "hi"]))[1].content == said.content


def test_a_class_is_filled(model):
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke("hi"), Weather)


def test_a_tool_is_called(model):
    text = 'So: <tool_call>{"name": "Weather", "arguments": {"celsius": true}}</tool_call>'
    said = model.bind_tools([Weather]).bind(extra_body={"guided_choice": [text]}).invoke("hi")
    assert said.content == "So: "
    assert [(call["name"], call["args"]) for call in said.tool_calls] == [("Weather", {"celsius": True})]
