"""The OpenAPI description matches the routes."""

import json

import pytest

from jattn.serving.server.app import ROUTES
from jattn.serving.server.openapi import openapi
from tests.serving.server.live_server import run_server


def test_every_route_is_described():
    described = set(openapi()["paths"])
    undescribed = {"/openapi.json", "/v1/models/", "/v1/models/{name:path}"}
    assert described == {route.path for route in ROUTES} - undescribed


def test_every_referenced_schema_exists():
    description = openapi()
    text = json.dumps(description)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(description["components"]["schemas"])
    assert {"CompletionBody", "ChatCompletionBody", "TokenizeChatBody", "Tool"} <= names


@pytest.mark.kernels
def test_server_returns_the_description(engine):
    with run_server(engine) as server:
        status, _, description = server.request("GET", "/openapi.json")
    assert (status, description["openapi"]) == (200, "3.1.0")
    body = description["components"]["schemas"]["CompletionBody"]
    assert (body["required"], body["additionalProperties"]) == (["prompt"], False)
