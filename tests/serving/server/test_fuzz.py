"""Requests drawn from what the server says that it takes: each is answered, and so is the next one."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jattn.serving.server.chat_completions import OFF as CHAT_OFF
from jattn.serving.server.openapi import openapi
from jattn.serving.server.sampling_params import OFF
from tests.serving.server.live_server import parsed, running
from tests.serving.server.schema_strategies import JUNK, objects

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: "CompletionBody", CHAT: "ChatCompletionBody", "/detokenize": "DetokenizeBody"}
BODIES |= {"/tokenize": "TokenizeChatBody"}
SCHEMAS = openapi()["components"]["schemas"]
WHOLE = {TEXT: Completion, CHAT: ChatCompletion}
FEW = st.sampled_from([1, 2, 3, 4, 1, 2, 0, -1])
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    "{{ tools }}{{ documents }}{{ reasoning_effort }}{% for t in tools or [] %}<tool_call>{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
USUAL = {TEXT: ("prompt", "abc"), CHAT: ("messages", MESSAGES), "/tokenize": ("messages", MESSAGES)}
USUAL |= {"/detokenize": ("tokens", [1, 2])}


@st.composite
def requests(draw):
    """A path and a body: as the schema has it, mostly short, and once in a while with junk in one place."""
    path = draw(st.sampled_from([TEXT, TEXT, CHAT, CHAT, "/tokenize", "/detokenize"]))
    seldom = st.integers(0, 3).map(lambda number: number == 3)
    body = draw(objects(SCHEMAS[BODIES[path]], SCHEMAS)) | {"model": None}
    if not draw(seldom):
        body = {name: value for name, value in body.items() if name not in OFF | CHAT_OFF}
    if path in WHOLE:
        body |= {name: draw(FEW) for name in ("n", "best_of", "max_completion_tokens") if name in body}
        body["max_tokens"] = draw(FEW)
    if not draw(seldom):
        name, usual = USUAL[path]
        body[name] = usual
    if draw(seldom):
        body[draw(st.sampled_from(sorted(body)))] = draw(JUNK)
    if path in WHOLE and body["max_tokens"] is None:  # it would go on to the end of the context
        body["max_tokens"] = 1
    return path, body


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with running(engine, chat_template=file) as server:
        yield server


NEXT = {"prompt": "abc", "max_tokens": 2, "temperature": 0}


# Beartype's checks, in the server's threads, look at random places of lists while the next request is drawn.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.kernels
@settings(max_examples=400)
@given(requests())
@example((CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}, "max_tokens": 1}))
@example((TEXT, {"prompt": "\ud800", "max_tokens": 1}))
def test_whatever_is_asked_is_answered_and_so_is_the_next(server, asked):
    path, body = asked
    status, headers, answer = server.ask("POST", path, json.dumps(body))
    if status != 200:
        assert (status in (400, 404, 422), set(answer["error"])) == (
            True,
            {"message", "type", "param", "code"},
        ), answer
        assert (answer["error"]["type"], "Traceback" in answer["error"]["message"]) == (
            "not_found_error" if status == 404 else "invalid_request_error",
            False,
        )
    elif path in WHOLE and headers["content-type"].startswith("text/event-stream"):
        for event in parsed(answer):
            assert "error" not in event, event
            if path == CHAT:
                ChatCompletionChunk.model_validate(event, strict=True)
    elif path in WHOLE:
        WHOLE[path].model_validate(answer, strict=True)
    server.until(lambda: server.is_idle)
    assert server.post(TEXT, **NEXT)["usage"]["completion_tokens"] == 2
