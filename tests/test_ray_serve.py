"""`examples/ray_serve.py`: two replicas of a small model on a CPU behind Ray Serve."""

import concurrent.futures
import http.client
import json
import socket

import pytest

import jattn
from jattn.serving import Engine, SamplingParams
from tests.serving.tiny import BYTES, one_layer_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray raises warnings

LIMITS = {"num_blocks": 65, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPTS = [f"prompt {i}" for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    jattn.models.save(one_layer_model(), folder)
    (folder / "tokenizer.json").write_text(BYTES.to_str())
    return folder


@pytest.fixture(scope="module")
def port(folder):
    ray = pytest.importorskip("ray")  # imported here, so that runs without slow tests report no skip
    from examples.ray_serve import HTTPOptions, application, serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, configure_logging=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(application(str(folder), num_replicas=2, num_gpus=0, names=("tiny",), **LIMITS))
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_both_replicas_answer_like_the_engine(folder, port):
    expected = Engine(str(folder), **LIMITS).generate(PROMPTS, SamplingParams(max_tokens=8))
    body = lambda prompt: {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: post(port, body(prompt)), PROMPTS))
    texts = [json.loads(text)["choices"][0]["text"] for _, text in answers]
    assert texts == [result.text for result in expected]
    _, streamed = post(port, body(PROMPTS[0]) | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == expected[0].text
    status, text = post(port, {"prompt": "a", "temperature": -1})
    assert (status, json.loads(text)["error"]["param"]) == (400, "temperature")
    from examples.ray_serve import serve

    replicas = serve.status().applications["default"].deployments["Replica"].replica_states
    assert list(replicas.values()) == [2]
