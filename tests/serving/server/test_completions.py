"""Text completions."""

import pytest
import tokenizers

from tests.serving.server.live_server import run_server, small_engine
from tests.serving.tiny import BYTES, byte_tokenizer, llama_tokenizer, one_layer_model

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(CHATML)
    with run_server(engine, served_model_names=("tiny", "alias"), chat_template=file) as server:
        yield server


@pytest.fixture(autouse=True)
def check_idle(server):
    yield
    server.wait_until(lambda: server.is_idle)


class TestCompletions:
    def test_response_has_openais_fields(self, server):
        response = server.post("/v1/completions", model="tiny", prompt="abc", max_tokens=5, temperature=0)
        assert response["object"] == "text_completion"
        assert response["model"] == "tiny"
        assert response["id"].startswith("cmpl-")
        assert response["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            **NOT_CACHED,
        }
        (choice,) = response["choices"]
        assert choice["finish_reason"] == "length"
        assert (choice["index"], choice["logprobs"]) == (0, None)

    def test_stream_has_the_same_text(self, server):
        request_body = {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 6}
        expected = server.post("/v1/completions", **request_body)["choices"][0]["text"]
        for _ in range(9):  # A late reader gets everything in one event, which does not happen every time.
            events = server.events("/v1/completions", **request_body)
            assert "".join(event["choices"][0]["text"] for event in events) == expected
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert len({(event["id"], event["created"]) for event in events}) == 1
            if len(events) > 1:
                break
        assert len(events) > 1
        assert all("usage" not in event for event in events)

    def test_best_of_returns_the_most_likely_completions(self, server):
        request_body = {"prompt": ["abc", "d"], "max_tokens": 6, "seed": 4, "temperature": 1.2}
        candidates = server.post("/v1/completions", **request_body, n=5, logprobs=1)["choices"]
        mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / 6
        best = lambda choices: [choice["text"] for choice in sorted(choices, key=mean, reverse=True)[:2]]
        response = server.post("/v1/completions", **request_body, n=2, best_of=5)
        assert [choice["text"] for choice in response["choices"]] == [
            *best(candidates[:5]),
            *best(candidates[5:]),
        ]
        assert [(choice["index"], choice["logprobs"]) for choice in response["choices"]] == [
            (i, None) for i in range(4)
        ]
        assert response["usage"]["completion_tokens"] == 60
        status, error = server.error("/v1/completions", **request_body, best_of=2, stream=True)
        assert (status, error["param"]) == (400, "best_of")
        assert "best_of must equal n=1 if stream=true, got 2" in error["message"]

    def test_choices_of_several_prompts_are_numbered(self, server):
        request_body = {"prompt": ["abc", "d", "ef"], "n": 2, "max_tokens": 4, "seed": 1, "temperature": 1.0}
        complete = server.post("/v1/completions", **request_body)
        assert [choice["index"] for choice in complete["choices"]] == list(range(6))
        assert complete["usage"]["completion_tokens"] == 24
        alone = server.post("/v1/completions", **request_body | {"prompt": "d"})["choices"]
        assert [choice["text"] for choice in complete["choices"][2:4]] == [choice["text"] for choice in alone]
        texts = [""] * 6
        for event in server.events("/v1/completions", **request_body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in complete["choices"]]

    def test_usage_is_in_the_last_chunk_if_requested(self, server):
        request_body = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
        *events, last = server.events("/v1/completions", **request_body)
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6} | NOT_CACHED

    def test_usage_counts_the_cached_tokens_of_each_prompt_once(self, server):
        prompts = [[number] * 50 for number in (81, 82)]
        request_body = {"prompt": prompts, "max_tokens": 2, "n": 2, "temperature": 1}
        details = [
            server.post("/v1/completions", **request_body)["usage"]["prompt_tokens_details"] for _ in range(2)
        ]
        # Of the 49 tokens before the last one, 6 blocks of 8 are full.
        assert details == [{"cached_tokens": 0}, {"cached_tokens": 96}]
        options = {"stream_options": {"include_usage": True}}
        *_, last = server.events("/v1/completions", **request_body | options)
        assert last["usage"]["prompt_tokens_details"] == details[1]

    def test_usage_is_in_every_chunk_if_requested(self, server):
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = server.events("/v1/completions", prompt="abc", max_tokens=3, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3

    @pytest.mark.parametrize("streams", [False, True])
    def test_echo_includes_the_prompts_logprobs(self, server, streams):
        request_body = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 2}
        if streams:
            choices = [event["choices"][0] for event in server.events("/v1/completions", **request_body)]
        else:
            choices = server.post("/v1/completions", **request_body)["choices"]
        joined = lambda name: [x for choice in choices for x in choice["logprobs"][name]]
        assert "".join(choice["text"] for choice in choices).startswith("abc")
        assert joined("tokens")[:3] == ["a", "b", "c"]
        assert joined("text_offset")[:4] == [0, 1, 2, 3]
        assert joined("token_logprobs")[0] is None
        assert joined("top_logprobs")[0] is None
        assert all(value < 0 for value in joined("token_logprobs")[1:])
        assert len(joined("tokens")) == len(joined("token_logprobs")) == 5

    @pytest.mark.parametrize("more", [{}, {"best_of": 5}, {"max_tokens": 0}])
    def test_echo_with_several_completions(self, server, more):
        request_body = {"prompt": ["abc", "de"], "max_tokens": 2, "n": 2, "seed": 1}
        request_body |= {"echo": True, "logprobs": 1} | more
        choices = server.post("/v1/completions", **request_body)["choices"]
        assert len(choices) == 4
        for index, choice in enumerate(choices):
            prompt = request_body["prompt"][index // 2]
            result = choice["logprobs"]
            assert result["tokens"][: len(prompt)] == [*prompt]
            assert result["token_logprobs"][0] is None
            assert all(value < 0 for value in result["token_logprobs"][1:])
            assert {len(values) for values in result.values()} == {len(prompt) + request_body["max_tokens"]}
        if "best_of" not in more:
            streamed = [event["choices"][0] for event in server.events("/v1/completions", **request_body)]
            firsts = [choice for choice in streamed if choice["logprobs"]["token_logprobs"][0] is None]
            assert sorted(choice["index"] for choice in firsts) == [0, 1, 2, 3]
        result = server.post("/v1/completions", **request_body, prompt_logprobs=0)["choices"]
        lengths = [len(choice["prompt_logprobs"]) for choice in result]
        assert lengths == [3, 3, 2, 2]

    def test_text_offsets_count_characters(self, server):
        request_body = {"prompt": "é€a", "max_tokens": 3, "echo": True, "logprobs": 0, "temperature": 0}
        request_body |= {"allowed_token_ids": BYTES.encode("b").ids}
        (choice,) = server.post("/v1/completions", **request_body)["choices"]
        assert choice["text"] == "é€abbb"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 4, 5]
        streamed = [
            event["choices"][0]["logprobs"] for event in server.events("/v1/completions", **request_body)
        ]
        assert [i for choice in streamed for i in choice["text_offset"]] == choice["logprobs"]["text_offset"]

    def test_scored_prompt_has_finish_reason_length(self, server):
        request_body = {"prompt": "abc", "max_tokens": 0, "echo": True, "stop_token_ids": [5]}
        (choice,) = server.post("/v1/completions", **request_body, allowed_token_ids=[5])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", None)

    def test_prompt_can_be_scored_without_new_tokens(self, server):
        request_body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
        (choice,) = server.post("/v1/completions", **request_body)["choices"]
        assert choice["text"] == "abc"
        assert len(choice["logprobs"]["token_logprobs"]) == 3
        assert choice["logprobs"]["top_logprobs"] is None
        response = server.post("/v1/completions", **request_body, return_token_ids=True)
        assert response["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            **NOT_CACHED,
        }
        assert response["choices"][0]["token_ids"] == []
        usage = {"include_usage": True}
        assert (
            server.events("/v1/completions", **request_body, stream_options=usage)[-1]["usage"]
            == response["usage"]
        )

    def test_stop_and_logit_bias(self, server):
        request_body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "logit_bias": {"65": 100}}
        text = server.post("/v1/completions", **request_body)["choices"][0]["text"]
        assert (len(text), len(set(text))) == (4, 1)
        (choice,) = server.post("/v1/completions", **request_body, stop=[text[:3]])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", text[:3])
        (choice,) = server.post("/v1/completions", **request_body, stop_token_ids=[65])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 65)

    def test_server_returns_the_engines_text(self, server, engine):
        prompts = ["one", "two words", "three more words"]
        expected = engine.generate(prompts, max_tokens=10)  # The engine's thread is idle.
        for prompt, result in zip(prompts, expected, strict=True):
            response = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=10)
            assert response["choices"][0]["text"] == result.text


