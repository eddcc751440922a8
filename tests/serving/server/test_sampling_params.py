"""Request parameters of the OpenAI API and vLLM: their effects, and the rejection of unsupported ones."""

import pytest

from jattn.serving.server.protocol import ChatCompletionBody, CompletionBody
from tests.serving.server.live_server import run_server
from tests.serving.tiny import BYTES

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


USER = {"role": "user", "content": "hi"}


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with run_server(engine, chat_template=file, tool_call_parser="hermes") as server:
        yield server


def generate(server, path=TEXT, **body):
    """Return the text of a response with a fixed seed."""
    prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
    (choice,) = server.post(path, **{"seed": 1, "max_tokens": 12} | prompt_body | body)["choices"]
    return choice["text"] if path == TEXT else choice["message"]["content"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
class TestSampling:
    def test_allowed_tokens_and_bad_words(self, server, path):
        ids = BYTES.encode("xyz").ids
        text = generate(server, path, allowed_token_ids=ids)
        assert set(text) <= set("xyz")
        text_without_bad_word = generate(server, path, allowed_token_ids=ids, bad_words=[text[:2]])
        assert text[:2] not in text_without_bad_word

    def test_special_token_options_are_accepted(self, server, path):
        """The tiny model has no special tokens, so the text does not change."""
        plain = generate(server, path)
        assert generate(server, path, skip_special_tokens=False) == plain
        assert generate(server, path, spaces_between_special_tokens=False) == plain

    def test_values_without_effect_change_nothing(self, server, path):
        ignored = {"priority": 0, "use_beam_search": False, "length_penalty": 1.0, "logits_processors": None}
        ignored |= {
            "cache_salt": None,
            "user": "me",
            "metadata": {"a": "b"},
            "store": True,
            "truncate_prompt_tokens": 500,
        }
        ignored |= {"service_tier": "auto", "stream_options": None, "bad_words": [], "top_k": -1, "min_p": 0}
        assert generate(server, path, **ignored) == generate(server, path)

    def test_request_id_is_part_of_the_response_id(self, server, path):
        prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        response = server.post(path, **prompt_body, max_tokens=1, request_id="mine")
        assert response["id"] in ("cmpl-mine", "chatcmpl-mine")

    def test_truncation_keeps_the_last_tokens(self, server, path):
        long_body = (
            {"prompt": "0123456789"} if path == TEXT else {"messages": [USER | {"content": "0123456789"}]}
        )
        response = server.post(
            path, **long_body, truncate_prompt_tokens=4, max_tokens=1, return_token_ids=True
        )
        ids = (response if path == CHAT else response["choices"][0])["prompt_token_ids"]
        assert ids == BYTES.encode("6789" if path == TEXT else "89;>").ids
        assert (
            server.post(path, **long_body, truncate_prompt_tokens=-1, max_tokens=1)["usage"]["prompt_tokens"]
            > 4
        )

    def test_token_ids_in_complete_and_streamed_responses(self, server, path):
        prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        request_body = prompt_body | {"max_tokens": 6, "seed": 3, "return_token_ids": True}
        (choice,) = server.post(path, **request_body, logprobs=1 if path == TEXT else True)["choices"]
        assert len(choice["token_ids"]) == 6
        events = server.events(path, **request_body)
        pieces = [event["choices"][0] for event in events]
        assert [i for piece in pieces for i in piece.get("token_ids", ())] == choice["token_ids"]
        prompts = [
            (event if path == CHAT else event["choices"][0]).get("prompt_token_ids") for event in events
        ]
        assert prompts[0] is not None
        assert not any(prompts[1:])

    def test_tokens_as_token_ids(self, server, path):
        prompt_body = (
            {"prompt": "abc", "logprobs": 2} if path == TEXT else {"messages": [USER], "logprobs": True}
        )
        request_body = prompt_body | {
            "max_tokens": 3,
            "seed": 3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        (choice,) = server.post(path, **request_body)["choices"]
        logprobs = choice["logprobs"]
        names = (
            logprobs["tokens"] if path == TEXT else [position["token"] for position in logprobs["content"]]
        )
        assert names == [f"token_id:{i}" for i in choice["token_ids"]]

    def test_prompt_logprobs(self, server, path):
        prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        response = server.post(path, **prompt_body, max_tokens=1, prompt_logprobs=2)
        first, *positions = (response["choices"][0] if path == TEXT else response)["prompt_logprobs"]
        assert first is None
        assert len(positions) == response["usage"]["prompt_tokens"] - 1
        for position in positions:
            assert {1, 2} <= {logprob["rank"] for logprob in position.values()}
            for token, logprob in position.items():
                assert (logprob["logprob"] < 0, logprob["decoded_token"]) == (
                    True,
                    BYTES.decode([int(token)]),
                )

    def test_continuous_usage_stats(self, server, path):
        prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = server.events(path, **prompt_body, max_tokens=5, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (counts, counts[-1], last["choices"]) == (sorted(counts), 5, [])
        assert last["usage"] == events[-1]["usage"]

    def test_seed_of_minus_one_means_no_seed(self, server, path):
        assert len({generate(server, path, seed=-1) for _ in range(3)}) > 1


UNSUPPORTED = {
    **{
        "priority": 1,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "logits_processors": ["a"],
        "cache_salt": "a",
    },
    **{"kv_transfer_params": {}, "vllm_xargs": {}, "guided_whitespace_pattern": "a", "no_such": 1},
    **{"prompt_logprobs": 21, "allowed_token_ids": [], "bad_words": [""], "truncate_prompt_tokens": -2},
    "stream_options": {"include_usage": True},
}


UNSUPPORTED_CHAT = {
    **{"echo": True, "include_reasoning": False, "modalities": ["text", "audio"], "audio": {"voice": "a"}},
    **{
        "prediction": {},
        "functions": [],
        "function_call": "auto",
        "verbosity": "low",
        "chat_template": "a",
        "moderation": {},
    },
    **{"web_search_options": {}, "mm_processor_kwargs": {}, "suffix": "a", "best_of": 2},
}


UNSUPPORTED_TEXT = {
    "suffix": "a",
    "messages": [USER],
    "tools": [],
    "max_completion_tokens": 5,
    "prompt_embeds": "a",
}


BODIES = {TEXT: {"prompt": "abc", "max_tokens": 3}, CHAT: {"messages": [USER], "max_tokens": 3}}


BODY_TYPES = {TEXT: CompletionBody, CHAT: ChatCompletionBody}


class TestIgnoredValues:
    @pytest.mark.parametrize("path", [TEXT, CHAT])
    def test_null_is_treated_as_missing(self, server, path):
        """Some clients send null for every unset field."""
        nulls = dict.fromkeys(BODY_TYPES[path].model_fields)
        expected = server.post(path, **BODIES[path] | {"seed": 3})["choices"]
        assert server.post(path, **nulls | BODIES[path] | {"seed": 3})["choices"] == expected
        options = {"include_usage": None, "continuous_usage_stats": True}
        (*_, last) = server.events(path, **BODIES[path], stream_options=options)
        assert last["usage"]["completion_tokens"] == 3
        assert last["choices"]

    def test_required_field_must_not_be_null(self, server):
        status, error = server.error(TEXT, prompt=None)
        assert (status, error["param"], error["message"]) == (400, "prompt", "prompt: Field required")

    @pytest.mark.parametrize(
        "request_body",
        [
            {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "prompt_cache_options": {"a": 1}},
            {"verbosity": "medium", "modalities": ["text"], "service_tier": "auto"},
            {"logprobs": False, "top_logprobs": 0},
            {"documents": [], "tools": []},
        ],
    )
    def test_defaults_and_hints_are_ignored(self, server, request_body):
        expected = server.post(CHAT, **BODIES[CHAT], seed=3)["choices"]
        assert server.post(CHAT, **BODIES[CHAT], seed=3, **request_body)["choices"] == expected


class TestUnsupportedParameters:
    @pytest.mark.parametrize(
        ("path", "name", "value"),
        [
            *((TEXT, *item) for item in (UNSUPPORTED | UNSUPPORTED_TEXT).items()),
            *((CHAT, *item) for item in (UNSUPPORTED | UNSUPPORTED_CHAT).items()),
        ],
    )
    def test_unsupported_parameter_is_named(self, server, path, name, value):
        prompt_body = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        status, error = server.error(path, **prompt_body, **{name: value})
        assert (status, error["param"]) == (400, name), error
        assert name in error["message"]

    def test_combination_of_parameters_is_rejected(self, server):
        status, error = server.error(TEXT, prompt="a", stream=True, prompt_logprobs=1)
        assert (status, error["param"]) == (400, "prompt_logprobs")
        assert "prompt_logprobs is not supported with stream=true" in error["message"]
        spaces = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        status, error = server.error(TEXT, prompt="a", **spaces)
        assert (status, error["param"]) == (400, "spaces_between_special_tokens")


@pytest.mark.parametrize(("path", "param"), [(TEXT, "prompt"), (CHAT, "messages")])
class TestContextLength:
    def test_request_may_fill_the_context(self, server, path, param):
        prompt_body = {"prompt": "a" * 509} if path == TEXT else {"messages": [USER | {"content": "a" * 501}]}
        response = server.post(path, **prompt_body, max_tokens=3, seed=1, ignore_eos=True)
        assert response["usage"]["total_tokens"] == 512

    @pytest.mark.parametrize("num_tokens", [3, 12])
    def test_request_that_exceeds_the_context_is_rejected(self, server, path, param, num_tokens):
        length = 513 - num_tokens
        text = "a" * (length if path == TEXT else length - 8)
        prompt_body = {"prompt": text} if path == TEXT else {"messages": [USER | {"content": text}]}
        status, error = server.error(path, **prompt_body, max_tokens=num_tokens)
        message = f"maximum context length is 512 tokens. However, you requested 513 tokens ({length} in the"
        assert f"{message} {param}, {num_tokens} in the completion)" in error["message"]
        assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")


def test_prompt_that_fills_the_context_is_rejected(server):
    status, error = server.error(CHAT, messages=[USER | {"content": "a" * 504}])
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_top_logprobs_out_of_range_is_named(server):
    status, error = server.error(CHAT, messages=[USER], logprobs=True, top_logprobs=21)
    assert (status, error["param"]) == (400, "top_logprobs")
    assert "top_logprobs must be in [0, 20], got 21" in error["message"]
