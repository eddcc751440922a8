"""Chat completions."""

import pytest

from tests.serving.server.live_server import run_server

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with run_server(engine, served_model_names=("tiny", "alias"), chat_template=file) as server:
        yield server


@pytest.fixture(autouse=True)
def check_idle(server):
    yield
    server.wait_until(lambda: server.is_idle)


class TestChat:
    def test_response_has_openais_fields(self, server):
        messages = [{"role": "user", "content": "hi"}]
        response = server.post("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)
        assert response["object"] == "chat.completion"
        (choice,) = response["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        text = "<|user|>hi\n<|assistant|>"
        assert response["usage"]["prompt_tokens"] == len(text)
        plain = server.post("/v1/completions", prompt=text, max_tokens=5, temperature=0)
        assert choice["message"]["content"] == plain["choices"][0]["text"]

    def test_stream_begins_with_the_role_and_has_the_same_text(self, server):
        request_body = {
            "messages": [{"role": "user", "content": "hi"}],
            "seed": 3,
            "max_completion_tokens": 9,
        }
        expected = server.post("/v1/chat/completions", **request_body)["choices"][0]["message"]["content"]
        first, *events = server.events("/v1/chat/completions", **request_body)
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == expected
        assert events[-1]["choices"][0]["finish_reason"] == "length"

    def test_text_parts_are_joined_with_newlines(self, server):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        tokens = server.post("/tokenize", messages=[{"role": "user", "content": parts}])["tokens"]
        assert server.post("/detokenize", tokens=tokens)["prompt"] == "<|user|>a\nb\n<|assistant|>"

    def test_logprobs_contain_tokens_bytes_and_alternatives(self, server):
        request_body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
        response = server.post("/v1/chat/completions", **request_body, max_tokens=4, temperature=0)
        content = response["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        for position in content:
            assert len(position["top_logprobs"]) == 3
            best = position["top_logprobs"][0]
            assert (position["token"], position["bytes"]) == (best["token"], best["bytes"])
            assert position["logprob"] == pytest.approx(best["logprob"])
        streamed = server.events("/v1/chat/completions", **request_body, max_tokens=4, temperature=0)
        streamed_content = [
            x for e in streamed for x in (e["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert [position["bytes"] for position in streamed_content] == [
            position["bytes"] for position in content
        ]

    def test_default_max_tokens_fills_the_context(self, server):
        messages = [{"role": "user", "content": "x" * 440}]
        response = server.post("/v1/chat/completions", messages=messages)
        assert response["usage"]["total_tokens"] == 512
