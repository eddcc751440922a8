"""Clients that disconnect, do not read, or send too much: they affect nobody else."""

import asyncio
import concurrent.futures
import socket
import threading
import time

import pytest

from jattn.serving.server.responses import EventStream
from tests.serving.server.live_server import delay_steps, run_server, send_request

CHAT = "/v1/chat/completions"


TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    options = {"chat_template": file, "max_queue": 2, "max_body_bytes": 20_000}
    with run_server(engine, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def check_next_request(server):
    yield
    server.wait_until(lambda: server.is_idle)
    assert server.post(TEXT, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


LONG = {"prompt": "abc", "max_tokens": 400, "temperature": 1.0, "seed": 1}


class SlowTokenizer:
    """Tokenizer that blocks on long texts until `can_continue` is set.

    Long texts must use `encode_batch`, since `encode` holds the interpreter lock.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.was_called, self.can_continue = tokenizer, threading.Event(), threading.Event()

    def encode(self, text, *, add_special_tokens):
        assert len(text) < 1000
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts, *, add_special_tokens):
        self.was_called.set()
        assert self.can_continue.wait(20)
        return self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


class TestMisbehavingClients:
    @pytest.mark.parametrize(
        ("path", "request_body"),
        [
            (TEXT, {"prompt": "a" * 5000}),
            (TEXT, {"prompt": ["a" * 900] * 6}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}),
            ("/tokenize", {"prompt": "a" * 5000}),
        ],
    )
    def test_tokenizing_a_long_text_does_not_delay_others(self, server, monkeypatch, path, request_body):
        slow = SlowTokenizer(server.server.service.tokenizer)
        monkeypatch.setattr(server.server.service, "tokenizer", slow)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            long = pool.submit(server.request, "POST", path, request_body)
            assert slow.was_called.wait(20)
            assert server.post(TEXT, prompt="abc", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert not long.done()
            slow.can_continue.set()
            status, _, response = long.result()
        assert response["count"] == 5000 if path == "/tokenize" else status == 400

    @pytest.mark.parametrize("streams", [True, False])
    def test_disconnect_frees_the_blocks_soon(self, server, engine, streams):
        client = send_request(server, LONG | {"stream": streams}, after_bytes=int(streams))
        server.wait_until(lambda: engine.stats.num_running == 1)
        steps = engine.stats.num_steps
        client.close()
        server.wait_until(lambda: server.is_idle)
        assert engine.stats.num_steps < steps + 40

    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize("count", [1, 3])
    def test_disconnect_during_prefill_frees_the_blocks_within_a_step(self, server, engine, streams, count):
        """The prompt has 480 tokens and a step prefills 64 of them."""
        previous_stats = engine.stats
        with delay_steps(engine, seconds=0.04):
            body = {
                "prompt": [(7 * i + 2 * count + streams) % 250 for i in range(480)],
                "max_tokens": 9,
                "n": count,
            }
            client = send_request(server, body | {"stream": streams}, after_bytes=0)
            server.wait_until(lambda: engine.stats.num_used_blocks >= 64 // 8)
            steps = engine.stats.num_steps
            client.close()
            server.wait_until(lambda: server.is_idle)
        assert engine.stats.num_steps <= steps + 2  # The running step and the next one.
        assert engine.stats.num_generated_tokens == previous_stats.num_generated_tokens

    def test_disconnect_frees_the_blocks_of_all_completions(self, server, engine):
        with delay_steps(engine, seconds=0.01):
            client = send_request(
                server, LONG | {"stream": True, "n": 4, "prompt": "abc" * 20}, after_bytes=2000
            )
            server.wait_until(lambda: engine.stats.num_running == 4)
            steps = engine.stats.num_steps
            client.close()
            server.wait_until(lambda: server.is_idle)
        assert engine.stats.num_steps <= steps + 3

    def test_two_requests_may_have_the_same_request_id(self, server):
        """The engine numbers requests by itself, so that the ids do not collide."""
        request_body = [
            {"prompt": text, "max_tokens": 30, "request_id": "mine", "temperature": 0} for text in "ab"
        ]
        expected = [server.post(TEXT, **body)["choices"][0]["text"] for body in request_body]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            responses = list(pool.map(lambda body: server.post(TEXT, **body), request_body))
        assert [response["id"] for response in responses] == ["cmpl-mine"] * 2
        assert [response["choices"][0]["text"] for response in responses] == expected

    def test_client_that_does_not_read_does_not_delay_others(self, server, engine):
        client = send_request(server, LONG | {"stream": True, "n": 3}, after_bytes=0)
        server.wait_until(lambda: engine.stats.num_running > 0)
        assert server.post(TEXT, prompt="abc", max_tokens=3)["usage"]["completion_tokens"] == 3
        client.close()

    def test_idle_connections_do_not_delay_others(self, server):
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        assert server.post(TEXT, prompt="abc", max_tokens=3)["usage"]["completion_tokens"] == 3
        for client in clients:
            client.close()

    def test_stream_that_is_not_read_in_time_ends(self):
        ended = []

        async def pieces():
            try:
                while True:
                    yield b"x" * 10
            finally:
                ended.append(True)

        async def send(message):
            if message.get("body"):
                await asyncio.sleep(60)

        async def main():
            start = time.monotonic()
            await EventStream(pieces(), send_timeout=0.05).stream_response(send)
            return time.monotonic() - start

        assert asyncio.run(main()) < 5
        assert ended == [True]

    def test_full_queue_is_a_429_with_retry_after(self, server, engine):
        clients = [
            send_request(server, LONG | {"stream": True}, after_bytes=0) for _ in range(6)
        ]  # Four run and two wait.
        server.wait_until(lambda: server.server.service.num_open == 6)
        status, headers, response = server.request("POST", TEXT, {"prompt": "a"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert response["error"]["code"] == "rate_limit_exceeded"
        assert "2 completions are waiting, and the maximum is 2" in response["error"]["message"]
        for client in clients:
            client.close()

    @pytest.mark.parametrize(
        ("path", "request_body"),
        [
            (TEXT, {"prompt": "a", "n": 7}),
            (TEXT, {"prompt": "a", "best_of": 7}),
            (TEXT, {"prompt": ["a"] * 7}),
            (TEXT, {"prompt": [[1]] * 4, "n": 2}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 7}),
        ],
    )
    def test_request_that_can_never_be_admitted_is_a_400(self, server, path, request_body):
        status, headers, response = server.request("POST", path, request_body)
        assert (status, headers["Retry-After"], response["error"]["param"]) == (400, None, "n")
        assert "admits at most 6" in response["error"]["message"]
