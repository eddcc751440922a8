"""HTTP in a process of its own: what it and the engine's tell each other, and one without the other."""

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

import pytest

from jattn.serving.server import HttpProcess, ServerOptions
from tests.serving.server.live_server import Running, running, slow_steps, small_engine

PROMPT = [5, 6, 7, 8]
pytestmark = pytest.mark.kernels  # each process takes some seconds to import jax

LONG = 200
TOLD = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serving(engine, **options):
    """Serves from another process while the block runs, which ends as it is told to; and the process."""
    turn = sys.getswitchinterval()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = HttpProcess(ServerOptions(port=0, **options), sock, log_level="warning")
        process.serve(engine)
        here = Running(engine, sock.getsockname()[1], None)
        here.until(lambda: here.ask("GET", "/health")[0] == 200, 60)
        try:
            yield here, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGTERM)
    process.wait()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == turn


@pytest.fixture(scope="module")
def served():
    with serving(small_engine()) as (here, _):
        yield here


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
def test_answers_are_those_of_a_server_within_the_engine_s_process(served, more):
    with running(small_engine()) as alone:
        one, other = (here.post("/v1/completions", **(TOLD | more)) for here in (alone, served))
    assert one["choices"] == other["choices"]
    assert one["usage"] == other["usage"]


def test_a_stream_brings_what_the_answer_would(served):
    whole = served.post("/v1/completions", **TOLD)["choices"][0]["text"]
    events = served.events("/v1/completions", **TOLD)
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole
    served.until(lambda: is_free(served.engine))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": [5, 999]}, "prompt"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
    ],
)
def test_what_the_engine_refuses_is_told_as_by_a_server_within_its_process(served, more, param):
    status, error = served.error("/v1/completions", **(TOLD | more))
    assert (status, error["param"]) == (400, param), error
    served.until(lambda: served.ask("GET", "/load")[2] == {"server_load": 0})


def test_errors_of_requests_are_told_in_openai_s_words(served):
    status, error = served.error("/v1/completions", **(TOLD | {"guided_regex": "(("}))
    assert status == 400, error
    status, error = served.error("/v1/completions", **(TOLD | {"prompt": list(range(5)) * 999}))
    assert status == 400, error
    assert served.post("/v1/completions", **TOLD)["usage"]["completion_tokens"] == 12


def test_metrics_are_the_engine_s(served):
    served.post("/v1/completions", **TOLD)
    _, _, page = served.ask("GET", "/metrics")
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert float(line.split()[-1]) == served.engine.stats.num_generated_tokens > 0


def test_prefixes_are_forgotten_when_that_is_asked_for(served):
    prompt = list(range(9, 41))
    for _ in range(2):
        served.post("/v1/completions", **(TOLD | {"prompt": prompt}))
    hits = served.engine.stats.num_prefix_hit_tokens
    assert served.ask("POST", "/reset_prefix_cache")[0] == 200
    served.post("/v1/completions", **(TOLD | {"prompt": prompt}))
    assert served.engine.stats.num_prefix_hit_tokens == hits > 0


def test_collections_leave_out_what_was_there_before_the_first_request(served):
    assert all(one is not served.engine for one in gc.get_objects())


def test_what_comes_soon_has_its_turn_beside_the_engine_s_thread(served):
    assert sys.getswitchinterval() < 0.001


def test_who_hangs_up_frees_its_blocks(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = TOLD | {"max_tokens": LONG, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().read(10)
    assert not is_free(served.engine)
    connection.close()
    served.until(lambda: is_free(served.engine))


def test_a_step_that_fails_ends_its_requests_and_no_more(served, monkeypatch):
    step = served.engine.step

    def fails():
        monkeypatch.setattr(served.engine, "step", step)
        for request in list(served.engine.scheduler.running):
            served.engine.abort(request.request_id)
        raise OSError("no such device")

    monkeypatch.setattr(served.engine, "step", fails)
    status, error = served.error("/v1/completions", **TOLD)
    assert status == 500, error
    assert served.post("/v1/completions", **TOLD)["usage"]["completion_tokens"] == 12


def test_what_compiling_fails_with_is_raised_where_the_engine_is(monkeypatch):
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
def test_what_tells_all_processes_to_stop_has_told_each_once(is_forced):
    """As systemd does: the one of HTTP hears of it twice, from there and from the engine's."""
    engine, answers = small_engine(), []
    with serving(engine) as (here, process):
        ask = lambda: answers.append(here.ask("POST", "/v1/completions", TOLD | {"max_tokens": LONG}))
        asking = threading.Thread(target=ask)
        with slow_steps(engine, seconds=0.01):
            asking.start()
            here.until(lambda: engine.stats.num_running)
            process.signal(signal.SIGTERM)
            time.sleep(0.2)
            os.kill(process.pid, signal.SIGTERM)
            if is_forced:
                process.signal(signal.SIGTERM)
            asking.join()
    assert [status for status, *_ in answers] == [503 if is_forced else 200]


def test_a_process_of_http_that_dies_ends_the_server_with_an_error_and_frees_all_blocks():
    engine = small_engine()
    with contextlib.ExitStack() as stack:
        here, process = stack.enter_context(serving(engine))
        asking = threading.Thread(target=asked_in_vain, args=(here,))
        asking.start()
        here.until(lambda: engine.stats.num_running)
        os.kill(process.pid, signal.SIGKILL)
        asking.join()
        with pytest.raises(ChildProcessError, match="speaks HTTP ended with SIGKILL"):
            stack.close()
    assert is_free(engine)


def test_it_ends_where_no_engine_comes():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        with pytest.raises(MemoryError), HttpProcess(ServerOptions(port=0), sock) as process:
            raise MemoryError("the weights")
        assert process.has_ended


def asked_in_vain(here):
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        here.post("/v1/completions", **(TOLD | {"max_tokens": LONG}))
