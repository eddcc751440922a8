"""Random requests drawn from the OpenAPI description: each gets a valid response, and so does the next."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jattn.serving.server.chat_completions import CHAT_UNSUPPORTED
from jattn.serving.server.openapi import openapi
from jattn.serving.server.sampling_params import UNSUPPORTED
from tests.serving.server.live_server import parse_events, run_server
from tests.serving.server.schema_strategies import JUNK, objects

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: "CompletionBody", CHAT: "ChatCompletionBody", "/detokenize": "DetokenizeBody"}
BODIES |= {"/tokenize": "TokenizeChatBody"}
SCHEMAS = openapi()["components"]["schemas"]
RESPONSE_TYPES = {TEXT: Completion, CHAT: ChatCompletion}
SMALL_INTEGERS = st.sampled_from([1, 2, 3, 4, 1, 2, 0, -1])
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    "{{ tools }}{{ documents }}{{ reasoning_effort }}{% for t in tools or [] %}<tool_call>{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
VALID_FIELD = {TEXT: ("prompt", "abc"), CHAT: ("messages", MESSAGES), "/tokenize": ("messages", MESSAGES)}
VALID_FIELD |= {"/detokenize": ("tokens", [1, 2])}


@st.composite
def requests(draw):
    """Draw a path and a body that follows its schema, sometimes with one junk value."""
    path = draw(st.sampled_from([TEXT, TEXT, CHAT, CHAT, "/tokenize", "/detokenize"]))
    one_in_four = st.integers(0, 3).map(lambda number: number == 3)
    body = draw(objects(SCHEMAS[BODIES[path]], SCHEMAS)) | {"model": None}
    if not draw(one_in_four):
        body = {name: value for name, value in body.items() if name not in UNSUPPORTED | CHAT_UNSUPPORTED}
    if path in RESPONSE_TYPES:
        body |= {
            name: draw(SMALL_INTEGERS) for name in ("n", "best_of", "max_completion_tokens") if name in body
        }
        body["max_tokens"] = draw(SMALL_INTEGERS)
    if not draw(one_in_four):
        name, value = VALID_FIELD[path]
        body[name] = value
    if draw(one_in_four):
        body[draw(st.sampled_from(sorted(body)))] = draw(JUNK)
    if (
        path in RESPONSE_TYPES and body["max_tokens"] is None
    ):  # It would generate up to the end of the context.
        body["max_tokens"] = 1
    return path, body


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with run_server(engine, chat_template=file) as server:
        yield server


NEXT = {"prompt": "abc", "max_tokens": 2, "temperature": 0}


# Beartype checks random elements of lists in the server's threads while the next request is drawn.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.kernels
@settings(max_examples=250)
@given(requests())
@example((CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}, "max_tokens": 1}))
@example((TEXT, {"prompt": "\ud800", "max_tokens": 1}))
def test_any_request_gets_a_valid_response_and_so_does_the_next(server, request_body):
    path, body = request_body
    status, headers, answer = server.request("POST", path, json.dumps(body))
    if status != 200:
        assert (status in (400, 404, 422), set(answer["error"])) == (
            True,
            {"message", "type", "param", "code"},
        ), answer
        assert (answer["error"]["type"], "Traceback" in answer["error"]["message"]) == (
            "not_found_error" if status == 404 else "invalid_request_error",
            False,
        )
    elif path in RESPONSE_TYPES and headers["content-type"].startswith("text/event-stream"):
        for event in parse_events(answer):
            assert "error" not in event, event
            if path == CHAT:
                ChatCompletionChunk.model_validate(event, strict=True)
    elif path in RESPONSE_TYPES:
        RESPONSE_TYPES[path].model_validate(answer, strict=True)
    server.wait_until(lambda: server.is_idle)
    assert server.post(TEXT, **NEXT)["usage"]["completion_tokens"] == 2
