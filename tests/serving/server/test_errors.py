"""Whatever a client does wrong is told in OpenAI's shape, and harms nobody else."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import socket
import sys
import threading
import time

import pytest

from jattn.serving.server.responses import EventStream
from tests.serving.engine.faults import device_fails, reading_fails
from tests.serving.server.live_server import parsed, running, slow_steps

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 400, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    options = {"chat_template": file, "max_queue": 2, "max_body_bytes": 20_000, "body_seconds": 0.5}
    with running(engine, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def the_next_request_is_served(server):
    yield
    server.until(lambda: server.is_idle)
    assert server.post(TEXT, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (TEXT, {}, 400, "prompt", "prompt: Field required"),
        (TEXT, {"prompt": "a", "temprature": 1}, 400, "temprature", "Unrecognized request argument supplied"),
        (TEXT, {"prompt": "a", "maxTokens": 1}, 400, "maxTokens", "argument supplied: maxTokens$"),
        (TEXT, {"prompt": "a", "str": 1}, 400, "str", "argument supplied: str$"),
        (
            TEXT,
            {"prompt": "a", "stream_options": {"top-k2": 1}},
            400,
            "stream_options",
            r"supplied: stream_options.top-k2$",
        ),
        (
            TEXT,
            {"prompt": "a", "temperature": -1},
            400,
            "temperature",
            "temperature must be at least 0, got -1",
        ),
        (
            TEXT,
            {"prompt": "a", "temperature": "1"},
            400,
            "temperature",
            "temperature: Input should be a valid",
        ),
        (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens must be positive, got 0"),
        (
            TEXT,
            {"prompt": "a", "max_tokens": 1.5},
            400,
            "max_tokens",
            "max_tokens: Input should be a valid int",
        ),
        (TEXT, {"prompt": "a", "n": 10**9}, 400, "n", "n: Input should be less than or equal to 128"),
        (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, 400, "n", "n must be 1 with temperature 0"),
        (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop", "stop must hold no empty string"),
        (TEXT, {"prompt": "a", "stop": ["b"] * 129}, 400, "stop", "stop must hold at most 128 .*, got 129"),
        (TEXT, {"prompt": "a", "bad_words": ["b"] * 1025}, 400, "bad_words", "at most 1024 .*, got 1025"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "must map token ids .*, got 'x'"),
        (TEXT, {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias", r"in the vocabulary.*\[999\]"),
        (TEXT, {"prompt": "a", "logprobs": 99}, 400, "logprobs", r"logprobs must be in \[0, 20\], got 99"),
        (TEXT, {"prompt": ""}, 400, "prompt", "prompt is empty"),
        (TEXT, {"prompt": []}, 400, "prompt", r"prompt must hold a token, or a prompt, got \[\]"),
        (TEXT, {"prompt": [[]]}, 400, "prompt", "prompt is empty"),
        (TEXT, {"prompt": [1, 999]}, 400, "prompt", r"prompt\[1\] must be in the vocabulary.* 999"),
        (TEXT, {"prompt": [999], "echo": True}, 400, "prompt", r"must be in the vocabulary.*\[999\]"),
        (TEXT, {"prompt": "a" * 513}, 400, "prompt", "length is 512 tokens. .* requested 529 .513 in the "),
        (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix: 'b' is not served"),
        (TEXT, {"prompt": "a", "best_of": 2, "n": 3}, 400, "best_of", r"must be at least n \(3\), got 2"),
        (TEXT, {"prompt": "a", "best_of": 129}, 400, "best_of", "less than or equal to 128"),
        (
            TEXT,
            {"prompt": "a", "best_of": 2, "temperature": 0},
            400,
            "best_of",
            "be n with temperature 0, got 2",
        ),
        (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "model", "The model `gpt-9` does not exist"),
        (CHAT, {"messages": []}, 400, "messages", "messages: List should have at least 1 item"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ""}]},
            400,
            "messages",
            r"at least one token, got \[\]",
        ),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "messages", "messages.0.role: Field required"),
        (CHAT, {"messages": [{"role": "system", "content": "a"}]}, 400, "messages", "no systems"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            422,
            "messages",
            r"messages\[0\].content: only text is served, got 'image_url'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            400,
            "top_logprobs",
            "got 2",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 3},
            400,
            "max_tokens",
            r"must be max_completion_tokens \(3\) or nothing, got 2",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
            400,
            "max_completion_tokens",
            "must be positive, got 0",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs",
            "hold other names, got",
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            422,
            "tools",
            "the chat template asks for calls in no way that is known",
        ),
        ("/detokenize", {"tokens": [999]}, 400, "tokens", r"must be in the vocabulary.*\[999\]"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            400,
            "chat_template",
            "'x' is not served",
        ),
    ],
)
def test_what_is_wrong_is_named(server, path, body, status, param, message):
    got, error = server.error(path, **body)
    assert (got, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])
    if path in (TEXT, CHAT):  # a stream that cannot begin is no stream
        assert server.error(path, **body, stream=True) == (got, error)


class TestBodies:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"\xff\xfe{}",
            b"[]",
            b"null",
            b'"a"',
            b"[" * 5000,
            b'{"prompt":' * 1500,
            b'{"prompt":"\\ud800"}',
        ],
    )
    def test_that_are_no_object_are_refused(self, server, body):
        status, _, answer = server.ask("POST", TEXT, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    def test_that_are_too_large_are_refused(self, server):
        status, error = server.error(TEXT, prompt="a" * 30_000)
        assert status == 413
        assert "must have at most 20000 bytes, got 30" in error["message"]

    def test_that_are_too_large_and_do_not_say_so_are_refused(self, server):
        chunks = (b"a" * 1000 for _ in range(1000))
        with contextlib.suppress(ConnectionError):  # the server need not read on
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            with contextlib.closing(connection):
                connection.request("POST", TEXT, chunks, encode_chunked=True)
                assert connection.getresponse().status == 413

    def test_that_do_not_come_are_given_up(self, server):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n"
            client.sendall(head.encode() + b'{"prompt"')
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")

    def test_headers_without_end_are_cut_off(self, server):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\n")
                for i in range(20_000):
                    client.sendall(f"X-Header-{i}: {'a' * 100}\r\n".encode())
            with contextlib.suppress(ConnectionError):
                assert client.recv(4096)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/../../etc/passwd", 404),
            ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
            ("GET", "/nothing", 404),
            ("GET", TEXT, 405),
            ("DELETE", "/health", 405),
        ],
    )
    def test_paths_that_are_none(self, server, method, path, status):
        got, headers, answer = server.ask(method, path)
        assert got == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        if status == 405:
            told = f"{method} is not served at {path}, which takes {headers['allow']}."
            assert answer["error"]["message"] == told


class TestFailures:
    @pytest.mark.parametrize("failure", [device_fails, reading_fails])
    def test_a_step_that_fails_is_a_500_without_a_traceback(self, server, engine, failure):
        with failure(engine):
            status, error = server.error(TEXT, prompt="abc", max_tokens=5)
        assert status == 500
        assert error["type"] == "internal_error"
        assert "Traceback" not in error["message"]

    def test_a_stream_that_fails_says_so_and_ends(self, server, engine):
        with reading_fails(engine, at=6):
            *events, last = server.events(TEXT, prompt="abc", max_tokens=200, logprobs=0)
        assert events
        assert last["error"]["type"] == "internal_error"

    def test_an_error_of_our_own_tells_nothing_of_the_inside(self, server):
        tokenizer, server.server.service.tokenizer = server.server.service.tokenizer, None
        try:
            status, error = server.error(TEXT, prompt="abc")
        finally:
            server.server.service.tokenizer = tokenizer
        assert (status, error["message"]) == (500, "internal error")


def hang_up(server, body, after_bytes=1):
    """Asks, reads a little, and is gone without a word of farewell."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    if after_bytes:
        client.recv(after_bytes)
    return client


