"""The HTTP process: requests, errors and shutdown across the two processes."""

import contextlib
import gc
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from unittest import mock

import pytest

from jattn.serving.server import HttpProcess, ServerOptions
from tests.serving.server.live_server import RunningServer, delay_steps, run_server, small_engine

PROMPT = [5, 6, 7, 8]
pytestmark = pytest.mark.kernels  # Each process takes some seconds to import JAX.

LONG = 200
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serving(engine, **options):
    """Serve an engine from a child process within a block; yield the server and the process."""
    switch_interval = sys.getswitchinterval()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = HttpProcess(ServerOptions(port=0, **options), sock, log_level="warning")
        process.serve(engine)
        server = RunningServer(engine, sock.getsockname()[1], None)
        server.wait_until(lambda: server.request("GET", "/health")[0] == 200, 60)
        try:
            yield server, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
    process.wait()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == switch_interval


@pytest.fixture(scope="module")
def served():
    with serving(small_engine()) as (server, _):
        yield server


@pytest.mark.parametrize("error", [None, ValueError("no memory")])
def test_end_of_the_background_compilation_is_printed(error, monkeypatch, capsys):
    engine = small_engine()
    if error is not None:
        monkeypatch.setattr(engine.graphs, "wait", mock.Mock(side_effect=error))
    printed = []

    def has_printed():
        printed.append(capsys.readouterr().err)
        return "jattn: " in "".join(printed)

    with serving(engine) as (server, _):
        server.wait_until(has_printed, 60)
    expected = "are compiled, and run" if error is None else "could not be compiled in the background"
    assert expected in "".join(printed)


def is_free(engine):
    stats = engine.stats
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 2, "echo": True},
        {"n": 2, "temperature": 0.7, "seed": 3},
        {"guided_regex": "[ab]{3}", "ignore_eos": False},
        {"stop": "a", "presence_penalty": 0.5},
    ],
)
def test_responses_equal_those_of_a_server_in_the_engines_process(served, more):
    with run_server(small_engine()) as local_server:
        response, expected = (
            server.post("/v1/completions", **(BODY | more)) for server in (local_server, served)
        )
    assert response["choices"] == expected["choices"]
    assert response["usage"] == expected["usage"]


def test_stream_has_the_text_of_the_complete_response(served):
    text = served.post("/v1/completions", **BODY)["choices"][0]["text"]
    events = served.events("/v1/completions", **BODY)
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text
    served.wait_until(lambda: is_free(served.engine))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": [5, 999]}, "prompt"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
    ],
)
def test_engine_error_names_the_request_parameter(served, more, param):
    status, error = served.error("/v1/completions", **(BODY | more))
    assert (status, error["param"]) == (400, param), error
    served.wait_until(lambda: served.request("GET", "/load")[2] == {"server_load": 0})


def test_invalid_request_is_an_error_400(served):
    status, error = served.error("/v1/completions", **(BODY | {"guided_regex": "(("}))
    assert status == 400, error
    status, error = served.error("/v1/completions", **(BODY | {"prompt": list(range(5)) * 999}))
    assert status == 400, error
    assert served.post("/v1/completions", **BODY)["usage"]["completion_tokens"] == 12


def test_metrics_report_the_engines_statistics(served):
    served.post("/v1/completions", **BODY)
    _, _, page = served.request("GET", "/metrics")
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert float(line.split()[-1]) == served.engine.stats.num_generated_tokens > 0


def test_reset_prefix_cache_empties_the_engines_cache(served):
    prompt = list(range(9, 41))
    for _ in range(2):
        served.post("/v1/completions", **(BODY | {"prompt": prompt}))
    hits = served.engine.stats.num_prefix_hit_tokens
    assert served.request("POST", "/reset_prefix_cache")[0] == 200
    served.post("/v1/completions", **(BODY | {"prompt": prompt}))
    assert served.engine.stats.num_prefix_hit_tokens == hits > 0


def test_gc_heap_is_frozen_before_the_first_request(served):
    assert all(obj is not served.engine for obj in gc.get_objects())


def test_switch_interval_is_short_in_the_engines_process(served):
    assert sys.getswitchinterval() < 0.001


def test_disconnect_frees_the_blocks(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = BODY | {"max_tokens": LONG, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().read(10)
    assert not is_free(served.engine)
    connection.close()
    served.wait_until(lambda: is_free(served.engine))


def test_failed_step_ends_only_its_requests(served, monkeypatch):
    step = served.engine.step

    def fails():
        monkeypatch.setattr(served.engine, "step", step)
        for request in list(served.engine.scheduler.running):
            served.engine.abort(request.request_id)
        raise OSError("no such device")

    monkeypatch.setattr(served.engine, "step", fails)
    status, error = served.error("/v1/completions", **BODY)
    assert status == 500, error
    assert served.post("/v1/completions", **BODY)["usage"]["completion_tokens"] == 12


def test_compilation_error_is_raised_in_the_engines_process(monkeypatch):
    engine = small_engine()

    def fails(**_):
        raise MemoryError("no room for 3 GiB")

    monkeypatch.setattr(engine, "precompile", fails)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = HttpProcess(ServerOptions(port=0), sock, log_level="critical")
        process.serve(engine)
        with pytest.raises(MemoryError, match="no room for 3 GiB"):
            process.wait()


@pytest.mark.parametrize("is_forced", [False, True])
def test_signal_to_all_processes_counts_once(is_forced):
    """systemd signals all processes, and the engine's process forwards its signal to the HTTP process."""
    engine, responses = small_engine(), []
    with serving(engine) as (server, process):
        ask = lambda: responses.append(server.request("POST", "/v1/completions", BODY | {"max_tokens": LONG}))
        client_thread = threading.Thread(target=ask)
        with delay_steps(engine, seconds=0.01):
            client_thread.start()
            server.wait_until(lambda: engine.stats.num_running)
            process.signal(signal.SIGTERM)
            time.sleep(0.2)
            os.kill(process.pid, signal.SIGTERM)
            if is_forced:
                process.signal(signal.SIGTERM)
            client_thread.join()
    assert [status for status, *_ in responses] == [503 if is_forced else 200]


def test_killed_http_process_ends_the_server_with_an_error_and_frees_all_blocks():
    engine = small_engine()
    with contextlib.ExitStack() as stack:
        server, process = stack.enter_context(serving(engine))
        client_thread = threading.Thread(target=request_that_fails, args=(server,))
        client_thread.start()
        server.wait_until(lambda: engine.stats.num_running)
        os.kill(process.pid, signal.SIGKILL)
        client_thread.join()
        with pytest.raises(ChildProcessError, match="HTTP process ended with SIGKILL"):
            stack.close()
    assert is_free(engine)


def test_http_process_ends_if_the_engine_cannot_be_created():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        with pytest.raises(MemoryError), HttpProcess(ServerOptions(port=0), sock) as process:
            raise MemoryError("the weights")
        assert process.has_ended


def request_that_fails(server):
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        server.post("/v1/completions", **(BODY | {"max_tokens": LONG}))
