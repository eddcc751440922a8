"""Completions and chats as the OpenAI API has them, and equal to what the engine says."""

import contextlib
import http.client
import json
import logging
import socket

import pytest
import tokenizers

from jattn.serving.server.logprobs import TokenTexts
from tests.serving.server.live_server import parsed, running, small_engine
from tests.serving.tiny import BYTES, byte_tokenizer, llama_tokenizer, one_layer_model

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with running(engine, served_model_names=("tiny", "alias"), chat_template=file) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.until(lambda: server.is_idle)


class TestCompletions:
    def test_an_answer_has_all_that_openai_s_has(self, server):
        answer = server.post("/v1/completions", model="tiny", prompt="abc", max_tokens=5, temperature=0)
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["id"].startswith("cmpl-")
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert (choice["index"], choice["logprobs"]) == (0, None)

    def test_a_stream_brings_the_same_text(self, server):
        asked = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
        want = server.post("/v1/completions", **asked)["choices"][0]["text"]
        for _ in range(9):  # who is late gets all in one: not each time
            events = server.events("/v1/completions", **asked)
            assert "".join(event["choices"][0]["text"] for event in events) == want
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert len({(event["id"], event["created"]) for event in events}) == 1
            if len(events) > 1:
                break
        assert len(events) > 1
        assert all("usage" not in event for event in events)

    def test_the_best_of_several_are_those_whose_tokens_are_likeliest(self, server):
        asked = {"prompt": ["abc", "d"], "max_tokens": 6, "seed": 4, "temperature": 1.2}
        every = server.post("/v1/completions", **asked, n=5, logprobs=1)["choices"]
        mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / 6
        best = lambda some: [one["text"] for one in sorted(some, key=mean, reverse=True)[:2]]
        answer = server.post("/v1/completions", **asked, n=2, best_of=5)
        assert [one["text"] for one in answer["choices"]] == [*best(every[:5]), *best(every[5:])]
        assert [(one["index"], one["logprobs"]) for one in answer["choices"]] == [(i, None) for i in range(4)]
        assert answer["usage"]["completion_tokens"] == 60
        status, error = server.error("/v1/completions", **asked, best_of=2, stream=True)
        assert (status, error["param"]) == (400, "best_of")
        assert "best_of must be n in a stream, got 2" in error["message"]

    def test_several_prompts_and_completions_are_numbered(self, server):
        asked = {"prompt": ["abc", "d", "ef"], "n": 2, "max_tokens": 4, "seed": 1, "temperature": 1.0}
        whole = server.post("/v1/completions", **asked)
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert whole["usage"]["completion_tokens"] == 24
        alone = server.post("/v1/completions", **asked | {"prompt": "d"})["choices"]
        assert [choice["text"] for choice in whole["choices"][2:4]] == [one["text"] for one in alone]
        texts = [""] * 6
        for event in server.events("/v1/completions", **asked):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]

    def test_usage_comes_last_where_it_is_asked_for(self, server):
        asked = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
        *events, last = server.events("/v1/completions", **asked)
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}

    def test_usage_of_every_chunk(self, server):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = server.events("/v1/completions", prompt="abc", max_tokens=3, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3

    @pytest.mark.parametrize("streams", [False, True])
    def test_echo_and_logprobs_tell_of_the_prompt_too(self, server, streams):
        asked = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 2}
        if streams:
            choices = [event["choices"][0] for event in server.events("/v1/completions", **asked)]
        else:
            choices = server.post("/v1/completions", **asked)["choices"]
        joined = lambda name: [x for choice in choices for x in choice["logprobs"][name]]
        assert "".join(choice["text"] for choice in choices).startswith("abc")
        assert joined("tokens")[:3] == ["a", "b", "c"]
        assert joined("text_offset")[:4] == [0, 1, 2, 3]
        assert joined("token_logprobs")[0] is None
        assert joined("top_logprobs")[0] is None
        assert all(value < 0 for value in joined("token_logprobs")[1:])
        assert len(joined("tokens")) == len(joined("token_logprobs")) == 5

    @pytest.mark.parametrize("more", [{}, {"best_of": 5}, {"max_tokens": 0}])
    def test_echo_and_logprobs_of_several_completions(self, server, more):
        asked = {"prompt": ["abc", "de"], "max_tokens": 2, "n": 2, "seed": 1}
        asked |= {"echo": True, "logprobs": 1} | more
        choices = server.post("/v1/completions", **asked)["choices"]
        assert len(choices) == 4
        for index, choice in enumerate(choices):
            prompt = asked["prompt"][index // 2]
            told = choice["logprobs"]
            assert told["tokens"][: len(prompt)] == [*prompt]
            assert told["token_logprobs"][0] is None
            assert all(value < 0 for value in told["token_logprobs"][1:])
            assert {len(values) for values in told.values()} == {len(prompt) + asked["max_tokens"]}
        if "best_of" not in more:
            streamed = [event["choices"][0] for event in server.events("/v1/completions", **asked)]
            firsts = [one for one in streamed if one["logprobs"]["token_logprobs"][0] is None]
            assert sorted(one["index"] for one in firsts) == [0, 1, 2, 3]
        told = server.post("/v1/completions", **asked, prompt_logprobs=0)["choices"]
        lengths = [len(one["prompt_logprobs"]) for one in told]
        assert lengths == [3, 3, 2, 2]

    def test_offsets_count_characters_not_bytes(self, server):
        asked = {"prompt": "é€a", "max_tokens": 3, "echo": True, "logprobs": 0, "temperature": 0}
        asked |= {"allowed_token_ids": BYTES.encode("b").ids}
        (choice,) = server.post("/v1/completions", **asked)["choices"]
        assert choice["text"] == "é€abbb"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 4, 5]
        streamed = [event["choices"][0]["logprobs"] for event in server.events("/v1/completions", **asked)]
        assert [i for one in streamed for i in one["text_offset"]] == choice["logprobs"]["text_offset"]

    def test_a_prompt_alone_ends_by_its_length_whatever_its_one_token_is(self, server):
        asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "stop_token_ids": [5]}
        (choice,) = server.post("/v1/completions", **asked, allowed_token_ids=[5])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", None)

    def test_a_prompt_alone_can_be_scored(self, server):
        asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
        (choice,) = server.post("/v1/completions", **asked)["choices"]
        assert choice["text"] == "abc"
        assert len(choice["logprobs"]["token_logprobs"]) == 3
        assert choice["logprobs"]["top_logprobs"] is None
        answer = server.post("/v1/completions", **asked, return_token_ids=True)
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
        assert answer["choices"][0]["token_ids"] == []
        usage = {"include_usage": True}
        assert server.events("/v1/completions", **asked, stream_options=usage)[-1]["usage"] == answer["usage"]

    def test_stops_and_biases_are_the_engine_s(self, server):
        asked = {"prompt": "a", "max_tokens": 4, "temperature": 0, "logit_bias": {"65": 100}}
        text = server.post("/v1/completions", **asked)["choices"][0]["text"]
        assert (len(text), len(set(text))) == (4, 1)
        (choice,) = server.post("/v1/completions", **asked, stop=[text[:3]])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", text[:3])
        (choice,) = server.post("/v1/completions", **asked, stop_token_ids=[65])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 65)

    def test_the_server_says_what_the_engine_says(self, server, engine):
        prompts = ["one", "two words", "three more words"]
        want = engine.generate(prompts, max_tokens=10)  # its thread waits for work
        for prompt, result in zip(prompts, want, strict=True):
            answer = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=10)
            assert answer["choices"][0]["text"] == result.text