def test_completion_keeps_its_leading_space():
    model = one_layer_model()
    model.tokenizer = tokenizer = llama_tokenizer()
    hello, world = (tokenizer.token_to_id(f"\u2581{word}") for word in ("Hello", "world"))
    request_body = {"prompt": [1, hello], "max_tokens": 2, "allowed_token_ids": [world]}
    with run_server(small_engine(model)) as server:
        (choice,) = server.post("/v1/completions", **request_body, echo=True, logprobs=0)["choices"]
        assert choice["text"] == "<s> Hello world world"
        assert choice["logprobs"]["text_offset"] == [0, 3, 9, 15]
        (choice,) = server.post("/v1/completions", **request_body, stop=" world")["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("", " world")
        streamed = [event["choices"][0]["text"] for event in server.events("/v1/completions", **request_body)]
        assert "".join(streamed) == " world world"


@pytest.mark.parametrize("prompt", ["", [""]])
def test_empty_prompt_is_completed_from_the_bos(engine, prompt):
    tokenizer = byte_tokenizer()
    bos = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 64)])
    tokenizer.post_processor = bos
    with run_server(engine) as server:
        server.server.service.tokenizer = tokenizer
        result = server.post("/v1/completions", prompt=prompt, max_tokens=2, echo=True, return_token_ids=True)
    assert result["choices"][0]["prompt_token_ids"] == [64]
    assert result["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3} | NOT_CACHED
