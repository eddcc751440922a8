"""Request bodies that are invalid, too large or incomplete."""

import contextlib
import http.client
import socket

import pytest

from tests.serving.server.live_server import run_server

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


class TestInvalidBodies:
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
    def test_body_that_is_not_an_object_is_rejected(self, server, body):
        status, _, response = server.request("POST", TEXT, body)
        assert (status, response["error"]["type"]) == (400, "invalid_request_error")

    def test_large_body_is_rejected(self, server):
        status, error = server.error(TEXT, prompt="a" * 30_000)
        assert status == 413
        assert "exceeds the maximum of 20000 bytes" in error["message"]

    def test_large_chunked_body_is_rejected(self, server):
        chunks = (b"a" * 1000 for _ in range(1000))
        with contextlib.suppress(ConnectionError):  # The server may stop reading.
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            with contextlib.closing(connection):
                connection.request("POST", TEXT, chunks, encode_chunked=True)
                assert connection.getresponse().status == 413

    def test_endless_headers_are_rejected(self, server):
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
    def test_unknown_path_or_method_is_an_error(self, server, method, path, status):
        response_status, headers, response = server.request(method, path)
        assert response_status == status
        assert set(response["error"]) == {"message", "type", "param", "code"}
        if status == 405:
            message = f"{method} is not allowed for {path}. Use {headers['allow']}."
            assert response["error"]["message"] == message