def is_closed(client):
    """Whether the other side has said that it is done."""
    client.settimeout(0.01)
    try:
        return client.recv(4096) == b""
    except TimeoutError:
        return False


class SlowTokenizer:
    """Its long texts take until somebody else was served. `encode` would hold the interpreter's lock."""

    def __init__(self, tokenizer):
        self.tokenizer, self.was_asked, self.may_go_on = tokenizer, threading.Event(), threading.Event()

    def encode(self, text, *, add_special_tokens):
        assert len(text) < 1000
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts, *, add_special_tokens):
        self.was_asked.set()
        assert self.may_go_on.wait(20)
        return self.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


class TestClients:
    @pytest.mark.parametrize(
        ("path", "asked"),
        [
            (TEXT, {"prompt": "a" * 5000}),
            (TEXT, {"prompt": ["a" * 900] * 6}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}),
            ("/tokenize", {"prompt": "a" * 5000}),
        ],
    )
    def test_others_are_served_while_a_long_text_becomes_tokens(self, server, monkeypatch, path, asked):
        slow = SlowTokenizer(server.server.service.tokenizer)
        monkeypatch.setattr(server.server.service, "tokenizer", slow)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            long = pool.submit(server.ask, "POST", path, asked)
            assert slow.was_asked.wait(20)
            assert server.post(TEXT, prompt="abc", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert not long.done()
            slow.may_go_on.set()
            status, _, answer = long.result()
        assert answer["count"] == 5000 if path == "/tokenize" else status == 400

    @pytest.mark.parametrize("streams", [True, False])
    def test_who_hangs_up_frees_the_blocks_within_a_step_or_two(self, server, engine, streams):
        client = hang_up(server, LONG | {"stream": streams}, after_bytes=int(streams))
        server.until(lambda: engine.stats.num_running == 1)
        steps = engine.stats.num_steps
        client.close()
        server.until(lambda: server.is_idle)
        assert engine.stats.num_steps < steps + 40

    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize("count", [1, 3])
    def test_who_hangs_up_while_the_prompt_is_read_frees_the_blocks_within_a_step(
        self, server, engine, streams, count
    ):
        """A prompt of 480 tokens, 64 of them a step."""
        before = engine.stats
        with slow_steps(engine, seconds=0.04):
            body = {
                "prompt": [(7 * i + 2 * count + streams) % 250 for i in range(480)],
                "max_tokens": 9,
                "n": count,
            }
            client = hang_up(server, body | {"stream": streams}, after_bytes=0)
            server.until(lambda: engine.stats.num_used_blocks >= 64 // 8)
            steps = engine.stats.num_steps
            client.close()
            server.until(lambda: server.is_idle)
        assert engine.stats.num_steps <= steps + 2  # that which was under way when it closed, and the next
        assert engine.stats.num_generated_tokens == before.num_generated_tokens

    def test_who_hangs_up_on_several_completions_frees_the_blocks_of_all(self, server, engine):
        with slow_steps(engine, seconds=0.01):
            client = hang_up(server, LONG | {"stream": True, "n": 4, "prompt": "abc" * 20}, after_bytes=2000)
            server.until(lambda: engine.stats.num_running == 4)
            steps = engine.stats.num_steps
            client.close()
            server.until(lambda: server.is_idle)
        assert engine.stats.num_steps <= steps + 3

    def test_two_requests_may_have_one_name(self, server):
        """The engine has numbers of its own: nobody is refused, or told what another asked for."""
        asked = [{"prompt": text, "max_tokens": 30, "request_id": "mine", "temperature": 0} for text in "ab"]
        want = [server.post(TEXT, **body)["choices"][0]["text"] for body in asked]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda body: server.post(TEXT, **body), asked))
        assert [answer["id"] for answer in answers] == ["cmpl-mine"] * 2
        assert [answer["choices"][0]["text"] for answer in answers] == want

    def test_who_reads_nothing_holds_nobody_up(self, server, engine):
        client = hang_up(server, LONG | {"stream": True, "n": 3}, after_bytes=0)
        server.until(lambda: engine.stats.num_running > 0)
        assert server.post(TEXT, prompt="abc", max_tokens=3)["usage"]["completion_tokens"] == 3
        client.close()

    def test_who_says_nothing_holds_nobody_up(self, server):
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        assert server.post(TEXT, prompt="abc", max_tokens=3)["usage"]["completion_tokens"] == 3
        for client in clients:
            client.close()

    @pytest.mark.parametrize("is_second", [False, True])
    def test_who_brings_no_request_in_time_is_cut_off(self, server, is_second):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            if is_second:
                client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
            start, dribble = time.monotonic(), b"GET /version HTTP/1.1\r\n"
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < start + 10 and not is_closed(client):
                    client.sendall(dribble)
                    dribble = b"X: 1\r\n"
                    time.sleep(0.05)
            assert time.monotonic() < start + 5  # body_seconds is 0.5

    def test_a_stream_that_is_not_taken_in_time_ends(self):
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
            await EventStream(pieces(), seconds=0.05).stream_response(send)
            return time.monotonic() - start

        assert asyncio.run(main()) < 5
        assert ended == [True]

    def test_too_many_are_turned_away_and_told_when_to_come_again(self, server, engine):
        clients = [hang_up(server, LONG | {"stream": True}, after_bytes=0) for _ in range(6)]  # 4 run, 2 wait
        server.until(lambda: server.server.service.num_open == 6)
        status, headers, answer = server.ask("POST", TEXT, {"prompt": "a"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert "2 completions wait, and no more than 2 may" in answer["error"]["message"]
        for client in clients:
            client.close()

    @pytest.mark.parametrize(
        ("path", "asked"),
        [
            (TEXT, {"prompt": "a", "n": 7}),
            (TEXT, {"prompt": "a", "best_of": 7}),
            (TEXT, {"prompt": ["a"] * 7}),
            (TEXT, {"prompt": [[1]] * 4, "n": 2}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 7}),
        ],
    )
    def test_who_asks_for_more_than_there_ever_is_room_for_need_not_come_again(self, server, path, asked):
        status, headers, answer = server.ask("POST", path, asked)
        assert (status, headers["Retry-After"], answer["error"]["param"]) == (400, None, "n")
        assert "at most 6 completions" in answer["error"]["message"]


class TestKeys:
    def test_a_request_must_have_one(self, engine):
        with running(engine, api_keys=("secret", "other")) as server:
            wrong = ("Bearer wrong", "secret", "Basic secret", "Bearersecret", "Bearer", "bearer ")
            for headers in ({}, *({"Authorization": given} for given in wrong)):
                for path in (TEXT, "/v1/models", "/tokenize", "/version"):
                    status, told, answer = server.ask("POST", path, {"prompt": "a"}, headers)
                    assert (status, told["WWW-Authenticate"]) == (401, "Bearer")
                    assert answer["error"]["code"] == "invalid_api_key"
            for given in ("Bearer secret", "Bearer other", "bearer secret", "BEARER other"):
                headers = {"Authorization": given}
                assert server.ask("GET", "/v1/models", headers=headers)[0] == 200
            assert [server.ask("GET", path)[0] for path in ("/health", "/metrics")] == [200, 200]


class TestReadiness:
    def test_nothing_is_served_before_everything_is_compiled(self, engine):
        go = threading.Event()
        with prepared_by(engine, lambda **options: go.wait(60)), running(engine, waits=False) as server:
            server.until(lambda: server.server.started)
            status, headers, answer = server.ask("GET", "/health")
            assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "1", "not_ready")
            assert server.error(TEXT, prompt="a")[0] == 503
            assert server.ask("GET", "/v1/models")[0] == 200
            go.set()
            server.until(lambda: server.ask("GET", "/health")[0] == 200)
            assert server.post(TEXT, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2

    def test_who_cannot_be_made_ready_stops(self, engine):
        def fail(**options):
            raise RuntimeError("ptxas fell over")

        with prepared_by(engine, fail), running(engine, waits=False) as server:
            server.until(lambda: server.server.should_exit)
        assert str(server.server.failure) == "ptxas fell over"


@contextlib.contextmanager
def prepared_by(engine, precompile):
    engine.precompile = precompile
    try:
        yield
    finally:
        del engine.precompile


def test_threads_take_turns_soon_while_a_server_runs(engine):
    before = sys.getswitchinterval()
    with running(engine):
        assert sys.getswitchinterval() < 0.001
    assert sys.getswitchinterval() == before


class TestEnd:
    def test_requests_under_way_are_finished(self, engine):
        answers = []
        with running(engine) as server:
            ask = lambda: answers.append(server.post(TEXT, **LONG))
            thread = threading.Thread(target=ask)
            thread.start()
            server.until(lambda: engine.stats.num_running == 1)
        thread.join(60)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [400]

    def test_but_not_for_ever(self, engine):
        with running(engine, drain_seconds=0) as server:
            client = hang_up(server, LONG | {"stream": True})
            server.until(lambda: engine.stats.num_running == 1)
        client.close()
        assert engine.stats.num_used_blocks == 0

    @pytest.mark.parametrize("streams", [True, False])
    def test_what_is_not_finished_by_then_is_told_so_as_any_error(self, engine, caplog, streams):
        answers, before = [], engine.stats.num_generated_tokens
        with slow_steps(engine, seconds=0.01), running(engine, drain_seconds=0) as server:
            ask = lambda: answers.append(server.ask("POST", TEXT, LONG | {"stream": streams}))
            thread = threading.Thread(target=ask)
            thread.start()
            server.until(lambda: engine.stats.num_generated_tokens > before + 3)
        thread.join(60)
        ((status, _, answer),) = answers
        assert status == (200 if streams else 503)
        *_, last = parsed(answer) if streams else [answer]
        assert (last["error"]["type"], last["error"]["code"]) == ("service_unavailable_error", "stopped")
        assert "Traceback" not in caplog.text
        assert engine.stats.num_used_blocks == 0
