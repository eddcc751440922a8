"""A server of a small model on 127.0.0.1, in a thread, and a client of it."""

import contextlib
import http.client
import json
import socket
import threading
import time

from jattn.batch.bucket import Bucket
from jattn.serving import AsyncEngine, Engine
from jattn.serving.server import Server, ServerOptions
from tests.serving.tiny import one_layer_model

MAX_NUM_SEQS = 4


def small_engine(model=None, max_num_seqs=MAX_NUM_SEQS, num_blocks=129):
    """Return an engine with one executable, which compiles in a second or two."""
    bucket = Bucket(
        max_decodes=max_num_seqs, max_prefills=max_num_seqs, max_prefill_tokens=64, max_blocks=num_blocks - 1
    )
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64, "buckets": [bucket]}
    return Engine(model or one_layer_model(), num_blocks=num_blocks, block_size=8, **sizes)


class RunningServer:
    """A running server and a client of it."""

    def __init__(self, engine, port, server):
        self.engine, self.port, self.server = engine, port, server
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method, path, body=None, headers=None):
        """Return the status, headers and body of the response; a JSON body is parsed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps(body) if isinstance(body, dict | list) else body
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            raw = response.read()
            is_json = response.headers.get("content-type", "").startswith("application/json")
            return response.status, response.headers, json.loads(raw) if is_json else raw.decode()
        finally:
            connection.close()

    def post(self, path, /, **body):
        """Return the body of the response, whose status must be 200."""
        status, _, response = self.request("POST", path, body)
        assert status == 200, response
        return response

    def error(self, path, /, **body):
        """Return the status and the error object of the response."""
        status, _, response = self.request("POST", path, body)
        return status, response["error"]

    def events(self, path, /, **body):
        """Return the chunks of a streaming response."""
        return list(parse_events(self.post(path, stream=True, **body)))

    def wait_until(self, condition, seconds=20.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    @property
    def is_idle(self):
        stats = self.engine.stats
        is_free = (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        return is_free and self.server.service.num_open == 0


def parse_events(text):
    """Yield the events of a stream, which must end with [DONE]."""
    *lines, done, remainder = text.split("\n\n")
    assert (done, remainder) == ("data: [DONE]", "")
    for line in lines:
        assert line.startswith("data: ")
        yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def run_server(engine, *, wait_until_ready=True, **options):
    """Serve an engine within a block; the server must end in time."""
    server = Server(AsyncEngine(engine), ServerOptions(port=0, **options), log_level="warning")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        running = RunningServer(engine, sock.getsockname()[1], server)
        try:
            if wait_until_ready:
                running.wait_until(lambda: server.started and server.service.is_ready, 60)
            yield running
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def delay_steps(engine, seconds):
    """Delay each step, as if the model were large."""
    step = engine.step

    def delayed_step():
        time.sleep(seconds)
        return step()

    engine.step = delayed_step
    try:
        yield
    finally:
        del engine.step


def send_request(server, body, after_bytes=1):
    """Send a completion request, read some bytes of the response and return the open socket."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    if after_bytes:
        client.recv(after_bytes)
    return client
