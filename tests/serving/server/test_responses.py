"""Streams over HTTP, and responses that the cache limits."""

import contextlib
import http.client
import json
import socket

import pytest

from tests.serving.server.live_server import parse_events, run_server, small_engine

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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Run a server whose cache holds 128 tokens, fewer than the model's context."""
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with run_server(small_engine(num_blocks=17), chat_template=file) as server:
        yield server


class TestSmallCache:
    def test_default_max_tokens_is_limited_by_the_cache(self, small):
        messages = [{"role": "user", "content": "x" * 80}]
        response = small.post("/v1/chat/completions", messages=messages)
        assert response["usage"]["total_tokens"] == 128
        status, error = small.error("/v1/chat/completions", messages=messages, min_tokens=60)
        assert (status, error["param"]) == (400, "min_tokens")

    @pytest.mark.parametrize("more", [{}, {"max_tokens": 3}])
    def test_truncation_leaves_room_for_new_tokens(self, small, more):
        request_body = {"truncate_prompt_tokens": -1} | more
        messages = [{"role": "user", "content": "x" * 600}]
        for path, start in (("", {"prompt": "x" * 600}), ("chat/", {"messages": messages})):
            usage = small.post(f"/v1/{path}completions", **start, **request_body)["usage"]
            assert usage["total_tokens"] == 128


def test_stream_is_chunked_and_keeps_the_connection(server):
    request_body = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
    expected = server.post("/v1/completions", **request_body)["choices"][0]["text"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps(request_body | {"stream": True}))
            response = connection.getresponse()
            assert response.headers["Transfer-Encoding"] == "chunked"
            events = parse_events(response.read().decode())
            assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_http_1_0_stream_ends_with_the_connection(server):
    request_body = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
    expected = server.post("/v1/completions", **request_body)["choices"][0]["text"]
    body = json.dumps(request_body | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, text = b"".join(iter(lambda: client.recv(4096), b"")).decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head.lower()
    assert "".join(event["choices"][0]["text"] for event in parse_events(text)) == expected


def test_event_is_one_line_of_json(server):
    raw = server.post("/v1/completions", prompt="abc", max_tokens=20, temperature=1.0, seed=2, stream=True)
    assert all(json.loads(line[6:]) for line in raw.split("\n\n")[:-2])
