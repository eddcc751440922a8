"""A server of a small model on 127.0.0.1, and a client that shows what it got."""

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
    """One executable, so that it is ready in a second or two."""
    bucket = Bucket(
        max_decodes=max_num_seqs, max_prefills=max_num_seqs, max_prefill_tokens=64, max_blocks=num_blocks - 1
    )
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64, "buckets": [bucket]}
    return Engine(model or one_layer_model(), num_blocks=num_blocks, block_size=8, **sizes)


class Running:
    """A server in a thread, as clients see it."""

    def __init__(self, engine, port, server):
        self.engine, self.port, self.server = engine, port, server
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method, path, body=None, headers=None):
        """(status, headers, body): the body as JSON where it is some."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps(body) if isinstance(body, dict | list) else body
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            raw = answer.read()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, answer.headers, json.loads(raw) if is_json else raw.decode()
        finally:
            connection.close()

    def post(self, path, /, **body):
        """The answer's body; it must be a good one."""
        status, _, answer = self.ask("POST", path, body)
        assert status == 200, answer
        return answer

    def error(self, path, /, **body):
        """(status, error)."""
        status, _, answer = self.ask("POST", path, body)
        return status, answer["error"]

    def events(self, path, /, **body):
        """The chunks of a stream."""
        return list(parsed(self.post(path, stream=True, **body)))

    def until(self, condition, seconds=20.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    @property
    def is_idle(self):
        stats = self.engine.stats
        is_free = (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        return is_free and self.server.service.num_open == 0


def parsed(text):
    """The events of a stream, which ends with [DONE]."""
    *lines, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for line in lines:
        assert line.startswith("data: ")
        yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def running(engine, *, waits=True, **options):
    """Serves while the block runs; it must end in time, and with nothing left."""
    server = Server(AsyncEngine(engine), ServerOptions(port=0, **options), log_level="warning")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        here = Running(engine, sock.getsockname()[1], server)
        try:
            if waits:
                here.until(lambda: server.started and server.service.is_ready, 60)
            yield here
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def slow_steps(engine, seconds):
    """Steps that take as long as a large model's."""
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        del engine.step
