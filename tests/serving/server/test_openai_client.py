"""The openai package with a server on this machine."""

import asyncio
import json
import subprocess

import openai
import pydantic
import pytest
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.server.live_server import parse_events, run_server

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with run_server(engine, chat_template=file, api_keys=("secret",), served_model_names=("tiny",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


class TestCompletions:
    def test_complete_and_streamed_responses_agree(self, client):
        request_body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "seed": 3, "temperature": 0.8}
        complete = client.completions.create(**request_body, logprobs=2)
        assert complete.usage.completion_tokens == 8
        assert len(complete.choices[0].logprobs.tokens) == 8
        with client.completions.create(**request_body, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == complete.choices[0].text

    def test_vllm_parameters_in_extra_body(self, client):
        extra = {"guided_regex": "[0-9]{3}", "top_k": 50}
        complete = client.completions.create(model="tiny", prompt="abc", max_tokens=9, extra_body=extra)
        assert complete.choices[0].text.isdigit()


class TestChat:
    def test_complete_and_streamed_responses_agree(self, client):
        request_body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 3}
        complete = client.chat.completions.create(**request_body, logprobs=True, top_logprobs=2)
        assert complete.choices[0].message.role == "assistant"
        assert len(complete.choices[0].logprobs.content[0].top_logprobs) == 2
        chunks = list(
            client.chat.completions.create(
                **request_body, stream=True, stream_options={"include_usage": True}
            )
        )
        streamed_text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed_text == complete.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 8

    def test_stream_helper_assembles_the_message(self, client):
        request_body = {"model": "tiny", "messages": MESSAGES, "extra_body": {"guided_choice": ["yes"]}}
        with client.chat.completions.stream(**request_body) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.content == "yes"

    def test_parse_fills_a_pydantic_class(self, client):
        class Answer(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(extra="forbid")
            yes: bool

        parsed = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=400, seed=2
        )
        assert isinstance(parsed.choices[0].message.parsed, Answer)

    def test_concurrent_requests(self, server):
        async def main():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
                ask = client.chat.completions.create
                tasks = [ask(model="tiny", messages=MESSAGES, max_tokens=n, seed=n) for n in range(1, 13)]
                return await asyncio.gather(*tasks)

        counts = [response.usage.completion_tokens for response in asyncio.run(main())]
        assert counts == list(range(1, 13))


class TestErrors:
    def test_errors_have_the_clients_exception_types(self, client, server):
        with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 1e30\]") as raised:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
            client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert raised.value.code == "model_not_found"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        with pytest.raises(openai.UnprocessableEntityError, match="tools"):
            client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools)
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as unauthorized_client,
            pytest.raises(openai.AuthenticationError),
        ):
            unauthorized_client.models.list()

    def test_closed_stream_frees_its_blocks(self, client, server):
        stream = client.completions.create(model="tiny", prompt="abc", max_tokens=400, stream=True, seed=1)
        next(iter(stream))
        stream.close()
        server.wait_until(lambda: server.is_idle)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "jattn"


def test_curl(server):
    data = json.dumps({"prompt": "abc", "max_tokens": 3})
    words = ["curl", "-sS", f"{server.url}/v1/completions", "-H", "Authorization: Bearer secret"]
    process = subprocess.run(
        [*words, "-H", "Content-Type: application/json", "-d", data],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(process.stdout)["usage"]["completion_tokens"] == 3


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}
RESPONSE_TYPES = [
    ("/v1/completions", {"prompt": "abc", "logprobs": 2, "n": 2}, Completion, Completion),
    (
        "/v1/chat/completions",
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": NAMED}, ChatCompletion, ChatCompletionChunk),
    (
        "/v1/chat/completions",
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
        ChatCompletion,
        ChatCompletionChunk,
    ),
]


@pytest.mark.parametrize(("path", "body", "complete", "chunk"), RESPONSE_TYPES)
def test_responses_match_the_published_types(server, path, body, complete, chunk):
    """The client accepts any response, but its types validate strictly."""
    headers = {"Authorization": "Bearer secret"}
    body = {"max_tokens": 5, "seed": 1, "messages": MESSAGES} | body
    if "prompt" in body:
        del body["messages"]
    status, _, response = server.request("POST", path, body, headers)
    assert status == 200
    checked = complete.model_validate(response, strict=True)
    assert checked.usage is not None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, _, text = server.request("POST", path, body | options, headers)
    events = list(parse_events(text))
    for choice in (choice for event in events for choice in event["choices"] if chunk is Completion):
        choice["finish_reason"] = choice["finish_reason"] or "stop"  # the type knows no stream's null
    chunks = [chunk.model_validate(event, strict=True) for event in events]
    assert chunks[-1].usage == checked.usage


def test_models_and_errors_match_the_published_types(server):
    headers = {"Authorization": "Bearer secret"}
    _, _, models = server.request("GET", "/v1/models", headers=headers)
    assert [Model.model_validate(model, strict=True).id for model in models["data"]] == ["tiny"]
    _, _, response = server.request("POST", "/v1/completions", {}, headers)
    ErrorObject.model_validate(response["error"], strict=True)
