"""What the server says that it takes is what it takes."""

import json

import pytest

from jattn.serving.server.app import ROUTES
from jattn.serving.server.openapi import openapi
from tests.serving.server.live_server import running


def test_every_path_is_described():
    described = set(openapi()["paths"])
    others = {"/openapi.json", "/v1/models/", "/v1/models/{name:path}"}
    assert described == {route.path for route in ROUTES} - others


def test_all_that_is_referred_to_is_there():
    told = openapi()
    text = json.dumps(told)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(told["components"]["schemas"])
    assert {"CompletionBody", "ChatCompletionBody", "TokenizeChatBody", "Tool"} <= names


@pytest.mark.kernels
def test_it_is_served(engine):
    with running(engine) as server:
        status, _, told = server.ask("GET", "/openapi.json")
    assert (status, told["openapi"]) == (200, "3.1.0")
    body = told["components"]["schemas"]["CompletionBody"]
    assert (body["required"], body["additionalProperties"]) == (["prompt"], False)
