"""Answers of a given form, by each of the ways to ask for one."""

import json
import re

import pytest

from tests.serving.server.live_server import running

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
    with running(engine, chat_template=file) as server:
        yield server


def is_person(text):
    return 0 <= json.loads(text)["age"] <= 99


def is_one_of(text):
    return text in ("yes", "no")


BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": BY_SCHEMA}, is_person),
        ({"guided_json": SCHEMA}, is_person),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_person),
        ({"guided_regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
        ({"guided_choice": ["yes", "no"]}, is_one_of),
        ({"guided_grammar": 'start: "yes" | "no"'}, is_one_of),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, is_one_of),
    ],
)
def test_a_text_has_the_form(server, asked, fits, streams):
    asked |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 1}
    if streams:
        _, *events = server.events("/v1/chat/completions", **asked)
        choices = [event["choices"][0] for event in events]
        text, reason = "".join(one["delta"]["content"] for one in choices), choices[-1]["finish_reason"]
    else:
        (choice,) = server.post("/v1/chat/completions", **asked)["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert fits(text)
    assert reason == "stop"


def test_any_object_is_json_as_far_as_it_goes(server):
    asked = {"prompt": "abc", "response_format": {"type": "json_object"}, "seed": 4, "max_tokens": 8}
    assert server.post(TEXT, **asked)["choices"][0]["text"].startswith("{")
    assert server.post(TEXT, prompt="a", response_format={"type": "text"}, max_tokens=2)


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        (
            {"guided_json": "{"},
            "guided_json",
            "structured_outputs must be a constraint that llguidance supports",
        ),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "Invalid type: nothing"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "have a json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "Input should be 'text'"),
        ({"guided_choice": []}, "guided_choice", r"choice must be a list of strings, got \[\]"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "be the only one of its kind"),
        ({"structured_outputs": {}}, "structured_outputs", r"set exactly one of .*, got \[\]"),
    ],
)
def test_what_is_no_form_is_named(server, asked, param, message):
    status, error = server.error(TEXT, prompt="a", **asked)
    assert (status, error["param"]) == (400, param), error
    assert re.search(message, error["message"])
    server.until(lambda: server.is_idle)
