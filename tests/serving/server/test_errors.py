"""Errors in the OpenAI format: invalid requests and engine failures."""

import pytest

from tests.serving.engine.faults import device_fails, reading_fails
from tests.serving.server.live_server import run_server

CHAT = "/v1/chat/completions"


TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    options = {"chat_template": file, "max_queue": 2, "max_body_bytes": 20_000}
    with run_server(engine, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def check_next_request(server):
    yield
    server.wait_until(lambda: server.is_idle)
    assert server.post(TEXT, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (TEXT, {}, 400, "prompt", "prompt: Field required"),
        (TEXT, {"prompt": "a", "temprature": 1}, 400, "temprature", "Unrecognized request argument supplied"),
        (TEXT, {"prompt": "a", "maxTokens": 1}, 400, "maxTokens", "argument supplied: maxTokens$"),
        (TEXT, {"prompt": "a", "str": 1}, 400, "str", "argument supplied: str$"),
        (
            TEXT,
            {"prompt": "a", "stream_options": {"top-k2": 1}},
            400,
            "stream_options",
            r"supplied: stream_options.top-k2$",
        ),
        (
            TEXT,
            {"prompt": "a", "temperature": -1},
            400,
            "temperature",
            r"temperature must be in \[0, 1e30\], got -1",
        ),
        (
            TEXT,
            {"prompt": "a", "temperature": "1"},
            400,
            "temperature",
            "temperature: Input should be a valid",
        ),
        (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens must be positive, got 0"),
        (
            TEXT,
            {"prompt": "a", "max_tokens": 1.5},
            400,
            "max_tokens",
            "max_tokens: Input should be a valid int",
        ),
        (TEXT, {"prompt": "a", "n": 10**9}, 400, "n", "n: Input should be less than or equal to 128"),
        (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, 400, "n", "n must be 1 with temperature 0"),
        (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop", "stop must hold no empty string"),
        (
            TEXT,
            {"prompt": "a", "stop": ["b"] * 129},
            400,
            "stop",
            "stop must contain at most 128 .*, got 129",
        ),
        (TEXT, {"prompt": "a", "bad_words": ["b"] * 1025}, 400, "bad_words", "at most 1024 .*, got 1025"),
        (
            TEXT,
            {"prompt": "a", "logit_bias": {"x": 1}},
            400,
            "logit_bias",
            "must map token ids .*, got the key 'x'",
        ),
        (TEXT, {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias", r"vocabulary.*\[999\]"),
        (TEXT, {"prompt": "a", "logprobs": 99}, 400, "logprobs", r"logprobs must be in \[0, 20\], got 99"),
        (TEXT, {"prompt": ""}, 400, "prompt", "prompt is empty"),
        (TEXT, {"prompt": []}, 400, "prompt", r"prompt must contain at least one token or prompt, got \[\]"),
        (TEXT, {"prompt": [[]]}, 400, "prompt", "prompt is empty"),
        (TEXT, {"prompt": [1, 999]}, 400, "prompt", r"prompt\[1\] must be in the vocabulary.* 999"),
        (TEXT, {"prompt": [999], "echo": True}, 400, "prompt", r"outside the vocabulary.*\[999\]"),
        (
            TEXT,
            {"prompt": "a" * 513},
            400,
            "prompt",
            "length is 512 tokens. .* requested 529 tokens .513 in the ",
        ),
        (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix: 'b' is not supported"),
        (TEXT, {"prompt": "a", "best_of": 2, "n": 3}, 400, "best_of", r"must be at least n=3, got 2"),
        (TEXT, {"prompt": "a", "best_of": 129}, 400, "best_of", "less than or equal to 128"),
        (
            TEXT,
            {"prompt": "a", "best_of": 2, "temperature": 0},
            400,
            "best_of",
            "best_of must equal n=1 if temperature=0, got 2",
        ),
        (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "model", "The model `gpt-9` does not exist"),
        (CHAT, {"messages": []}, 400, "messages", "messages: List should have at least 1 item"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ""}]},
            400,
            "messages",
            "messages must contain at least one token",
        ),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "messages", "messages.0.role: Field required"),
        (CHAT, {"messages": [{"role": "system", "content": "a"}]}, 400, "messages", "no systems"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            422,
            "messages",
            r"messages\[0\].content: Only text content is supported, got type 'image_url'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            400,
            "top_logprobs",
            "top_logprobs requires logprobs=true",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 3},
            400,
            "max_tokens",
            "max_tokens=2 contradicts max_completion_tokens=3",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
            400,
            "max_completion_tokens",
            "must be positive, got 0",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs",
            "chat_template_kwargs cannot contain",
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            422,
            "tools",
            "The tool-call format of this model is unknown",
        ),
        ("/detokenize", {"tokens": [999]}, 400, "tokens", r"outside the vocabulary.*\[999\]"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            400,
            "chat_template",
            "'x' is not supported",
        ),
    ],
)
def test_invalid_request_names_its_parameter(server, path, body, status, param, message):
    response_status, error = server.error(path, **body)
    assert (response_status, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])
    if path in (TEXT, CHAT):  # An early error is not sent as a stream.
        assert server.error(path, **body, stream=True) == (response_status, error)


@pytest.mark.parametrize("options", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_chat_without_a_template_names_the_option(engine, options):
    with run_server(engine) as server:
        status, error = server.error(CHAT, messages=[{"role": "user", "content": "a"}], **options)
    assert (status, error["param"]) == (422, "messages")
    assert error["message"] == "The model has no chat template. Start the server with --chat-template FILE."


class TestEngineFailures:
    @pytest.mark.parametrize("failure", [device_fails, reading_fails])
    def test_failed_step_is_a_500_without_a_traceback(self, server, engine, failure):
        with failure(engine):
            status, error = server.error(TEXT, prompt="abc", max_tokens=5)
        assert status == 500
        assert error["type"] == "internal_error"
        assert "Traceback" not in error["message"]

    def test_failed_stream_ends_with_an_error_event(self, server, engine):
        with reading_fails(engine, call_number=6):
            *events, last = server.events(TEXT, prompt="abc", max_tokens=200, logprobs=0)
        assert events
        assert last["error"]["type"] == "internal_error"

    def test_internal_error_reveals_no_details(self, server):
        tokenizer, server.server.service.tokenizer = server.server.service.tokenizer, None
        try:
            status, error = server.error(TEXT, prompt="abc")
        finally:
            server.server.service.tokenizer = tokenizer
        assert (status, error["message"]) == (500, "Internal server error")
