"""Structured outputs, by each request parameter that sets a constraint."""

import json
import re

import pytest

from tests.serving.server.live_server import run_server

TEXT = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text("{{ messages[-1].content }}")
    with run_server(engine, chat_template=file) as server:
        yield server


def is_person(text):
    return 0 <= json.loads(text)["age"] <= 99


def is_yes_or_no(text):
    return text in ("yes", "no")


JSON_SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("request_body", "is_valid"),
    [
        ({"response_format": JSON_SCHEMA_FORMAT}, is_person),
        ({"guided_json": SCHEMA}, is_person),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_person),
        ({"guided_regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
        ({"guided_choice": ["yes", "no"]}, is_yes_or_no),
        ({"guided_grammar": 'start: "yes" | "no"'}, is_yes_or_no),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, is_yes_or_no),
    ],
)
def test_output_satisfies_the_constraint(server, request_body, is_valid, stream):
    request_body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 1}
    if stream:
        _, *events = server.events("/v1/chat/completions", **request_body)
        choices = [event["choices"][0] for event in events]
        text, reason = "".join(choice["delta"]["content"] for choice in choices), choices[-1]["finish_reason"]
    else:
        (choice,) = server.post("/v1/chat/completions", **request_body)["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert is_valid(text)
    assert reason == "stop"


def test_json_object_output_begins_with_a_brace(server):
    request_body = {"prompt": "abc", "response_format": {"type": "json_object"}, "seed": 4, "max_tokens": 8}
    assert server.post(TEXT, **request_body)["choices"][0]["text"].startswith("{")
    assert server.post(TEXT, prompt="a", response_format={"type": "text"}, max_tokens=2)


@pytest.mark.parametrize(
    ("request_body", "param", "message"),
    [
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        (
            {"guided_json": "{"},
            "guided_json",
            "is not supported by llguidance",
        ),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "Invalid type: nothing"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have a json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "Input should be 'text'"),
        ({"guided_choice": []}, "guided_choice", r"choice must be a list of strings, got \[\]"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_regex",
            "guided_regex cannot be combined with guided_choice",
        ),
        ({"structured_outputs": {}}, "structured_outputs", r"set exactly one of .*, got \[\]"),
    ],
)
def test_invalid_constraint_names_its_parameter(server, request_body, param, message):
    status, error = server.error(TEXT, prompt="a", **request_body)
    assert (status, error["param"]) == (400, param), error
    assert re.search(message, error["message"])
    server.wait_until(lambda: server.is_idle)
