"""Startup and shutdown of the server."""

import contextlib
import sys
import threading

import pytest

from tests.serving.server.live_server import delay_steps, parse_events, run_server, send_request

TEXT = "/v1/completions"


LONG = {"prompt": "abc", "max_tokens": 400, "temperature": 1.0, "seed": 1}


@contextlib.contextmanager
def with_precompile(engine, precompile):
    engine.precompile = precompile
    try:
        yield
    finally:
        del engine.precompile


class TestReadiness:
    def test_requests_are_rejected_until_the_model_is_compiled(self, engine):
        go = threading.Event()
        with (
            with_precompile(engine, lambda **options: go.wait(60)),
            run_server(engine, wait_until_ready=False) as server,
        ):
            server.wait_until(lambda: server.server.started)
            status, headers, response = server.request("GET", "/health")
            assert (status, headers["Retry-After"], response["error"]["code"]) == (503, "1", "not_ready")
            assert server.error(TEXT, prompt="a")[0] == 503
            assert server.request("GET", "/v1/models")[0] == 200
            go.set()
            server.wait_until(lambda: server.request("GET", "/health")[0] == 200)
            assert server.post(TEXT, prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2

    def test_compilation_error_stops_the_server(self, engine):
        def fail(**options):
            raise RuntimeError("ptxas fell over")

        with with_precompile(engine, fail), run_server(engine, wait_until_ready=False) as server:
            server.wait_until(lambda: server.server.should_exit)
        assert str(server.server.failure) == "ptxas fell over"


def test_switch_interval_is_short_while_a_server_runs(engine):
    previous = sys.getswitchinterval()
    with run_server(engine):
        assert sys.getswitchinterval() < 0.001
    assert sys.getswitchinterval() == previous


class TestShutdown:
    def test_running_requests_finish(self, engine):
        responses = []
        with run_server(engine) as server:
            post = lambda: responses.append(server.post(TEXT, **LONG))
            thread = threading.Thread(target=post)
            thread.start()
            server.wait_until(lambda: engine.stats.num_running == 1)
        thread.join(60)
        assert [response["usage"]["completion_tokens"] for response in responses] == [400]

    def test_drain_time_is_limited(self, engine):
        with run_server(engine, drain_seconds=0) as server:
            client = send_request(server, LONG | {"stream": True})
            server.wait_until(lambda: engine.stats.num_running == 1)
        client.close()
        assert engine.stats.num_used_blocks == 0

    @pytest.mark.parametrize("streams", [True, False])
    def test_unfinished_request_ends_with_a_shutdown_error(self, engine, caplog, streams):
        responses, previous = [], engine.stats.num_generated_tokens
        with delay_steps(engine, seconds=0.01), run_server(engine, drain_seconds=0) as server:
            post = lambda: responses.append(server.request("POST", TEXT, LONG | {"stream": streams}))
            thread = threading.Thread(target=post)
            thread.start()
            server.wait_until(lambda: engine.stats.num_generated_tokens > previous + 3)
        thread.join(60)
        ((status, _, response),) = responses
        assert status == (200 if streams else 503)
        *_, last = parse_events(response) if streams else [response]
        assert (last["error"]["type"], last["error"]["code"]) == ("service_unavailable_error", "stopped")
        assert "Traceback" not in caplog.text
        assert engine.stats.num_used_blocks == 0
