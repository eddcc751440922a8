"""Responses that are cut off or that a proxy has changed, as `chat` and `bench-serve` read them."""

import concurrent.futures
import contextlib
import socket

import pytest

from jattn.serving.cli.main import main


@contextlib.contextmanager
def raw_server(data):
    """Yield the URL of a server that sends these bytes to one client and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as sock, concurrent.futures.ThreadPoolExecutor() as pool:

        def send():
            client, _ = sock.accept()
            with client:
                client.recv(2**16)
                client.sendall(data)

        sent = pool.submit(send)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        sent.result()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNK = (
    b'data: {"choices": [{"text": "a", "delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}\n\n'
)
INVALID_RESPONSES = [
    (b"", "The server does not speak HTTP: it sent b''"),
    (b"\x15\x03\x03\x00\x02", "The server does not speak HTTP: it sent b'"),
    (b"SSH-2.0-OpenSSH_9.6 x\r\n", "The server does not speak HTTP: it sent b'SSH"),
    (HEAD + CHUNK, "The server closed the connection before the response was complete."),
]


@pytest.mark.parametrize(("data", "message"), INVALID_RESPONSES)
class TestInvalidResponses:
    def test_chat_fails(self, set_stdin, capsys, data, message):
        set_stdin("hi\n")
        with raw_server(data) as url:
            assert main(["chat", f"--url={url}"]) == 1
        assert message in capsys.readouterr().err

    def test_bench_serve_counts_a_failed_request(self, capsys, data, message):
        with raw_server(data) as url:
            assert main(["bench-serve", f"--url={url}", "--num-prompts=1", "--request-rate=100"]) == 1
        output = capsys.readouterr()
        assert message in output.out
        assert "All requests failed; see the errors above." in output.err


def test_comments_and_event_names_are_ignored(set_stdin, capsys):
    """Proxies send comments to keep a connection open. The space after "data:" is optional."""
    stream = b": ping\n\n" + CHUNK + b"event: more\n" + CHUNK.replace(b"data: ", b"data:")
    set_stdin("hi\n")
    with raw_server(HEAD + stream + b"data: [DONE]\n\n") as url:
        assert main(["chat", f"--url={url}"]) == 0
    assert capsys.readouterr().out == "aa\n"
