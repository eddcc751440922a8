"""Metrics in Prometheus format."""

import http.client
import json

import pytest

from tests.serving.server.live_server import run_server

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with run_server(engine, served_model_names=("tiny", "alias"), chat_template=file) as server:
        yield server


def read_metrics(server):
    """Return the values of the metrics by name, and by finish reason if there is one."""
    status, headers, page = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    values = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            labels, value = line.rsplit(" ", 1)
            name, _, labels_text = labels.partition("{")
            if "cache_config_info" in name:
                continue
            assert 'model_name="tiny"' in labels_text or name.startswith("process_")
            reason = labels_text.partition('finished_reason="')[2].partition('"')[0]
            values[f'{name}{{finished_reason="{reason}"}}' if reason else name] = float(value)
    return values


class TestMetrics:
    def test_metrics_have_vllms_names(self, server):
        before = read_metrics(server)
        server.post("/v1/completions", prompt="abcd", max_tokens=3)
        after = read_metrics(server)
        increase = lambda name: after[f"vllm:{name}"] - before[f"vllm:{name}"]
        assert (increase("prompt_tokens_total"), increase("generation_tokens_total")) == (4, 3)
        assert increase("time_to_first_token_seconds_count") == 1
        assert increase("inter_token_latency_seconds_count") == 2
        assert (
            increase("request_queue_time_seconds_count")
            == increase("request_prefill_time_seconds_count")
            == 1
        )
        assert increase("iteration_tokens_total_count") > 0
        assert increase("e2e_request_latency_seconds_count") == 1
        assert increase("request_generation_tokens_sum") == 3
        assert (increase("request_params_max_tokens_sum"), increase("request_params_n_sum")) == (3, 1)
        assert increase("request_decode_time_seconds_count") == 1
        assert 0 < increase("request_decode_time_seconds_sum") < increase("e2e_request_latency_seconds_sum")
        assert increase('request_success_total{finished_reason="length"}') == 1
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert after[f"vllm:{name}"] == 0
        drafts = (f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
        for name in (
            *drafts,
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
        ):
            assert f"vllm:{name}" in after
        for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"):
            assert after[f"vllm:spec_decode_{name}"] == 0
        for name in ("failed_steps_total",):
            assert f"vllm:{name}" in after
        assert after["process_resident_memory_bytes"] > 2**20

    def test_metrics_count_requests_of_disconnected_clients(self, server):
        before = read_metrics(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "abcd", "max_tokens": 400, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().read(10)
        connection.close()
        server.wait_until(lambda: server.is_idle)
        after = read_metrics(server)
        increase = lambda name: after[f"vllm:{name}"] - before[f"vllm:{name}"]
        assert increase("prompt_tokens_total") == 4
        assert 0 < increase("generation_tokens_total") < 400

    def test_metrics_report_the_cache_config(self, server):
        (line,) = [
            line for line in server.request("GET", "/metrics")[2].splitlines() if "cache_config_info{" in line
        ]
        assert line.startswith("vllm:cache_config_info{")
        assert ('block_size="8"' in line, 'num_gpu_blocks="128"' in line, line[-4:]) == (True, True, " 1.0")