class TestChat:
    def test_an_answer_has_all_that_openai_s_has(self, server):
        messages = [{"role": "user", "content": "hi"}]
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        text = "<|user|>hi\n<|assistant|>"
        assert answer["usage"]["prompt_tokens"] == len(text)
        plain = server.post("/v1/completions", prompt=text, max_tokens=5, temperature=0)
        assert choice["message"]["content"] == plain["choices"][0]["text"]

    def test_a_stream_begins_with_the_role_and_brings_the_same_text(self, server):
        asked = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_completion_tokens": 9}
        want = server.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
        first, *events = server.events("/v1/chat/completions", **asked)
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == want
        assert events[-1]["choices"][0]["finish_reason"] == "length"

    def test_parts_of_text_are_joined(self, server):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        tokens = server.post("/tokenize", messages=[{"role": "user", "content": parts}])["tokens"]
        assert server.post("/detokenize", tokens=tokens)["prompt"] == "<|user|>a\nb\n<|assistant|>"

    def test_logprobs_tell_tokens_bytes_and_others(self, server):
        asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
        answer = server.post("/v1/chat/completions", **asked, max_tokens=4, temperature=0)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        for place in content:
            assert len(place["top_logprobs"]) == 3
            best = place["top_logprobs"][0]
            assert (place["token"], place["bytes"]) == (best["token"], best["bytes"])
            assert place["logprob"] == pytest.approx(best["logprob"])
        streamed = server.events("/v1/chat/completions", **asked, max_tokens=4, temperature=0)
        told = [x for e in streamed for x in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [place["bytes"] for place in told] == [place["bytes"] for place in content]

    def test_without_max_tokens_it_goes_on_to_the_context_s_end(self, server):
        messages = [{"role": "user", "content": "x" * 440}]
        answer = server.post("/v1/chat/completions", messages=messages)
        assert answer["usage"]["total_tokens"] == 512


def test_tokens_are_called_by_their_ids_without_another_look_at_the_vocabulary(server, monkeypatch):
    monkeypatch.setattr(TokenTexts, "__init__", lambda *_: pytest.fail("looked at again"))
    asked = {"prompt": "abc", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = server.post("/v1/completions", **asked)["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")
    (choice,) = server.post("/v1/completions", **asked | {"return_tokens_as_token_ids": False})["choices"]
    assert not choice["logprobs"]["tokens"][0].startswith("token_id:")


def test_a_text_goes_on_with_the_space_that_it_begins_with():
    model = one_layer_model()
    model.tokenizer = tokenizer = llama_tokenizer()
    hello, world = (tokenizer.token_to_id(f"\u2581{word}") for word in ("Hello", "world"))
    asked = {"prompt": [1, hello], "max_tokens": 2, "allowed_token_ids": [world]}
    with running(small_engine(model)) as server:
        (choice,) = server.post("/v1/completions", **asked, echo=True, logprobs=0)["choices"]
        assert choice["text"] == "<s> Hello world world"
        assert choice["logprobs"]["text_offset"] == [0, 3, 9, 15]
        (choice,) = server.post("/v1/completions", **asked, stop=" world")["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("", " world")
        streamed = [event["choices"][0]["text"] for event in server.events("/v1/completions", **asked)]
        assert "".join(streamed) == " world world"


def test_a_bos_that_was_added_has_no_place_in_the_prompt_s_text():
    tokenizer = llama_tokenizer()
    hello, world = (tokenizer.token_to_id(f"\u2581{word}") for word in ("Hello", "world"))
    offsets = TokenTexts(tokenizer).offsets([1, hello], skip_special_tokens=True)
    assert offsets.of([1, hello, world], "Hello") == [0, 0, 5]
    assert offsets.of([2, world]) == [11, 11]


@pytest.mark.parametrize("prompt", ["", [""]])
def test_a_text_goes_on_from_nothing_but_the_bos_of_its_tokenizer(engine, prompt):
    tokenizer = byte_tokenizer()
    bos = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 64)])
    tokenizer.post_processor = bos
    with running(engine) as server:
        server.server.service.tokenizer = tokenizer
        told = server.post("/v1/completions", prompt=prompt, max_tokens=2, echo=True, return_token_ids=True)
    assert told["choices"][0]["prompt_token_ids"] == [64]
    assert told["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Of 128 tokens in the cache, which are fewer than the model's context."""
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with running(small_engine(num_blocks=17), chat_template=file) as server:
        yield server


class TestSmallCaches:
    def test_chats_go_on_to_the_cache_s_end(self, small):
        messages = [{"role": "user", "content": "x" * 80}]
        answer = small.post("/v1/chat/completions", messages=messages)
        assert answer["usage"]["total_tokens"] == 128
        status, error = small.error("/v1/chat/completions", messages=messages, min_tokens=60)
        assert (status, error["param"]) == (400, "min_tokens")

    @pytest.mark.parametrize("more", [{}, {"max_tokens": 3}])
    def test_a_prompt_is_cut_to_what_leaves_a_place_for_new_tokens(self, small, more):
        asked = {"truncate_prompt_tokens": -1} | more
        messages = [{"role": "user", "content": "x" * 600}]
        for path, start in (("", {"prompt": "x" * 600}), ("chat/", {"messages": messages})):
            usage = small.post(f"/v1/{path}completions", **start, **asked)["usage"]
            assert usage["total_tokens"] == 128


class TestOthers:
    def test_models(self, server):
        status, _, answer = server.ask("GET", "/v1/models")
        assert (status, answer["object"]) == (200, "list")
        assert [one["id"] for one in answer["data"]] == ["tiny", "alias"]
        assert server.ask("GET", "/v1/models/alias")[2]["max_model_len"] == 512
        assert server.ask("GET", "/v1/models/other")[0] == 404
        assert server.post("/v1/completions", model="alias", prompt="a", max_tokens=1)["model"] == "tiny"

    def test_health_and_version(self, server):
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/version")[2] == {"version": "0.1.0"}

    def test_tokens_of_a_text_and_back(self, server):
        answer = server.post("/tokenize", prompt="añ", return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 3
        assert answer["max_model_len"] == 512
        assert server.post("/detokenize", tokens=answer["tokens"]) == {"prompt": "añ"}

    def test_probes_and_scrapes_write_no_lines(self, server):
        log, handler, lines = logging.getLogger("uvicorn.access"), logging.Handler(), []
        handler.emit = lambda record: lines.append(record.getMessage())
        level = log.level
        log.setLevel("INFO")
        log.addHandler(handler)
        for path in ("/health", "/ping?x=1", "/v1/models", "/metrics"):
            server.ask("GET", path)
        log.removeHandler(handler)
        log.setLevel(level)
        (line,) = lines
        assert line.endswith('"GET /v1/models HTTP/1.1" 200')

    def test_metrics_are_vllm_s(self, server):
        before = samples(server)
        server.post("/v1/completions", prompt="abcd", max_tokens=3)
        after = samples(server)
        grown = lambda name: after[f"vllm:{name}"] - before[f"vllm:{name}"]
        assert (grown("prompt_tokens_total"), grown("generation_tokens_total")) == (4, 3)
        assert grown("time_to_first_token_seconds_count") == 1
        assert grown("inter_token_latency_seconds_count") == 2
        assert grown("request_queue_time_seconds_count") == grown("request_prefill_time_seconds_count") == 1
        assert grown("iteration_tokens_total_count") > 0
        assert grown("e2e_request_latency_seconds_count") == 1
        assert grown("request_generation_tokens_sum") == 3
        assert (grown("request_params_max_tokens_sum"), grown("request_params_n_sum")) == (3, 1)
        assert grown("request_decode_time_seconds_count") == 1
        assert 0 < grown("request_decode_time_seconds_sum") < grown("e2e_request_latency_seconds_sum")
        assert grown('request_success_total{finished_reason="length"}') == 1
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

    def test_prompts_of_clients_that_leave_are_counted_with_what_was_generated(self, server):
        before = samples(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "abcd", "max_tokens": 400, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().read(10)
        connection.close()
        server.until(lambda: server.is_idle)
        after = samples(server)
        grown = lambda name: after[f"vllm:{name}"] - before[f"vllm:{name}"]
        assert grown("prompt_tokens_total") == 4
        assert 0 < grown("generation_tokens_total") < 400

    def test_metrics_tell_the_cache_s_sizes(self, server):
        (line,) = [
            line for line in server.ask("GET", "/metrics")[2].splitlines() if "cache_config_info{" in line
        ]
        assert line.startswith("vllm:cache_config_info{")
        assert ('block_size="8"' in line, 'num_gpu_blocks="128"' in line, line[-4:]) == (True, True, " 1.0")


def samples(server):
    """Values by name, and by the reason where there is one."""
    status, headers, page = server.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            labels, value = line.rsplit(" ", 1)
            name, _, rest = labels.partition("{")
            if "cache_config_info" in name:
                continue
            assert 'model_name="tiny"' in rest or name.startswith("process_")
            reason = rest.partition('finished_reason="')[2].partition('"')[0]
            found[f'{name}{{finished_reason="{reason}"}}' if reason else name] = float(value)
    return found


def test_a_stream_is_in_chunks_and_its_connection_serves_again(server):
    asked = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
    want = server.post("/v1/completions", **asked)["choices"][0]["text"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps(asked | {"stream": True}))
            answer = connection.getresponse()
            assert answer.headers["Transfer-Encoding"] == "chunked"
            events = parsed(answer.read().decode())
            assert "".join(event["choices"][0]["text"] for event in events) == want


def test_a_stream_of_http_1_0_ends_with_its_connection(server):
    asked = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
    want = server.post("/v1/completions", **asked)["choices"][0]["text"]
    body = json.dumps(asked | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, text = b"".join(iter(lambda: client.recv(4096), b"")).decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head.lower()
    assert "".join(event["choices"][0]["text"] for event in parsed(text)) == want


def test_json_of_a_stream_is_one_line_an_event(server):
    raw = server.post("/v1/completions", prompt="abc", max_tokens=20, temperature=1.0, seed=2, stream=True)
    assert all(json.loads(line[6:]) for line in raw.split("\n\n")[:-2])
