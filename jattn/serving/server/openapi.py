"""`GET /openapi.json`: a description of the server's endpoints, for generating and testing clients."""

from typing import Any

from pydantic.json_schema import models_json_schema

from jattn.serving.server.protocol import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeCompletionBody,
)
from jattn.version import version_of

# Body types of each POST endpoint.
BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatCompletionBody,),
    "/tokenize": (TokenizeCompletionBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}
POST_WITHOUT_BODY = ("/reset_prefix_cache",)
GET_PATHS = ("/v1/models", "/version", "/health", "/ping", "/load", "/metrics")
SCHEMAS = "#/components/schemas/"


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 description."""
    body_types = [body_type for body_types in BODIES.values() for body_type in body_types]
    _, schemas = models_json_schema(
        [(body_type, "validation") for body_type in body_types], ref_template=SCHEMAS + "{model}"
    )
    info = {"version": version_of("jattn"), "title": "jattn serve"}
    paths = {path: {"post": _operation(path, body_types)} for path, body_types in BODIES.items()}
    paths |= {path: {"post": _operation(path, ())} for path in POST_WITHOUT_BODY}
    paths |= {path: {"get": _operation(path, ())} for path in GET_PATHS}
    components = {"schemas": schemas["$defs"]}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(path: str, body_types: tuple[Any, ...]) -> dict[str, Any]:
    responses = {"200": {"description": "A response in OpenAI's format, or text"}}
    responses["default"] = {"description": "An error in OpenAI's format"}
    operation: dict[str, Any] = {"operationId": path.strip("/").replace("/", "_"), "responses": responses}
    if body_types:
        schemas = [{"$ref": SCHEMAS + body_type.__name__} for body_type in body_types]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
